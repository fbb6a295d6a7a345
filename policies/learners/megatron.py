"""Megatron learner: megatron-core on a GPU or on the CPU, behind the Learner protocol. Importing this module does not
import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.trajectories.types import CheckpointRef
from headrace.policies.learners.one_thread import OneThreadLearner
from headrace.policies.learners.ranks.contract import StartRanks

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.megatron_trainer import MegatronTrainer


class MegatronLearner(OneThreadLearner):
    """Implementation of `headrace.policies.learner.Learner`. With several ranks the work runs in their processes, and
    the learner's thread waits for them."""

    def __init__(self, config: LearnerConfig, start: StartRanks | None = None) -> None:
        """`start` starts the learner's ranks; without it there is one, in this process."""

        def open_it(resume: CheckpointRef | None, epoch: int) -> MegatronTrainer:
            from headrace.policies.learners.megatron_trainer import open_trainer

            return open_trainer(config, resume, epoch, start=start)

        super().__init__(open_it)
