"""Acceptance rule, staleness bound and slots from recorded runs, by trying them in virtual time."""
