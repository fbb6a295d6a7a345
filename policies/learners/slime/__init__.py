"""Learner that trains with slime: its arguments, its data and its checks. The Ray code is in `actors.training`."""
