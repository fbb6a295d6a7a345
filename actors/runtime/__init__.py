"""What actors run on: Ray or one process, pools of sandboxes, and simulated parts."""
