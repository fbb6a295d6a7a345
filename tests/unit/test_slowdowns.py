"""Planted slowdowns of the simulated backends, and the time that simulated sessions report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.actors.agents.programs.simulated import SimulatedAgentConfig
from headrace.actors.errors import ConfigError
from headrace.actors.rollouts.sessions import SimulatedSession
from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.buffer.primitives.slowdowns import Slowdown, Slowdowns, SlowKind
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.simulated import Served, SimulatedEngine, SimulatedEnginesConfig
from headrace.sandboxes.simulated.provider import SimulationConfig
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.capture.session_usage import SessionUsage

SMALL = {
    "slots": 16,
    "batch_size": 16,
    "group_size": 4,
    "tasks": 16,
    "steps": 3,
    "turns": 3,
    "learner_s": 20.0,
    "push_s": 3.0,
    "boot_s": 8.0,
    "durations": {"mean_s": 60.0, "median_s": 50.0, "cap_s": 400.0},
}


def served(number: int, *, generating: bool = True, **config: Any) -> Served:
    engines = SimulatedEnginesConfig(**config)
    return Served(number=number, version=PolicyVersion(1, 0), generating=generating, config=engines)


def usage_of_session(config: dict[str, Any], *, key: str = "task g0-0 1", pause: bool = False) -> SessionUsage:
    """A session of two turns of 10 s with a tool of 4 s between them; engines serve from second 3 on, and a pause lasts
    from second 5 to 25."""

    async def main() -> SessionUsage:
        engine, loop = SimulatedEngine(), asyncio.get_running_loop()
        loop.call_at(3.0, engine.set_served, served(1, **config))
        if pause:
            loop.call_at(5.0, engine.set_served, served(2, generating=False, **config))
            loop.call_at(25.0, engine.set_served, served(3, **config))
        session = SimulatedSession(key=key, engine=engine, temperature=1.0)
        await session.turn(6, 10.0)
        await session.use("bash", 4.0)
        await session.turn(6, 10.0)
        return session.report(SessionId("s")).usage

    return run_virtual(main())


def seconds(usage: SessionUsage) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part, start_s, end_s in usage.segments:
        totals[part] = totals.get(part, 0.0) + end_s - start_s
    return {part: round(total, 2) for part, total in totals.items()}


def test_a_session_reports_the_time_of_its_parts_engine_and_tokens() -> None:
    usage = usage_of_session({"engines": 3})
    assert seconds(usage) == {"gate": 3, "engine.queue": 1, "engine.prefill": 3, "engine.decode": 16, "tool.bash": 4}
    assert (usage.segments[0][1], usage.segments[-1][2]) == (-27.0, 0.0)
    assert usage.engines[0] in {"engine-0", "engine-1", "engine-2"}
    assert (usage.tools, usage.retractions) == (("bash",), 0)
    # Prompts of 8 and of 8 + 6 + 2 tokens; the second is cached up to the first answer.
    assert (usage.prompt_tokens, usage.cached_tokens) == (8 + 16, 14)


def test_a_pause_counts_as_gate_wherever_it_cuts_a_turn() -> None:
    usage = usage_of_session({}, pause=True)
    assert seconds(usage) == {"gate": 23, "engine.queue": 1, "engine.prefill": 3, "engine.decode": 16, "tool.bash": 4}


def test_only_sessions_on_the_slow_engine_decode_slowly() -> None:
    slow = Slowdown(kind=SlowKind.ENGINE, name="engine-1", factor=3.0)
    usages = [usage_of_session({"engines": 2, "slowdowns": (slow,)}, key=f"task g0-{n} 1") for n in range(12)]
    decoded = {(usage.engines, seconds(usage)["engine.decode"]) for usage in usages}
    assert decoded == {(("engine-0",), 16.0), (("engine-1",), 48.0)}


def test_retractions_are_counted_and_prolong_decoding() -> None:
    usage = usage_of_session({"slowdowns": (Slowdown(kind=SlowKind.RETRACTION, factor=2.0),)})
    assert (usage.retractions, seconds(usage)["engine.decode"]) == (2, 32.0)


def test_a_draw_depends_on_its_key_alone_and_has_the_configured_share() -> None:
    slowdowns = Slowdowns([Slowdown(kind=SlowKind.HOST, name="a", factor=3.0, share=0.25)], seed=1)
    drawn = [slowdowns.factor(SlowKind.HOST, "a", str(key)) for key in range(2000)]
    assert drawn == [slowdowns.factor(SlowKind.HOST, "a", str(key)) for key in range(2000)]
    assert set(drawn) == {1.0, 3.0}
    assert abs(drawn.count(3.0) / 2000 - 0.25) < 0.04
    assert slowdowns.factor(SlowKind.HOST, "b", "0") == slowdowns.factor(SlowKind.IMAGE, "a", "0") == 1.0


def test_tools_on_a_host_with_little_cpu_take_longer_for_the_same_cpu_time(tmp_path: Path) -> None:
    slow = {"kind": "cpu", "name": "host-1", "factor": 5.0}
    found = evidence(tmp_path / "run", hosts=2, slowdowns=[slow])
    cpus: dict[str, set[tuple[float, float]]] = {"host-0": set(), "host-1": set()}
    for attempt in found.attempts:
        if attempt.breakdown is not None and attempt.reward is not None:
            used_s, tool_s = attempt.breakdown.labels["cpu_s"], attempt.breakdown.parts_s["tool.bash"]
            waited_s = attempt.breakdown.labels["cpu_waited_s"]
            assert isinstance(used_s, float)
            assert isinstance(waited_s, float)
            cpus[attempt.host].add((round(used_s / tool_s, 2), round(waited_s / tool_s, 2)))
    assert cpus == {"host-0": {(0.5, 0.0)}, "host-1": {(0.1, 0.8)}}


@pytest.mark.parametrize(
    ("model", "slowdown", "reason"),
    [
        (SimulationConfig, {"kind": "engine"}, "move it to engines.simulated"),
        (SimulationConfig, {"kind": "host", "name": "host-7"}, "name one of host, or none"),
        (SimulatedEnginesConfig, {"kind": "engine", "name": "engine-1"}, "name one of engine-0, or none"),
        (SimulatedEnginesConfig, {"kind": "tool"}, "move it to agent.simulated"),
        (SimulatedAgentConfig, {"kind": "tool", "tool": "grep"}, "name one of bash, or none"),
        (SimulatedAgentConfig, {"kind": "tool", "factor": 1}, "greater than 1"),
    ],
)
def test_impossible_slowdowns_are_refused(model: Any, slowdown: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        model(slowdowns=(slowdown,))


@pytest.mark.parametrize(
    ("slowdown", "reason"),
    [
        ({"kind": "image", "name": "image-3"}, "name one of image-0, image-1, or none"),
        ({"kind": "evaluator", "name": "simulated-00099"}, "does not exist"),
        ({"kind": "host", "tool": "bash"}, "the kind is not tool"),
    ],
)
def test_a_plan_refuses_slowdowns_of_what_does_not_exist(slowdown: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_plan("swe64", SMALL | {"images": 2, "slowdowns": [slowdown]})


def evidence(folder: Path, **changes: Any) -> Evidence:
    run_plan(make_plan("swe64", SMALL | changes), folder)
    return read_evidence(folder)


def test_parts_add_up_and_carry_the_labels_of_a_real_run(tmp_path: Path) -> None:
    found = evidence(tmp_path / "run", hosts=2, images=2, engines=2, tools=["bash", "edit"], evaluate_s=5.0)
    scored = [attempt for attempt in found.attempts if attempt.reward is not None]
    assert len(scored) >= 3 * 16
    for attempt in scored:
        breakdown = attempt.breakdown
        assert breakdown is not None
        assert sum(breakdown.parts_s.values()) == pytest.approx(breakdown.wall_s, abs=0.01)
        assert breakdown.parts_s.get("other", 0.0) < 0.02 * breakdown.wall_s
        assert breakdown.parts_s["evaluate.check"] == pytest.approx(5.0)
        assert {"boot", "engine.queue", "engine.prefill", "engine.decode"} <= breakdown.parts_s.keys()
        assert breakdown.labels["image"] in {"image-0", "image-1"}
        assert set(breakdown.labels["engines"]) <= {"engine-0", "engine-1"}  # type: ignore[arg-type]


def test_boots_on_a_slow_host_take_longer(tmp_path: Path) -> None:
    slow = {"kind": "host", "name": "host-1", "factor": 6.0}
    found = evidence(tmp_path / "run", hosts=2, slowdowns=[slow])
    boots: dict[str, list[float]] = {"host-0": [], "host-1": []}
    for attempt in found.attempts:
        if attempt.host:
            boots[attempt.host].append(dict(attempt.phases_s)["boot"])
    assert 3 < median(boots["host-1"]) / median(boots["host-0"]) < 12


def test_checks_of_a_slow_task_take_longer(tmp_path: Path) -> None:
    slow = {"kind": "evaluator", "name": "simulated-00003", "factor": 5.0}
    found = evidence(tmp_path / "run", evaluate_s=10.0, slowdowns=[slow], tasks=12)
    tasks = {group.group_id: group.task_id for group in found.groups}
    checks = {
        (tasks[found_rollout.group_id] == "simulated-00003", round(dict(attempt.phases_s)["evaluate"]))
        for attempt in found.attempts
        for found_rollout in found.rollouts
        if found_rollout.rollout_id == attempt.rollout_id and "evaluate" in dict(attempt.phases_s)
    }
    assert checks == {(False, 10), (True, 50)}


def test_attempts_of_a_task_with_retries_fail_and_are_repeated(tmp_path: Path) -> None:
    slow = {"kind": "retries", "name": "simulated-00003", "share": 0.5}
    found = evidence(tmp_path / "run", hosts=3, slowdowns=[slow], tasks=12, buffer={"max_attempts": 20})
    failed = [attempt for attempt in found.attempts if attempt.cause is Cause.INFRA]
    groups = {rollout.rollout_id: rollout.group_id for rollout in found.rollouts}
    tasks = {group.group_id: group.task_id for group in found.groups}
    assert failed
    assert {tasks[groups[attempt.rollout_id]] for attempt in failed} == {"simulated-00003"}


def test_evaluations_beside_training_are_recorded_with_the_ledgers_times(tmp_path: Path) -> None:
    from headrace.actors.record.files.metrics import read_metrics

    found = evidence(tmp_path / "run", evaluate_every=1, heldout=4, boots=2)
    evaluations = read_metrics(tmp_path / "run" / "metrics.jsonl", ("evaluation",))
    assert [evaluation["tag"] for evaluation in evaluations][:1] == ["base"]
    assert {evaluation["answers"] for evaluation in evaluations} == {4}
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl", ("step",))
    times = [commit.committed_at_s for commit in found.commits]
    assert [step["time_s"] for step in steps] == pytest.approx(times, abs=1.0)
