"""Checks of `scripts/gpu_check`: what only a device can show, in a suite that fits a short loan of one."""
