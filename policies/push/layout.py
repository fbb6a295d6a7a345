"""Layout of the ranks in a weight group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.policies.engine import EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Ranks of a group; `offsets` is the first rank of each engine."""

    world_size: int
    offsets: Mapping[EngineId, int]


def group_name(push_id: str, wave: int, attempt: int, shard: int) -> str:
    """Return the name of the group for one shard and one attempt of one wave."""
    return f"headrace-{push_id}-{wave}-{attempt}-{shard}"


def lay_out(ranks: Iterable[tuple[EngineId, int]]) -> GroupLayout:
    """Return the layout of a sender and these engines; `ranks` gives each engine's number of processes."""
    offsets: dict[EngineId, int] = {}
    following = 1
    for engine_id, count in ranks:
        offsets[engine_id] = following
        following += count
    return GroupLayout(world_size=following, offsets=offsets)
