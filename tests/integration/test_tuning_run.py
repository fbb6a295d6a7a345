"""A recorded run over real Ray is tuned, and the rule that is picked runs over real Ray, with the same durations."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean

import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.simulation.tuning.candidates import Space
from headrace.actors.simulation.tuning.command import TuneRequest, prepare_tuning, run_tuning
from headrace.actors.simulation.tuning.recorded_run import read_run
from headrace.actors.simulation.tuning.result import TuningResult
from headrace.buffer.audit.evidence import read_evidence
from support import run_rig as rig

LATENCY_BOUND = (
    "agent.simulated.turns=2",
    "agent.simulated.durations.task_share=0.5",
    "agent.simulated.durations.solved_shift=-0.5",
    "agent.simulated.durations.stragglers=0.08",
    "agent.simulated.durations.straggler_factor=5",
    "buffer.group_size=4",
    "buffer.max_staleness=2",
    "tasks.heldout_count=2",
    "evaluation.tasks=2",
    "dispatcher.evaluation_slots=2",
    "sandbox.simulated.boot_s=0.02",
)
SHORT = (
    *LATENCY_BOUND,
    "agent.simulated.durations.mean_s=0.6",
    "agent.simulated.durations.median_s=0.5",
    "agent.simulated.durations.cap_s=4",
    "learner.simulated.step_s=0.1",
    "engines.simulated.push_s=0.02",
    "buffer.batch_size=8",
    "dispatcher.slots_per_worker=12",
    "training.steps=8",
)
LONG = (
    *LATENCY_BOUND,
    "agent.simulated.durations.mean_s=4",
    "agent.simulated.durations.median_s=3.6",
    "agent.simulated.durations.cap_s=30",
    "learner.simulated.step_s=0.8",
    "engines.simulated.push_s=0.1",
    "buffer.batch_size=64",
    "dispatcher.slots_per_worker=96",
    "training.steps=80",
)
"""So many rollouts that their luck is below the 5 %: 3,200 in the measured steps of a run."""
LONG_SPACE = Space(slots=(96,), bounds=(2, 4), rules=("all", "fraction(0.75)", "fraction(0.5)"))


@pytest.mark.timeout(400)
async def test_a_rule_tuned_on_a_recorded_run_can_be_run(ray_cluster: None, tmp_path: Path) -> None:
    """The short form: no figure is compared, for CI's machines have other work."""
    recorded = (await rig.run_simulated(tmp_path, "recorded", *SHORT)).path
    space = Space(slots=(12,), bounds=(4,), rules=("fraction(0.5)",))
    tuned = run_tuning(prepare_tuning(TuneRequest(source=recorded, steps=8, space=space)), lambda *_: None)
    records = read_metrics(RunDirectory(path=recorded).metrics)
    steps = [record["step_s"] for record in records if record["kind"] == "step"]
    assert tuned.recording.settings["learner_s"] == pytest.approx(fmean(steps))
    assert min(steps) > 0.09, "of a learner that takes 0.1 s"
    assert tuned.searched.recorded.candidate.rule == "all"
    assert tuned.chosen.candidate.rule == "fraction(0.5)"
    chosen = (await rig.run_simulated(tmp_path, "chosen", *SHORT, *_settings(tuned))).path
    evidence = read_evidence(chosen)
    assert {group.rule for group in evidence.groups if group.rule} == {"fraction(0.5)"}
    assert any(rollout.late for rollout in evidence.rollouts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_the_predicted_step_time_matches_the_measured_one(ray_cluster: None, tmp_path: Path) -> None:
    """Within 5 %: the figure is of the measured steps, half of them warm up, on a machine that keeps up with real
    time."""
    recorded = (await rig.run_simulated(tmp_path, "recorded", *LONG)).path
    request = TuneRequest(source=recorded, out=tmp_path / "tuned", steps=60, space=LONG_SPACE)
    tuned = run_tuning(prepare_tuning(request), lambda *_: None)
    chosen = (await rig.run_simulated(tmp_path, "chosen", *LONG, *_settings(tuned))).path
    measured_s, predicted_s = read_run(chosen).step_s, tuned.searched.chosen_prediction.step_s
    assert measured_s is not None
    print("\n".join(tuned.lines()))
    print(f"measured {measured_s:.3f} s, predicted {predicted_s:.3f} s, load {os.getloadavg()}")
    assert tuned.chosen.candidate != tuned.searched.recorded.candidate
    assert measured_s < 0.95 * (tuned.recording.step_s or 0.0)
    assert measured_s == pytest.approx(predicted_s, rel=0.05)


def _settings(tuned: TuningResult) -> list[str]:
    """The pasted lines as overrides."""
    overrides, table = [], ""
    for line in tuned.toml().splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        elif line:
            key, _, value = line.partition(" = ")
            overrides.append(f"{table}.{key}={value}")
    return overrides
