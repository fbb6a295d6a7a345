"""F8: an engine answers 500 when a push resumes it, twice or for ever. Engines, group and gateway are those of the
product; a proxy before one engine gives the answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.actors.engines.fleet import attached_id
from headrace.actors.run.exit_codes import EXIT_TRANSIENT, exit_code_of_run
from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineUnavailable
from headrace.policies.push.machine import Phase
from headrace.policies.push.resuming import ATTEMPTS, FIRST_WAIT_S
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import SessionReport
from support import group_rig as kit
from support.refusing_proxy import RefusingProxy, refusing_proxy

RESUME = "/continue_generation"
TOKENS = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [kit.write_weights(folder / str(seed), seed) for seed in range(2)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)


@dataclass
class Attached:
    """A group of attached engines, the first of them behind the proxy, which serve 1.0."""

    rig: kit.Rig
    proxy: RefusingProxy

    @property
    def name(self) -> str:
        return attached_id(self.proxy.url)

    async def push_during_turns(self, model: Path, turns: int) -> list[SessionReport]:
        """Push 1.1 while turns run, some on the engine behind the proxy; return what was recorded of them."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.rig.turn(TOKENS)) for _ in range(turns)]
            await kit.until_running(self.rig.group._fleet[EngineId(self.name)].client, 1)
            await self.rig.push(model, 1)
        return [turn.result() for turn in running]


@asynccontextmanager
async def attached(models: list[Path], folder: Path, *others: str) -> AsyncIterator[Attached]:
    async with kit.servers(models[0], folder, "behind", *others) as servers:
        urls = [server.url for server in servers.values()]
        async with (
            refusing_proxy(urls[0]) as proxy,
            kit.open_group(models[0], folder, count=0, attach=[proxy.url, *urls[1:]]) as rig,
        ):
            await rig.push(models[0], 0)
            proxy.calls.clear()
            yield Attached(rig, proxy)


def assert_nothing_was_lost(reports: list[SessionReport]) -> None:
    """Every turn is whole with all the tokens that were sampled for it, and none ended with a failure, which its
    rollout would be charged with."""
    for report in reports:
        assert (report.turns, report.failures, report.masked) == (1, (), {})
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        assert int(row.loss_mask_T.sum()) == report.trained_tokens == report.sampled_tokens > 0
        ended_itself = int(row.tokens_T[-1]) in ChatTokenizer(kit.TINY).stop_ids
        assert report.sampled_tokens == TOKENS or ended_itself


async def test_f8_a_resume_that_fails_twice_is_retried_with_backoff(models: list[Path], tmp_path: Path) -> None:
    async with attached(models, tmp_path, "other") as run:
        run.proxy.refusing[RESUME] = 2
        assert_nothing_was_lost(await run.push_during_turns(models[1], 6))
        engines = await run.rig.until_serving(2, "1.1")
        assert (engines[run.name].breaker, engines[run.name].reason) == ("closed", "")
        resumes = run.proxy.of(RESUME)
        assert [call.status for call in resumes] == [500, 500, 200]
        waits_s = [later.at_s - sooner.at_s for sooner, later in pairwise(resumes)]
        assert waits_s[0] >= FIRST_WAIT_S
        assert waits_s[1] >= 2 * FIRST_WAIT_S
        assert kit.versions_of(await run.rig.turn()) == {"1.1"}


async def test_f8_no_request_comes_before_the_engine_says_that_it_generates(models: list[Path], tmp_path: Path) -> None:
    """Turns that begin while the only engine is asked to resume wait until then."""
    async with attached(models, tmp_path) as run:
        run.proxy.refusing[RESUME] = 2
        begun: list[asyncio.Task[SessionReport]] = []
        async with asyncio.TaskGroup() as tasks:

            async def begin_turns() -> None:
                begun.extend(tasks.create_task(run.rig.turn(TOKENS)) for _ in range(4))

            run.rig.before(0, Phase.RESUME, begin_turns)
            await run.rig.push(models[1], 1)
        assert_nothing_was_lost([turn.result() for turn in begun])
        refused, awake = (next(call for call in run.proxy.of(RESUME) if call.status == status) for status in (500, 200))
        ready = next(call for call in run.proxy.of("/ready") if call.at_s > awake.at_s)
        first = run.proxy.of("/generate")[0]
        assert ready.status == 200
        assert refused.at_s < awake.at_s < ready.at_s < first.at_s


async def test_f8_a_gate_opens_without_a_question_that_waits_for_a_step(models: list[Path], tmp_path: Path) -> None:
    """An engine that has just been resumed answers these questions after the prefill of all that it retracted."""
    async with attached(models, tmp_path) as run:

        async def begin_step() -> None:
            run.proxy.late_s = dict.fromkeys(("/server_info", "/model_info", "/v1/loads", "/health"), 3600.0)

        async def end_step() -> None:
            run.proxy.late_s = {}

        run.rig.before(0, Phase.RESUME, begin_step)
        run.rig.before(0, Phase.OPEN, end_step)
        assert_nothing_was_lost(await run.push_during_turns(models[1], 4))
        await run.rig.until_serving(1, "1.1")


async def test_f8_an_engine_that_never_resumes_is_out_of_routing_until_it_does(
    models: list[Path], tmp_path: Path
) -> None:
    async with attached(models, tmp_path, "other") as run:
        run.proxy.refusing[RESUME] = math.inf
        assert_nothing_was_lost(await run.push_during_turns(models[1], 6))
        engines = await run.rig.until(lambda engines: engines[run.name].state == "quarantined")
        assert "does not wake up" in engines[run.name].reason
        assert [engine.version for engine in engines.values() if engine.state == "serving"] == ["1.1"]
        assert run.proxy.of(RESUME)[ATTEMPTS - 1].status == 500
        run.proxy.refusing.clear()
        await run.rig.until_serving(2, "1.1")


async def test_f8_a_run_whose_only_engine_never_resumes_ends_and_can_be_restarted(
    models: list[Path], tmp_path: Path
) -> None:
    async with attached(models, tmp_path) as run:
        run.proxy.refusing[RESUME] = math.inf
        with pytest.raises(EngineUnavailable, match=r"no engine could be updated to version 1\.1") as ended:
            await run.rig.push(models[1], 1)
        assert exit_code_of_run(ended.value) == EXIT_TRANSIENT


async def test_f8_an_engine_of_the_run_that_never_resumes_is_replaced(models: list[Path], tmp_path: Path) -> None:
    async with kit.open_group(models[0], tmp_path, count=2) as rig:
        await rig.push(models[0], 0)
        name, status = next(iter((await rig.until_serving(2, "1.0")).items()))
        async with refusing_proxy(status.url) as proxy:
            proxy.refusing[RESUME] = math.inf
            # The way from the group to its engine; that of the gateway stays.
            rig.group._fleet[name].client._transport.url = proxy.url
            await rig.push(models[1], 1)
            engines = await rig.until_serving(2, "1.1")
        assert name not in engines
        assert len(proxy.of(RESUME)) >= ATTEMPTS
