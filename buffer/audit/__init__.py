"""Audits of a run, made by reading its ledger: verification, reports and exports."""
