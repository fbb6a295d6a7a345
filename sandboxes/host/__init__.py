"""What a program of headrace needs of its host: private folders, key files, environments of child processes."""
