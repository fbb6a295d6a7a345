"""Checks of a cluster before a run is created there. Pure: `probe` collects the facts.

Invariants:
- Everything that Ray would leave pending for ever is refused: a label that no node has, resources that no node has.
- Every refusal names the node, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.actors.errors import CannotBePlaced, ConfigError
from headrace.actors.runtime.actors.nodes import ROLE_LABEL, Bundle, NodeRole
from headrace.policies.processes.engine_keys import is_loopback

MOST_CLOCK_OFFSET_S: Final = 5.0
"""Largest difference between the clocks of two nodes. Leases and incarnations are compared across nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node, as Ray reports it. Resources are totals."""

    node: str
    address: str
    role: str
    cpus: float
    gpus: float
    memory_bytes: int
    is_head: bool = False

    @property
    def named(self) -> str:
        return f"node {self.address} ({ROLE_LABEL}={self.role or 'none'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a probe found on one node. `clock_s` is the node's clock minus that of the asking process; `marker` is the
    content of the file that the asking process wrote to the storage; `hides_gpus` is True if a process that has
    reserved no GPU sees none; `missing` has the paths that do not exist; `problem` says what is wrong with the state
    folder, on the control node, or with SGLang, on an engine node."""

    node: Node
    has_token_auth: bool
    ray_version: str
    headrace_version: str
    python_version: str
    clock_s: float
    marker: str
    hides_gpus: bool
    missing: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    ray: str
    headrace: str
    python: str


def refuse_absent_roles(nodes: Sequence[Node], labels: Mapping[NodeRole, str]) -> None:
    """Raise CannotBePlaced unless every role has a node, and the role `control` exactly one."""
    for role, label in labels.items():
        found = [node for node in nodes if node.role == label]
        if not found:
            known = ", ".join(sorted({node.role or "none" for node in nodes}))
            raise CannotBePlaced(
                f"no node has the label {ROLE_LABEL}={label}, which the role {role} needs (the nodes have: {known}): "
                f"start one with `ray start --labels {ROLE_LABEL}={label}`, or set cluster.roles.{role}"
            )
        if role is NodeRole.CONTROL and len(found) > 1:
            addresses = ", ".join(node.address for node in found)
            raise CannotBePlaced(
                f"{len(found)} nodes have the label {ROLE_LABEL}={label} ({addresses}): the state of the runs is on "
                "one disk, so only one node can have it"
            )


def refuse_too_large(
    nodes: Sequence[Node], labels: Mapping[NodeRole, str], bundles: Mapping[str, Sequence[Bundle]]
) -> None:
    """Raise CannotBePlaced if a bundle (by the name of its kind) is larger than every node of its role, in total
    resources, or if the GPUs of the nodes do not hold all bundles at once."""
    for name, several in bundles.items():
        for bundle in several[:1]:
            label = labels[bundle.role]
            if not any(_holds(node, bundle) for node in nodes if node.role == label):
                raise CannotBePlaced(
                    f"{name} needs {bundle.described()}, which no node with the label {ROLE_LABEL}={label} has in all: "
                    "add a larger node, or lower what the recipe reserves"
                )
    for label in dict.fromkeys(labels.values()):
        kinds = {name: each for name, each in bundles.items() if each and labels[each[0].role] == label}
        asked = [bundle.gpus for each in kinds.values() for bundle in each]
        there = [node.gpus for node in nodes if node.role == label]
        # The largest first, each on the first node that has room.
        free = list(there)
        for gpus in sorted(asked, reverse=True):
            place = next((place for place, left in enumerate(free) if left >= gpus), None)
            if place is None:
                users = {name: each for name, each in kinds.items() if each[0].gpus}
                parts = ", ".join(f"{name}: {len(each)} x {each[0].gpus:g}" for name, each in users.items())
                have = " + ".join(f"{each:g}" for each in there)
                raise CannotBePlaced(
                    f"the run needs {sum(asked):g} GPUs on nodes with {ROLE_LABEL}={label} ({parts}), which have "
                    f"{sum(there):g} ({have}): add nodes, or lower engines.count, engines.tensor_parallel or "
                    "learner.slime.nodes"
                )
            free[place] -= gpus


def refuse_too_few_nodes(nodes: Sequence[Node], label: str, part: Bundle, needed: int) -> None:
    """Raise CannotBePlaced if fewer nodes with the label of engines can hold a part of one than it has parts."""
    if (there := sum(node.role == label and _holds(node, part) for node in nodes)) < needed:
        raise CannotBePlaced(
            f"engines.nodes = {needed}: only {there} nodes have the label {ROLE_LABEL}={label} and room "
            f"for a part ({part.described()}); lower it, or add nodes"
        )


def _holds(node: Node, bundle: Bundle) -> bool:
    return node.cpus >= bundle.cpus and node.gpus >= bundle.gpus and node.memory_bytes >= bundle.memory_bytes


def refuse_open_redis(head: Node, redis: str) -> None:
    """Raise ConfigError for a Redis that the head uses without a password and that other hosts can reach."""
    if redis and not is_loopback(redis):
        raise ConfigError(
            f"{head.named}: the head keeps the state of the cluster in Redis at {redis} without a password, where all "
            "of the network can change it: set requirepass there, and start the head with --redis-password"
        )


def refuse_unfit(facts: Sequence[NodeFacts], versions: Versions, *, marker: str, storage: str) -> None:
    """Raise ConfigError if a node differs from this process or cannot take its part. `marker` is what the probe wrote
    to `storage`."""
    for fact in facts:
        if (problem := _problem(fact, versions, marker, storage)) is not None:
            raise ConfigError(f"{fact.node.named}: {problem}")
    if facts and (spread_s := max(fact.clock_s for fact in facts) - min(fact.clock_s for fact in facts)):
        first, last = (pick(facts, key=lambda fact: fact.clock_s).node.named for pick in (min, max))
        if spread_s > MOST_CLOCK_OFFSET_S:
            raise ConfigError(
                f"the clock of {last} is {spread_s:.1f} s ahead of that of {first}, above {MOST_CLOCK_OFFSET_S:g} s: "
                "synchronise the clocks (NTP)"
            )


def _problem(fact: NodeFacts, versions: Versions, marker: str, storage: str) -> str | None:
    """Return what is wrong with one node, without its name."""
    if not fact.has_token_auth:
        return "it runs without token authentication: start all with RAY_AUTH_MODE=token (guide 'Runs on a cluster')"
    if not fact.headrace_version:
        return "headrace is not installed in the Python environment of `ray start`: install it there"
    for name, here, there in (
        ("Ray", versions.ray, fact.ray_version),
        ("headrace", versions.headrace, fact.headrace_version),
        ("Python", versions.python, fact.python_version),
    ):
        if here != there:
            return f"it has {name} {there}, and this process {here}: install the same version on all nodes"
    if fact.node.gpus and not fact.hides_gpus:
        return (
            "its processes see GPUs that they have not reserved: `export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1` before "
            "`ray start` there"
        )
    if abs(fact.clock_s) > MOST_CLOCK_OFFSET_S:
        return (
            f"its clock differs by {fact.clock_s:+.1f} s, above {MOST_CLOCK_OFFSET_S:g} s: synchronise the clocks (NTP)"
        )
    if fact.marker != marker:
        return f"cluster.storage {storage} is not the same folder there: mount the same storage on all nodes"
    if fact.missing:
        return f"{fact.missing[0]} does not exist there: put it on the storage, or at this path on each node"
    return fact.problem or None
