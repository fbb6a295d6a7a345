"""The ordinary service over Ray, in real time, with simulated engines, learner, sandboxes and agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import read_configuration
from headrace.buffer.audit.verify import verify
from headrace.policies.learners.checkpoints import list_checkpoints, read_manifest
from support.run_rig import run_simulated

QUICK = (
    "agent.simulated.durations.mean_s=0.6",
    "agent.simulated.durations.median_s=0.5",
    "agent.simulated.durations.cap_s=2",
    "learner.simulated.step_s=0.2",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=16",
    "training.steps=4",
    "training.save_every=2",
    "evaluation.tasks=2",
    "service.workers=2",
)


@pytest.mark.parametrize("push", [pytest.param("pause", marks=pytest.mark.slow), "drain"])
async def test_a_run_with_simulated_parts_completes_without_problems(
    ray_cluster: None, tmp_path: Path, push: str
) -> None:
    """Two workers in processes of their own hear of every version, and of every drain."""
    overrides = (*QUICK, f"engines.simulated.push={push}", "engines.simulated.push_s=0.1")
    directory = await run_simulated(tmp_path, f"simulated-{push}", *overrides)
    report = verify(directory.path)
    assert (report.steps, report.checkpoints > 0, report.infra) == (4, True, 0)
    records = read_metrics(directory.metrics)
    assert [record["version"] for record in records if record["kind"] == "push"] == [f"1.{step}" for step in range(5)]
    [base, final] = [record for record in records if record["kind"] == "evaluation"]
    assert base["infra"] == final["infra"] == 0
    # F25: the learner's process has recorded the run's configuration with every checkpoint.
    saved = [read_manifest(path).configuration for path in list_checkpoints(directory.checkpoints)]
    assert saved == [read_configuration(directory)] * 2
