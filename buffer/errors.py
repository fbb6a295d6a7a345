"""Errors of the buffer. All are picklable (plain message) and name the setting to change or the fix.

ReplayError
├── StaleEpoch            a call from an older learner incarnation
├── LeaseError            a batch that is not leased to the caller, or committed out of order
├── BatchUntrainable      a batch was tried as often as allowed, and every step on it failed
├── VersionMismatch       a version other than the one that the ledger expects next
├── DataExhausted         the passes over the data are done, and no batch can be filled any more
├── LedgerError
│   ├── LedgerRefused     the file cannot be used here: network file system, another run, newer schema, other tasks
│   │   └── LedgerDiskFull  the disk has too little space: transient
│   ├── LedgerInUse       another process holds the ledger
│   ├── LedgerBroken      a write failed, and the store has ended
│   └── LedgerMismatch    ledger and checkpoint have different histories
│       ├── CheckpointMissing  the ledger recorded a checkpoint, but the learner has none
│       ├── CheckpointLate  a replaced learner finished the checkpoint after a newer epoch had been opened
│       └── LedgerBehind  the checkpoint contains batches that are not in the ledger
├── TaskNotParked         a task that is to be released is not parked
├── ExportRefused         the export cannot be written: no pyarrow, or a folder that cannot be used
└── CodecError            bytes that are not a trajectory
TaskFileError             a task file cannot be used; the message is one line with the file, line number, key and fix
"""

from __future__ import annotations


class ReplayError(Exception):
    """Base class of the errors of the buffer and its ledger."""


class StaleEpoch(ReplayError):
    """A newer learner incarnation is open; the caller must stop."""


class LeaseError(ReplayError):
    """The batch is not leased to the caller, or an older lease must be committed first."""


class BatchUntrainable(ReplayError):
    """Every step on this batch failed: the run ends, and can be resumed without the batch or after a fix."""


class VersionMismatch(ReplayError):
    """The version does not follow from the ledger's own history."""


class TaskNotParked(ReplayError):
    """A task that is to be released is not parked."""


class DataExhausted(ReplayError):
    """No more groups can be opened, and the remaining rollouts do not fill a batch: the run is complete."""


class LedgerError(ReplayError):
    """Base class for errors of the on-disk ledger."""


class LedgerRefused(LedgerError):
    """The ledger cannot be used for this run; nothing was changed."""


class LedgerDiskFull(LedgerRefused):
    """The disk has no space for the next transactions; nothing was changed."""


class LedgerInUse(LedgerError):
    """Another live process has this ledger open."""


class LedgerBroken(LedgerError):
    """A write failed: the files on disk are consistent, but this store must not answer any more calls."""


class LedgerMismatch(LedgerError):
    """The ledger and a checkpoint have different histories; nothing was changed."""


class CheckpointMissing(LedgerMismatch):
    """The ledger recorded a checkpoint, but a learner was about to begin without one; nothing was changed."""


class CheckpointLate(LedgerMismatch):
    """A replaced learner finished the checkpoint after a newer epoch had been opened; nothing was changed."""


class LedgerBehind(LedgerMismatch):
    """The checkpoint contains trained batches that are not in the ledger."""


class ExportRefused(ReplayError):
    """The export cannot be written; partial output has been removed."""


class CodecError(ReplayError):
    """The bytes are not a trajectory of a known format, or the trajectory cannot be encoded."""


class TaskFileError(Exception):
    """A task file cannot be used. `str()` is one line: `FILE:LINE: key: error; fix`."""
