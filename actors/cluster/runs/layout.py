"""From a submitted recipe to a run: its configuration, what it needs of the cluster, and its two folders.

Invariants:
- Everything is checked before anything is created, as for a local run.
- The cluster decides the folders: a recipe may name the same ones, or none.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.cluster.nodes.checks import (
    Node,
    refuse_absent_roles,
    refuse_open_redis,
    refuse_too_few_nodes,
    refuse_too_large,
    refuse_unfit,
)
from headrace.actors.cluster.nodes.probe import living_nodes, marked, open_redis, probe, versions_here
from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.records import Build, Demands, Recipe, Submission
from headrace.actors.engines.devices import local_gpus
from headrace.actors.errors import ConfigError, RunMissing, RunRefused, RunUnknown
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.restore import link_checkpoints
from headrace.actors.run.config import RunConfig, absolute_paths, validated
from headrace.actors.run.launch import lay_out, reopen
from headrace.actors.run.parts import recipe_digest
from headrace.actors.run.placement import ClusterSection, RolesSection
from headrace.actors.runtime.actors.nodes import Bundle, NodeRole
from headrace.actors.runtime.version import RUNNING
from headrace.buffer.audit.evidence import has_begun
from headrace.buffer.primitives.durable_files import replace_file
from headrace.serve.tracing.retention import RetentionConfig

AUTO: Final = "auto"
SUBMISSION: Final = "submission.json"
"""File in the storage with what was submitted, for a control node that has lost its disk."""
TO_RESTORE: Final = "to_restore"
"""File in the state folder that exists until the ledger is restored from the storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTerms:
    """What all runs of a cluster share: the root of their state folders, which is a local disk of the control node, the
    root of their storage folders, and the labels of the nodes."""

    state: Path
    storage: Path
    roles: RolesSection = field(default_factory=RolesSection)

    @classmethod
    def of(cls, section: ClusterSection) -> ClusterTerms:
        assert section.state is not None and section.storage is not None
        return cls(state=section.state, storage=section.storage, roles=section.roles)

    def directory(self, run_id: str) -> RunDirectory:
        return RunDirectory(path=self.state / run_id, shared=self.storage / run_id)

    def log_terms(self) -> LogTerms:
        """Return how the actors log that belong to the cluster and not to one run: in the folder `logs` of the state
        folder, on the node of each."""
        return LogTerms(run_id="", folder=self.state / "logs", retention=RetentionConfig(), json_stderr=True)


def config_of(recipe: Recipe, terms: ClusterTerms, run_id: str, rights: Rights, *, rollout_nodes: int) -> RunConfig:
    """Return the configuration of a run of a submitted recipe. Raises ConfigError, and RoleTooSmall for what `rights`
    do not allow it to name."""
    document: dict[str, Any] = {table: copy.deepcopy(dict(keys)) for table, keys in recipe.items()}
    cluster = document.setdefault("cluster", {})
    for key, ours in (("state", terms.state), ("storage", terms.storage)):
        if Path(str(cluster.setdefault(key, str(ours)))) != ours:
            raise ConfigError(f"cluster.{key} is {ours} on this cluster, not {cluster[key]}: remove it from the recipe")
    cluster["address"] = AUTO
    cluster.setdefault("roles", terms.roles.model_dump())
    cluster.setdefault("rollout_units", max(1, rollout_nodes))
    storage = terms.directory(run_id).storage
    # The model is looked at only once the rights allow its path.
    written = validated(copy.deepcopy(document), Path("recipe"), storage, reads=False)
    rights.check_recipe(written, as_written=True)
    config = validated(rights.with_secrets(absolute_paths(document, Path("recipe"))), Path("recipe"), storage)
    rights.check_recipe(config)
    return config


def build_of(config: RunConfig) -> Build:
    """Return what a run is started with."""
    dispatcher, cluster = config.dispatcher, config.cluster
    rollouts = dispatcher.slots_per_worker * config.service.workers * cluster.rollout_units
    return Build(
        config_digest=recipe_digest(config),
        headrace_version=RUNNING,
        demands=Demands(rollouts=rollouts + dispatcher.evaluation_slots, engines=config.engines.count),
        restarts=cluster.restarts,
    )


async def check_cluster(config: RunConfig) -> None:
    """Check that every node can take its part in a run. Raises CannotBePlaced, ConfigError."""
    cluster = config.cluster
    labels = _needed(config)
    nodes = await living_nodes()
    refuse_absent_roles(nodes, labels)
    bundles = _bundles(config)
    refuse_too_large(nodes, labels, bundles)
    if parts := bundles.get("an engine"):
        refuse_too_few_nodes(nodes, labels[NodeRole.ENGINE], parts[0], config.engines.nodes)
    ours = [node for node in nodes if node.role in labels.values()]
    engines, model = config.engines, [] if config.engines.is_simulated else [str(config.model.path)]
    paths, sglang = dict.fromkeys(labels.values(), model), dict[str, str]()
    if engines.backend == "sglang" and NodeRole.ENGINE in labels:
        label, python = labels[NodeRole.ENGINE], engines.sglang.python
        sglang = {} if python else {label: engines.device}
        paths[label] = [*model, str(python)] if python else model
    assert cluster.state is not None and cluster.storage is not None
    states = {labels[NodeRole.CONTROL]: str(cluster.state)}
    for head in (node for node in nodes if node.is_head):
        refuse_open_redis(head, await open_redis(head))
    with marked(cluster.storage) as (marker, content):
        facts = await probe(ours, marker, paths, states, sglang)
    refuse_unfit(facts, versions_here(), marker=content, storage=str(cluster.storage))


async def rollout_nodes(terms: ClusterTerms) -> Sequence[Node]:
    """Return the living nodes that can have rollout units."""
    return [node for node in await living_nodes() if node.role == terms.roles.rollout]


def create_run(config: RunConfig, directory: RunDirectory, submission: Submission, rights: Rights) -> None:
    """Check what the configuration and its tasks name, and create the run's folders. Blocks. Raises ConfigError and the
    errors of tasks, model and sandboxes."""
    assert directory.shared is not None
    directory.shared.parent.mkdir(parents=True, exist_ok=True)
    lay_out(config, RunDirectory(path=directory.shared), allow=rights.check_tasks)
    made = replace(submission, names_code=rights.caller.may_name_code)
    replace_file(directory.storage / SUBMISSION, orjson.dumps(asdict(made)))
    directory.write_state()
    link_checkpoints(directory.path, directory.shared)


def recovered(directory: RunDirectory, owner: str) -> Submission:
    """Prepare the state folder of a run whose control node has lost its disk, and return what was submitted. Blocks.
    Raises RunMissing, RunRefused, RunUnknown."""
    if has_begun(directory.path) or (directory.path / "ledger.db").exists():
        raise RunRefused(f"{directory.path} has the ledger of the run: resume it without --from-storage")
    try:
        submission = Submission(**orjson.loads((directory.storage / SUBMISSION).read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise RunMissing(
            f"{directory.storage / SUBMISSION} cannot be read ({error}): is this the storage of the run?"
        ) from error
    if submission.owner != owner:
        raise RunUnknown(f"the run in {directory.storage} belongs to {submission.owner}, not to {owner}")
    directory.write_state()
    (directory.path / TO_RESTORE).touch()
    return submission


def remove_run(directory: RunDirectory) -> None:
    """Remove the folders of a run that was never added. Blocks."""
    shutil.rmtree(directory.path, ignore_errors=True)
    if directory.shared is not None:
        shutil.rmtree(directory.shared, ignore_errors=True)


def reopened(directory: RunDirectory) -> RunConfig:
    """Return the recorded configuration of a run. Raises RunMissing."""
    return reopen(directory.path)[0]


def _needed(config: RunConfig) -> dict[NodeRole, str]:
    """Return the labels of the roles that the run has actors for."""
    labels = config.cluster.roles.labels()
    if config.engines.is_simulated or not config.engines.count:
        del labels[NodeRole.ENGINE]
    return labels


def _bundles(config: RunConfig) -> dict[str, list[Bundle]]:
    """Return what the actors of a run reserve, by the name of one of each kind."""
    cluster, engines, slime = config.cluster, config.engines, config.learner.slime
    bundles = {
        "a rollout unit": [cluster.unit_bundle] * cluster.rollout_units,
        "the learner": [cluster.learner_bundle(config.learner)],
        "the engine group": [Bundle(role=NodeRole.CONTROL, cpus=0, gpus=local_gpus(engines, config.push))],
    }
    if config.learner.kind == "slime":
        bundles["a node of slime"] = [Bundle(role=NodeRole.LEARNER, cpus=0, gpus=slime.gpus_per_node)] * slime.nodes
    if NodeRole.ENGINE in _needed(config):
        gpus, memory_bytes = engines.gpus_per_node, engines.memory_bytes
        one = Bundle(role=NodeRole.ENGINE, cpus=engines.cpus, gpus=gpus, memory_bytes=memory_bytes)
        bundles["an engine"] = [one] * (engines.count * engines.nodes)
    return bundles
