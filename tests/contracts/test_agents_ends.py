"""How live agents end before they are done: budgets are a normal answer, death ends what the engine does for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.programs.agent import StopReason
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.errors import SandboxGone
from headrace.serve.gateway.capture.events import Exhausted
from support import agent_rig as rigs

pytestmark = [pytest.mark.whole, pytest.mark.agents, pytest.mark.namespaces]
SLOW = ("qwen-code", "opencode")
START_S = {"claude-code": 3, "codex": 3, "mini-swe-agent": 8, "qwen-code": 15, "opencode": 15}
"""Each has begun its first turn by then."""


def kinds(*quick: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in START_S]


def titled(*lines: Any) -> Any:
    """A script; whoever asks for a title gets one."""
    return rigs.scripted.Parts({"title generator": ["A title"], "": lines})


async def spend(tokenizer_dir: Path, agent: str, script: Any, **budgets: Any) -> Any:
    """Run an agent until its budget is spent; it must have ended as if it were done."""
    rigs.needs(agent)
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(rigs.AGENTS[agent](ProgramConfig()), **budgets)
        assert ran.agent.exit_code == 0, ran.agent.log_tail[-2000:]
        # A final answer has no call, which mini-swe-agent asks for three times and then does without.
        assert ran.agent.stop is (StopReason.ERROR if agent == "mini-swe-agent" else StopReason.FINISHED)
        assert ran.session.failures == ()
        rigs.scripted.check_exact(ran.session, [rig.engine])
        await ran.check_quiet()
        return ran


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("agent", kinds("claude-code", "codex", "mini-swe-agent"))
async def test_an_exhausted_turn_budget_ends_an_agent_normally(tokenizer_dir: Path, agent: str) -> None:
    script = titled(*(rigs.command_of(agent, f"echo {turn} >> turns") for turn in range(9)))
    ran = await spend(tokenizer_dir, agent, script, max_turns=3)
    assert ran.session.exhausted is Exhausted.TURNS
    assert sum(script.played().values()) == ran.session.turns == 3


@pytest.mark.parametrize("agent", kinds("claude-code", "codex"))
async def test_an_exhausted_token_budget_ends_an_agent_normally(tokenizer_dir: Path, agent: str) -> None:
    """In the middle of a turn, which is the last one."""
    script = titled(*(rigs.command_of(agent, f"echo {turn} >> turns") for turn in range(9)))
    ran = await spend(tokenizer_dir, agent, script, max_sampled_tokens=100)
    assert ran.session.exhausted is Exhausted.TOKENS
    assert ran.session.sampled_tokens == 100


@pytest.mark.parametrize("agent", kinds("claude-code", "codex"))
async def test_an_exhausted_time_budget_ends_an_agent_normally(tokenizer_dir: Path, agent: str) -> None:
    script = titled(rigs.command_of(agent, "ls"), rigs.scripted.Fault.HANG)
    ran = await spend(tokenizer_dir, agent, script, wall_s=START_S[agent])
    assert ran.session.exhausted is Exhausted.WALL
    assert sum(ran.session.masked.values()) == ran.session.masked.get("aborted", 0) + ran.session.masked.get("side", 0)


class Hanging:
    """One command, then a turn that never ends; `hangs` once an engine is at it."""

    def __init__(self, agent: str) -> None:
        self._play = titled(rigs.command_of(agent, "ls"), rigs.scripted.Fault.HANG)
        self._hang = rigs.scripted.Fault.HANG
        self.hangs = asyncio.Event()

    def __call__(self, ask: Any) -> Any:
        said = self._play(ask)
        if said is self._hang:
            self.hangs.set()
        return said


async def strike(tokenizer_dir: Path, agent: str, blow: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """A rollout whose second turn runs for ever, until `blow` falls. The engine must be told then, and no other turn
    begins."""
    rigs.needs(agent)
    script = Hanging(agent)
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        running = asyncio.ensure_future(rigs.rollout(rig, rigs.AGENTS[agent](ProgramConfig()), agent_timeout_s=60))
        async with asyncio.timeout(60):
            await script.hangs.wait()
        [sandbox] = rig.attached
        request = rig.engine.requests[-1]["rid"]
        await blow(rig, sandbox)
        async with asyncio.timeout(60):
            await rig.engine.aborted[request].wait()
        result, stations = await running
        [record] = stations.records
        rigs.scripted.check_exact(record, [rig.engine])
        assert record.masked.get("aborted") == 1
        assert record.failures == ()
        return result, stations


COMM = {
    "claude-code": "claude",
    "codex": "codex",
    "mini-swe-agent": "python3",
    "qwen-code": "node",
    "opencode": "opencode",
}


@pytest.mark.parametrize("agent", kinds("claude-code", "codex"))
async def test_the_files_of_an_agent_killed_during_a_turn_are_evaluated(tokenizer_dir: Path, agent: str) -> None:
    async def kill(_: Any, sandbox: Any) -> None:
        # The rollout may be over, and its sandbox with it, before this command has ended.
        with suppress(SandboxGone):
            killed = await sandbox.exec(f"pkill -9 '^{COMM[agent]}'", timeout_s=10)
            assert killed.exit_code == 0, killed

    result, stations = await strike(tokenizer_dir, agent, kill)
    [report] = stations.reports
    assert (report.stop, report.exit_code) == (StopReason.ERROR, 137)
    assert (result.outcome.cause, result.outcome.reward) == (Cause.SOLVED, 1.0)


@pytest.mark.parametrize("agent", kinds("claude-code"))
async def test_a_sandbox_that_dies_during_a_turn_is_an_infra_failure(tokenizer_dir: Path, agent: str) -> None:
    async def destroy(rig: Any, sandbox: Any) -> None:
        await rig.provider.destroy(sandbox.id)

    result, stations = await strike(tokenizer_dir, agent, destroy)
    assert stations.reports == []
    assert (result.outcome.cause, result.outcome.reward, result.outcome.trainable) == (Cause.INFRA, None, False)
