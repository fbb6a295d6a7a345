"""What is told and checked of a run by reading its ledger: verification, reports, exports."""
