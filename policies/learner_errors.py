"""Errors of the learner.

    LearnerError
    ├── LearnerAlreadyOpen     a second learner in one process
    ├── LearnerNotOpen         step, snapshot or save before open or after close
    ├── RowUnusable            a row of a batch cannot be trained (token id, first token trained, lengths)
    ├── CheckpointUnreadable   a checkpoint directory cannot be used: it is of another format, or damaged
    │   └── CheckpointDamaged  files of it are missing, cut off or altered: an older one may do
    └── NonFiniteRun           too many steps in a row had a non-finite gradient

Each carries one message that names the file or the setting to change, and survives pickling. A model directory that
cannot be used is a `headrace.policies.errors.ModelInvalid`, for the learner as for the engine.
"""

from __future__ import annotations


class LearnerError(Exception):
    """Base of all errors a learner raises itself."""


class LearnerAlreadyOpen(LearnerError):
    """Megatron and the default process group belong to the process: one learner each."""


class LearnerNotOpen(LearnerError):
    """The learner has no model: `open` was not called, failed, or `close` was."""


class RowUnusable(LearnerError):
    """A row does not fit the model or cannot be trained as masked."""


class CheckpointUnreadable(LearnerError):
    """A directory is not a complete checkpoint of a known format."""


class CheckpointDamaged(CheckpointUnreadable):
    """Files of a checkpoint directory are missing, cut off, altered, or contradict each other."""


class NonFiniteRun(LearnerError):
    """`max_skipped_in_a_row` steps in a row were skipped: the run diverged."""
