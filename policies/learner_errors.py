"""Errors of the learner.

    LearnerError
    ├── LearnerAlreadyOpen     a process has a second learner
    ├── LearnerNotOpen         step, snapshot or save before open or after close
    ├── RowUnusable            a row of a batch cannot be trained (token id, first token trained, lengths)
    ├── CheckpointUnreadable   a checkpoint directory cannot be used: it is of another format, or damaged
    │   └── CheckpointDamaged  files of it are missing, truncated or altered: use an older one
    └── NonFiniteRun           too many steps in a row had a non-finite gradient

All can be pickled, and have one message that names the file or the setting to change. A model directory that cannot be
used raises `headrace.policies.errors.ModelInvalid`, as in the engine.
"""

from __future__ import annotations


class LearnerError(Exception):
    """Base of all errors that a learner raises itself."""


class LearnerAlreadyOpen(LearnerError):
    """The process has a learner already; Megatron and the default process group are process-wide."""


class LearnerNotOpen(LearnerError):
    """The learner has no model: `open` was not called, failed, or `close` was."""


class RowUnusable(LearnerError):
    """A row does not fit the model or cannot be trained as masked."""


class CheckpointUnreadable(LearnerError):
    """A directory is not a complete checkpoint of a known format."""


class CheckpointDamaged(CheckpointUnreadable):
    """Files of a checkpoint directory are missing, truncated, altered, or contradict each other."""


class NonFiniteRun(LearnerError):
    """`max_skipped_in_a_row` steps in a row were skipped: the run diverged."""
