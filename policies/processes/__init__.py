"""Processes of engines: started, watched, ended with what started them."""
