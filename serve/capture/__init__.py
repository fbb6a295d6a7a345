"""What is kept of a session: the token trie, its events, its log, its rows."""
