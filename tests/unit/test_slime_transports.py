"""The transport of a run's weights after failures of slime's own."""

from __future__ import annotations

from pathlib import Path

from headrace.policies.learners.slime.transports import Transports


def test_a_failure_demotes_the_transport_for_the_rest_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "push_transport.json"
    transports = Transports(path, "nccl")
    assert transports.current == "nccl"
    assert transports.demote("nccl", "a hang") == "delta"
    # A second call that failed with the same processes is the same failure.
    assert transports.demote("nccl", "the training processes have ended") == "delta"
    assert b"a hang" in path.read_bytes()
    resumed = Transports(path, "nccl")
    assert resumed.current == "delta"
    assert resumed.demote("delta", "no engine has it") == "disk"
    assert Transports(path, "nccl").current == "disk"


def test_a_demotion_does_not_promote_what_a_recipe_wants_now(tmp_path: Path) -> None:
    path = tmp_path / "push_transport.json"
    Transports(path, "nccl").demote("nccl", "a hang")
    assert Transports(path, "disk").current == "disk"
