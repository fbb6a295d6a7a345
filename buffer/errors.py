"""Errors of the buffer. All are picklable (plain message) and name the knob or the fix.

ReplayError
├── StaleEpoch            a call of an older learner incarnation: fenced
├── LeaseError            a batch that is not leased to the caller, or committed out of order
├── BatchUntrainable      a batch ended the learner as often as it may be tried
├── VersionMismatch       a version that is not the one the ledger expects next
├── DataExhausted         the passes over the data are done, and no batch can be filled any more
├── LedgerError
│   ├── LedgerRefused     the file cannot be used here: network file system, full disk, other run, newer schema, other
│   │                     tasks
│   ├── LedgerInUse       another process holds the ledger
│   ├── LedgerBroken      a write failed: the store has ended
│   └── LedgerMismatch    ledger and checkpoint tell different histories
│       ├── CheckpointMissing  the ledger recorded a checkpoint, and the learner has none
│       ├── LedgerBehind  the checkpoint holds batches that the ledger does not know
│       └── CheckpointMissing  the ledger recorded a checkpoint, and the learner has none
├── TaskNotParked         a task that is to be released is not parked
├── ExportRefused         the place or the tools for an export are not there
└── CodecError            bytes that are no trajectory
"""

from __future__ import annotations


class ReplayError(Exception):
    """Any error of this folder."""


class StaleEpoch(ReplayError):
    """A newer learner incarnation is open; the caller must end."""


class LeaseError(ReplayError):
    """The batch is not leased to the caller, or an older lease must be committed first."""


class BatchUntrainable(ReplayError):
    """No learner gets through a step on this batch: the run ends, and goes on without it or with another learner."""


class VersionMismatch(ReplayError):
    """The version does not follow from the ledger's own history."""


class TaskNotParked(ReplayError):
    """A task that is to be released is not parked."""


class DataExhausted(ReplayError):
    """No more groups are opened, and what is left does not fill a batch: the run is at its end."""


class LedgerError(ReplayError):
    """The ledger on disk."""


class LedgerRefused(LedgerError):
    """The ledger cannot be used for this run; nothing was changed."""


class LedgerInUse(LedgerError):
    """Another live process has this ledger open."""


class LedgerBroken(LedgerError):
    """A write failed: what is on disk is consistent, but this store must not answer any more."""


class LedgerMismatch(LedgerError):
    """The ledger and a checkpoint tell different histories; nothing was changed."""


class CheckpointMissing(LedgerMismatch):
    """The ledger recorded a checkpoint, and a learner would begin without one; nothing was changed."""


class LedgerBehind(LedgerMismatch):
    """The checkpoint holds trained batches that the ledger does not know."""


class ExportRefused(ReplayError):
    """The export cannot be written; nothing is left of it."""


class CodecError(ReplayError):
    """The bytes are not a trajectory of a known format, or the trajectory cannot be encoded."""
