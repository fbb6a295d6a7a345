"""Storage of a run that outlives the control node: ledger copies, their restoration, and the incarnation fence."""
