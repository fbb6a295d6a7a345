"""Engines that fail under live agents: whatever an agent makes of it, the outcome is infra and never a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.programs.agent import StopReason
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.buffer.trajectories.types import Cause
from support import agent_rig as rigs

pytestmark = [pytest.mark.whole, pytest.mark.agents, pytest.mark.namespaces, pytest.mark.timeout(300)]
PATIENCE_S = {"claude-code": 8, "codex": 8, "mini-swe-agent": 20, "qwen-code": 40, "opencode": 40}
"""None has given up by then, and each has started."""
SLOW = ("qwen-code", "opencode")
KINDS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PATIENCE_S]
ONE_RETRY: dict[str, dict[str, Any]] = {
    "claude-code": {"environment": {"CLAUDE_CODE_MAX_RETRIES": "1"}},
    "codex": {
        "arguments": [
            *("-c", "model_providers.gateway.request_max_retries=1"),
            *("-c", "model_providers.gateway.stream_max_retries=1"),
        ]
    },
    "mini-swe-agent": {"environment": {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}},
}
"""By which a recipe has an agent give up soon."""


class Failing:
    """Plays a command, then fails as told; `then` says whether it recovers."""

    def __init__(self, agent: str, faults: list[Any], *, recovers: bool) -> None:
        self._command = rigs.command_of(agent, "ls")
        self._ending = rigs.ending_of(agent)
        self._left = list(faults)
        self._last = None if recovers else faults[-1]
        self.failed = 0

    def __call__(self, ask: Any) -> Any:
        if "title generator" in ask.prompt:
            return "A title"
        if "ls" not in ask.prompt.rpartition("MAIN-TASK")[2] or "test_calc.py" not in ask.prompt:
            return self._command
        fault = self._left.pop(0) if self._left else self._last
        self.failed += fault is not None
        return fault or self._ending


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("agent", KINDS)
@pytest.mark.parametrize("trouble", ["error", "cut"])
async def test_an_engine_failure_hidden_by_the_agent_is_still_an_infra_failure(
    tokenizer_dir: Path, agent: str, trouble: str
) -> None:
    """Before the first token, and after some: the gateway's own second try fails too."""
    rigs.needs(agent)
    fault = rigs.scripted.Fault
    faults = [fault.ERROR, fault.ERROR] if trouble == "error" else [fault.ABORT, fault.CUT, fault.CUT]
    script = Failing(agent, faults, recovers=True)
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        result, stations = await rigs.rollout(rig, rigs.AGENTS[agent](ProgramConfig()), agent_timeout_s=150)
        assert script.failed == len(faults)
        [report], [record] = stations.reports, stations.records
        assert (report.stop, report.exit_code) == (StopReason.FINISHED, 0), "it hides what it was served"
        check_infra(result, record)
        rigs.scripted.check_exact(record, [rig.engine])


@pytest.mark.parametrize("agent", ONE_RETRY)
async def test_an_agent_that_gives_up_on_a_permanently_failing_engine_is_an_infra_failure(
    tokenizer_dir: Path, agent: str
) -> None:
    rigs.needs(agent)
    script = Failing(agent, [rigs.scripted.Fault.ERROR], recovers=False)
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        program = ProgramConfig.model_validate(ONE_RETRY[agent])
        result, stations = await rigs.rollout(rig, rigs.AGENTS[agent](program), agent_timeout_s=150)
        [report], [record] = stations.reports, stations.records
        assert (report.stop, report.exit_code) == (StopReason.ERROR, 1)
        check_infra(result, record)
        rigs.scripted.check_exact(record, [rig.engine])


@pytest.mark.slow
@pytest.mark.parametrize("agent", PATIENCE_S)
async def test_a_permanently_failing_engine_is_an_infra_failure(tokenizer_dir: Path, agent: str) -> None:
    rigs.needs(agent)
    script = Failing(agent, [rigs.scripted.Fault.ERROR], recovers=False)
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        result, stations = await rigs.rollout(
            rig, rigs.AGENTS[agent](ProgramConfig()), agent_timeout_s=PATIENCE_S[agent]
        )
        assert script.failed >= 2
        check_infra(result, *stations.records)


def check_infra(result: Any, record: Any) -> None:
    assert record.failures, "it reached the agent"
    assert (result.outcome.cause, result.outcome.reward, result.outcome.trainable) == (Cause.INFRA, None, False)
    assert result.outcome.detail.startswith("agent: was served a failure: engine_failed")
