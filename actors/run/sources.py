"""The section [tasks] of a recipe, with its sources: what `[[tasks.sources]]` comes to.

Invariants:
- The tables of a source are merged over the recipe's tables of the same names, so that each source has a complete
  configuration, and every check of a recipe is made for each of them.
- Keys that hold for the whole run are refused in a source.
- A run without sources has one without a name, whose configuration is the recipe itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, model_validator

from headrace.actors.errors import ConfigError
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.primitives.sections import Section, overlaid
from headrace.buffer.tasks.task import Task, TaskId, task_digest

KEY: Final = "tasks.sources"
MAX_NAMED, MAX_ID_CHARACTERS = 5, 80
OWN_TABLES: Final = ("agent", "environment", "sampling", "rollout", "buffer", "evaluation")
_OWN_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "buffer": frozenset(
        {
            *("group_size", "min_members", "advantage", "zero_variance", "rule"),
            *("unfinished", "max_attempts", "max_evictions"),
        }
    ),
    "evaluation": frozenset({"tasks", "sampling"}),
}
_RUN_KEYS: Final[Mapping[str, frozenset[str]]] = {"rollout": frozenset({"lease_s"})}


class TaskSetConfig(Section):
    """Keys of [tasks] and of each of [[tasks.sources]]: the training and the held-out tasks."""

    train: Path | None = None
    """JSONL file of training tasks (guide 'Task files'), relative to the recipe; None generates terminal tasks."""
    heldout: Path | None = None
    """JSONL file of held-out tasks; must be set if and only if `train` is set."""
    train_count: int = Field(default=512, ge=1)
    """Number of generated training tasks."""
    heldout_count: int = Field(default=64, ge=1)
    """Number of generated held-out tasks."""
    evaluate_s: float = Field(default=0.0, ge=0)
    """Simulated duration of evaluating a generated task, in seconds; used only with the simulated agent."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.train is None) != (self.heldout is None):
            raise ValueError("tasks.train and tasks.heldout go together: set both files or neither")
        return self


class SourceSection(TaskSetConfig):
    """One of [[tasks.sources]] of a recipe: its tasks, its share, and what differs from the recipe for its rollouts."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=40)
    """Name of the source: lower-case letters, digits, `_` and `-`. Task ids begin with it (`search/17`)."""
    share: float = Field(gt=0, le=1)
    """Share of the trained rollouts that come from this source. The shares of all sources add up to 1."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """Keys of [agent] that differ for this source."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Keys of [environment] that differ for this source."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Keys of [sampling] that differ for this source."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Keys of [rollout] that differ for this source, apart from `lease_s`."""
    buffer: dict[str, Any] = Field(default_factory=dict)
    """Keys of [buffer] that differ for this source: `group_size`, `min_members`, `advantage`, `zero_variance`, `rule`,
    `unfinished`, `max_attempts` and `max_evictions`."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """Keys of [evaluation] that differ for this source: `tasks` and `sampling`."""


class TasksSection(TaskSetConfig):
    """Section [tasks] of a recipe."""

    sources: tuple[SourceSection, ...] = ()
    """Several sources of tasks in one run, each with its share of the trained rollouts (guide 'Several environments in
    one run')."""


def problem(sources: Sequence[SourceSection]) -> str | None:
    """Return what is wrong with the sources as a whole, with the fix; None if nothing is."""
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        return f"{KEY}: {twice[0]} is a duplicate name; give each source its own"
    whole = math.fsum(source.share for source in sources)
    if abs(whole - 1) > 1e-6:
        shares = ", ".join(f"{source.name} {source.share:g}" for source in sources)
        return f"{KEY}: the shares add up to {whole:g} ({shares}); change them so that they add up to 1"
    for source in sources:
        for table in OWN_TABLES:
            given = getattr(source, table)
            own = _OWN_KEYS.get(table, frozenset(given)) - _RUN_KEYS.get(table, frozenset())
            if others := sorted(set(given) - own):
                return f"{KEY}.{source.name}: {table}.{others[0]} holds for the whole run; set it in [{table}] instead"
    return None


def source_document(document: Mapping[str, Any], source: SourceSection) -> dict[str, Any]:
    """Return the document of a source: the recipe's, with the source's tasks and tables."""
    merged = dict(document)
    merged["tasks"] = source.model_dump(exclude={"name", "share", *OWN_TABLES})
    return merged | {table: overlaid(document.get(table, {}), getattr(source, table)) for table in OWN_TABLES}


def source_problem(source: SourceSection, buffer: BufferConfig) -> str | None:
    """Return why a source could not keep its share, with the fix; None if it can. `buffer` is the source's own."""
    part, groups = source.share * buffer.batch_size, f"groups of {buffer.group_size}"
    if part < 1:
        return (
            f"share {source.share:g} of buffer.batch_size {buffer.batch_size} is less than one rollout of a batch; "
            "raise share or buffer.batch_size"
        )
    if buffer.mode == "sync" and buffer.max_staleness == 0 and (part % 1 or part % buffer.group_size):
        return (
            f"share {source.share:g} of buffer.batch_size {buffer.batch_size} is not a whole number of {groups}, and "
            "with buffer.max_staleness 0 the rest could never be trained; change share, group_size or batch_size"
        )
    room = math.floor(source.share * buffer.bound.stock(buffer.batch_size)) - (math.ceil(part) - 1)
    if buffer.mode == "async" and room < buffer.group_size:
        return (
            f"{groups} may never fit beside an unfinished batch: share {source.share:g} leaves room for {room} "
            "rollouts; raise share, buffer.batch_size or buffer.max_staleness, or lower group_size"
        )
    return None


def refuse_overlap(
    trained: Collection[str], held_out: Mapping[TaskId, str], source: str, *, trained_by: str = "tasks.train"
) -> None:
    """Raise ConfigError with `source` (a key or an option) and the ids if any held-out task is also trained. `trained`
    and `held_out` have the problem digests of tasks; `trained_by` is the key of the training tasks."""
    both = [task_id for task_id, problem in held_out.items() if problem in trained]
    if both:
        names = ", ".join(repr(task_id[:MAX_ID_CHARACTERS]) for task_id in both[:MAX_NAMED])
        rest = f" and {len(both) - MAX_NAMED} more" if len(both) > MAX_NAMED else ""
        raise ConfigError(
            f"{source}: {len(both)} tasks are also in {trained_by} ({names}{rest}); remove them from one of the files"
        )


def problem_digest(task: Task) -> str:
    """Return a digest of everything in a task but its id and family, in hexadecimal."""
    return task_digest(replace(task, id=TaskId(""), family=""))
