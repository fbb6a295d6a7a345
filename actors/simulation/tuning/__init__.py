"""Tunes the acceptance rule, staleness bound and slots by simulating runs with recorded durations."""
