"""Audits of a run by reading its ledger: verification, reports, exports."""
