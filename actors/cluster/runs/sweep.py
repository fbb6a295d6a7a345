"""Removal of what an ended run left on a cluster: actors, bundles, and folders on the nodes' disks.

Invariants:
- A run's actors are those of its namespace, and its bundles those whose names begin with it.
- Only namespaces of runs are touched, never those of other programs on the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Final

from headrace.actors.runtime.actors.nodes import NAMESPACE
from headrace.actors.runtime.actors.runtime import namespace_of

OF_A_RUN: Final = re.compile(rf"{NAMESPACE}-([0-9a-f]{{32}})")

logger = logging.getLogger(__name__)


async def sweep_run(run_id: str) -> None:
    """Kill all actors of a run and remove its bundles. Idempotent."""
    await asyncio.to_thread(_sweep, namespace_of(run_id))


async def sweep_unowned(live: Collection[str]) -> tuple[str, ...]:
    """Remove what belongs to runs that are not in `live`. Return the ids of the runs that had left something."""
    found = await asyncio.to_thread(_run_ids)
    unowned = tuple(sorted(found - set(live)))
    for run_id in unowned:
        logger.warning("removing actors and bundles that run %s left", run_id)
        await sweep_run(run_id)
    return unowned


def _sweep(namespace: str) -> None:
    import ray
    from ray.util import list_named_actors, remove_placement_group

    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace:
            with suppress(ValueError):
                ray.kill(ray.get_actor(actor["name"], namespace=namespace), no_restart=True)
    for group_name, group in _groups():
        if group_name.startswith(f"{namespace}-"):
            remove_placement_group(group)


def _run_ids() -> set[str]:
    from ray.util import list_named_actors

    named: Iterable[str] = (actor["namespace"] for actor in list_named_actors(all_namespaces=True))
    reserved = (name for name, _ in _groups())
    return {match.group(1) for text in (*named, *reserved) if (match := OF_A_RUN.match(text))}


def _groups() -> list[tuple[str, Any]]:
    """Return the names and handles of all placement groups that exist."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    return [
        (entry["name"], PlacementGroup(PlacementGroupID(bytes.fromhex(entry["placement_group_id"]))))
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED"
    ]
