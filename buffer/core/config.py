"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.buffer.core.acceptance import RuleLimits, parse_rule
from headrace.buffer.core.advantages import AdvantageKind
from headrace.buffer.core.curriculum import Curriculum
from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.primitives.sections import Section


class BufferConfig(Section):
    """Sizes and rules of the replay buffer."""

    batch_size: int = Field(default=64, ge=1)
    """Rollouts in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one task that share a baseline."""
    max_staleness: int = Field(default=4, ge=0)
    """Hard bound, in optimizer updates, on the staleness of rollouts that may be trained. 0 needs mode `sync`."""
    mode: Literal["async", "sync", "one-step-off"] = "async"
    """`async` paces rollouts by inventory; `sync` starts only those that the current batch needs, once the newest
    version is served; `one-step-off` starts those that the next batch needs while the learner trains the current
    one."""
    max_attempts: int = Field(default=3, ge=1)
    """A rollout whose infrastructure fails this many times becomes poison and is left out."""
    min_members: int = Field(default=2, ge=2)
    """A group in which fewer members than this finish is dropped."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Maximum number of rollouts in flight, for small machines; None: the inventory alone decides."""
    advantage: AdvantageKind = "grpo"
    """`grpo` subtracts the mean of the group and divides by its sample deviation; `grpo_no_std` does not divide;
    `leave_one_out` subtracts the mean of the other members."""
    zero_variance: Literal["keep", "filter"] = "keep"
    """Groups with equal rewards: trained with advantage 0, or left out of batches."""
    rule: str = "all"
    """Rule by which a group is sealed: `all`, `count(members)`, `fraction(share)`, `deadline(seconds)`,
    `grace(seconds)`, `expiring(updates)`, joined with `|` and `&`. `fraction(0.75) & grace(120)`: three quarters have
    finished, and none for two minutes. `all | expiring(1)`: all members, or the finished ones one update before they
    are too stale."""
    unfinished: Literal["carry", "abort"] = "carry"
    """Members that are still running when their group is sealed: trained later with a baseline fixed now, or cancelled.
    `abort` biases training towards short rollouts."""
    batch_tries: int = Field(default=2, ge=1)
    """Number of times that a step on a batch may fail or end the learner's process; after that the run ends and names
    the batch."""
    max_evictions: int = Field(default=2, ge=0)
    """Number of times that a rollout is issued again because it exceeded the staleness bound."""
    park_after: int = Field(default=2, ge=1)
    """A task is parked (no longer issued) once this many of its rollouts in a row have become poison."""
    curriculum: Curriculum = "none"
    """`frontier` prefers, among the next few tasks of a pass, those that are solved half of the time."""
    passes: int | None = Field(default=None, ge=1)
    """Number of passes over the data; None: unlimited. After the last pass, `take` raises DataExhausted once no batch
    is left."""
    keep_trajectories: bool = False
    """Keep trajectory files that no checkpoint directory needs any more, for exports. They take up more and more disk
    space."""

    @property
    def bound(self) -> StalenessBound:
        """Bound on the staleness of rollouts that may be trained."""
        return StalenessBound(self.max_staleness)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_staleness == 0 and self.mode != "sync":
            raise ValueError('max_staleness = 0 needs mode = "sync": set buffer.mode, or raise buffer.max_staleness')
        if self.min_members > self.group_size:
            raise ValueError(f"min_members = {self.min_members} exceeds group_size = {self.group_size}: lower it")
        if self.mode == "async" and self.max_staleness * self.batch_size < self.group_size - 1:
            raise ValueError(
                f"a group of group_size = {self.group_size} may never fit beside an unfinished batch of "
                f"batch_size = {self.batch_size}: raise batch_size or max_staleness"
            )
        parse_rule(self.rule, RuleLimits(group_size=self.group_size, max_staleness=self.max_staleness))
        return self
