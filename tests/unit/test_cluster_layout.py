"""From a submitted recipe to a run on a cluster: its configuration, its folders, and what may change later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.layout import TO_RESTORE, ClusterTerms, build_of, config_of, create_run, recovered
from headrace.actors.cluster.runs.quotas import Quotas
from headrace.actors.cluster.runs.records import RAY_USER, Submission
from headrace.actors.errors import ConfigError, RunMissing, RunRefused, RunUnknown
from headrace.actors.record.files.run_directory import RunDirectory, sandbox_owner
from headrace.actors.run.changes import changed_document, journal_changes
from headrace.actors.run.config import RunConfig
from headrace.actors.runtime.actors.nodes import NodeRole

RUN_ID = "0123456789abcdef0123456789abcdef"
RECIPE: dict[str, dict[str, Any]] = {
    "engines": {"backend": "simulated"},
    "learner": {"kind": "simulated"},
    "agent": {"kind": "simulated"},
    "sandbox": {"provider": "simulated"},
    "dispatcher": {"slots_per_worker": 32},
    "tasks": {"train_count": 8, "heldout_count": 4},
    "evaluation": {"tasks": 4},
}
RIGHTS = Rights(owner="me", caller=RAY_USER, quotas=Quotas())
TERMS = ClusterTerms(state=Path("/state"), storage=Path("/storage"))


def terms_in(folder: Path) -> ClusterTerms:
    return ClusterTerms(state=folder / "state", storage=folder / "storage")


def config_in(folder: Path) -> RunConfig:
    return config_of(RECIPE, terms_in(folder), RUN_ID, RIGHTS, rollout_nodes=2)


def submission(owner: str = "me") -> Submission:
    return Submission(name="run", owner=owner, recipe=RECIPE, idempotency_key="key")


def test_the_cluster_decides_the_folders_and_the_number_of_units() -> None:
    config = config_of(RECIPE, TERMS, RUN_ID, RIGHTS, rollout_nodes=3)
    assert (config.cluster.state, config.cluster.storage) == (TERMS.state, TERMS.storage)
    assert config.cluster.rollout_units == 3
    assert config.learner.checkpoint_dir == Path("/storage") / RUN_ID / "checkpoints"
    one = config_of(RECIPE | {"cluster": {"rollout_units": 1}}, TERMS, RUN_ID, RIGHTS, rollout_nodes=3)
    assert one.cluster.rollout_units == 1
    with pytest.raises(ConfigError, match=r"cluster.state is /state on this cluster, not /elsewhere"):
        config_of(RECIPE | {"cluster": {"state": "/elsewhere"}}, TERMS, RUN_ID, RIGHTS, rollout_nodes=1)


def test_real_engines_are_placed_on_the_nodes_of_the_cluster(tiny_model_dir: Path) -> None:
    recipe = {"model": {"path": str(tiny_model_dir)}, "sandbox": {"provider": "simulated"}}
    assert config_of(recipe, TERMS, RUN_ID, RIGHTS, rollout_nodes=1).engines.placement.value == "ray"


def test_sandboxes_of_one_host_are_refused() -> None:
    recipe = RECIPE | {"sandbox": {"provider": "local"}}
    with pytest.raises(ConfigError, match=r"sandbox\.provider local has its sandboxes on one host"):
        config_of(recipe, TERMS, RUN_ID, RIGHTS, rollout_nodes=1)


def test_the_key_of_sandbox_hosts_has_the_same_path_on_all_nodes() -> None:
    remote = {"urls": ["http://10.0.0.1:5000"], "key_file": "key"}
    recipe = RECIPE | {"sandbox": {"provider": "remote", "remote": remote}}
    with pytest.raises(ConfigError, match=r"sandbox.remote.key_file key is relative"):
        config_of(recipe, TERMS, RUN_ID, RIGHTS, rollout_nodes=1)


def test_demands_count_the_rollouts_of_all_units() -> None:
    one, three = (build_of(config_of(RECIPE, TERMS, RUN_ID, RIGHTS, rollout_nodes=nodes)) for nodes in (1, 3))
    assert three.demands.rollouts - one.demands.rollouts == 2 * 32
    assert one.config_digest != three.config_digest


def test_a_local_run_reserves_nothing_and_a_unit_shares_its_bundle() -> None:
    cluster = config_of(RECIPE, TERMS, RUN_ID, RIGHTS, rollout_nodes=2).cluster
    assert {unit.resources(cluster).bundle for unit in cluster.units()} == {"unit-0", "unit-1"}
    assert cluster.on(NodeRole.CONTROL).role is NodeRole.CONTROL
    assert cluster.on(NodeRole.CONTROL).cpus > 0
    assert cluster.labels() == {role: role.value for role in NodeRole}


def test_a_run_has_two_folders_that_find_each_other(tmp_path: Path) -> None:
    directory = terms_in(tmp_path).directory(RUN_ID)
    create_run(config_in(tmp_path), directory, submission(), RIGHTS)
    found = RunDirectory.at(directory.path)
    assert found == directory
    assert found.run_id() == RunDirectory(path=found.storage).run_id()
    assert (found.config.parent, found.metrics.parent) == (found.storage, found.path)
    found.checkpoints.mkdir()
    assert (found.path / "checkpoints").samefile(found.checkpoints)


def test_sandboxes_of_a_cluster_belong_to_the_run_and_not_to_a_path(tmp_path: Path) -> None:
    owners = set()
    for place in ("a", "b"):
        directory = RunDirectory(path=tmp_path / place / "state", shared=tmp_path / place / "storage")
        for folder in (directory.path, directory.storage):
            folder.mkdir(parents=True)
            (folder / "run_id").write_text(RUN_ID)
        owners.add(sandbox_owner(directory))
    assert len(owners) == 1


def test_a_lost_disk_is_recovered_by_its_owner_only_and_only_when_it_is_lost(tmp_path: Path) -> None:
    directory = terms_in(tmp_path).directory(RUN_ID)
    create_run(config_in(tmp_path), directory, submission(), RIGHTS)
    (directory.path / "ledger.db").touch()
    with pytest.raises(RunRefused, match="resume it without --from-storage"):
        recovered(directory, "me")
    elsewhere = RunDirectory(path=tmp_path / "elsewhere", shared=directory.shared)
    with pytest.raises(RunUnknown, match="belongs to me, not to another"):
        recovered(elsewhere, "another")
    assert not elsewhere.path.exists()
    assert recovered(elsewhere, "me") == submission()
    assert (elsewhere.path / TO_RESTORE).exists()
    with pytest.raises(RunMissing, match="is this the storage of the run"):
        recovered(RunDirectory(path=tmp_path / "x", shared=tmp_path / "y"), "me")


@pytest.mark.parametrize("change", ["model.path=/m", "buffer.max_staleness=9", "service.seed=1", "cluster.state=/s"])
def test_keys_that_define_a_run_do_not_change(change: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--set {change}: .* defines the run and cannot change"):
        changed_document(RECIPE, [change])


def test_other_keys_change_and_are_journalled(tmp_path: Path) -> None:
    before = orjson.dumps(RECIPE)
    changed = changed_document(RECIPE, ["training.steps=9", "engines.count=3"])
    assert (changed["training"]["steps"], changed["engines"]["count"]) == (9, 3)
    assert orjson.dumps(RECIPE) == before
    journal_changes(tmp_path, ["training.steps=9"])
    journal_changes(tmp_path, ["engines.count=3"])
    lines = [orjson.loads(line) for line in (tmp_path / "changes.jsonl").read_bytes().splitlines()]
    assert [line["changes"] for line in lines] == [["training.steps=9"], ["engines.count=3"]]
