"""Verdicts about slow rollouts, measured on simulated runs with planted causes."""
