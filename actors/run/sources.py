"""The sources of a run's tasks: what `[[tasks.sources]]` of its recipe comes to.

Invariants:
- The tables of a source are merged over the recipe's tables of the same names, so that each source has a complete
  configuration, and every check of a recipe is made for each of them.
- Keys that hold for the whole run are refused in a source.
- A run without sources has one without a name, whose configuration is the recipe itself.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from headrace.buffer.core.mix.sources import SEPARATOR, Source, source_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.actors.run.config import RunConfig
    from headrace.actors.run.sections import SourceSection
    from headrace.buffer.core.config import BufferConfig
    from headrace.buffer.tasks import Task

KEY: Final = "tasks.sources"
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
    for table in OWN_TABLES:
        own = getattr(source, table)
        merged[table] = _merged(document.get(table, {}), own)
        if table == "rollout" and own and "guard_s" not in own:
            # It is the sum of phases that the source may have changed.
            merged[table].pop("guard_s", None)
    return merged


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


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


def mix_of(config: RunConfig) -> tuple[Source, ...]:
    """Return the sources for the replay buffer; none for a run without sources."""
    own = config.by_source()
    return tuple(
        Source(name=source.name, share=source.share, config=own[source.name].buffer) for source in config.tasks.sources
    )


def task_id_in(source: str, task_id: str) -> str:
    """Return the id of a task in the run: its own, after the name of its source if that has one."""
    return f"{source}{SEPARATOR}{task_id}" if source else task_id


def number_by_source(config: RunConfig, tasks: Iterable[Task]) -> dict[str, int]:
    """Return the number of tasks of each source."""
    numbers = Counter(source_name(task.id) if config.tasks.sources else "" for task in tasks)
    return dict(numbers)


def held_out_of(config: RunConfig, held_out: Iterable[Task]) -> tuple[Task, ...]:
    """Return the held-out tasks that the run evaluates: the first ones of each source, as many as it says."""
    left = {name: own.evaluation.tasks for name, own in config.by_source().items()}
    chosen = []
    for task in held_out:
        name = source_name(task.id) if config.tasks.sources else ""
        if left[name] > 0:
            left[name] -= 1
            chosen.append(task)
    return tuple(chosen)
