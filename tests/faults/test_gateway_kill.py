"""A gateway that is killed during the work of agents: every agent ends normally, and every finished answer is trained
once, with the ids that the engine sampled."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, SessionId, SessionSpec
from headrace.serve.gateway.errors import GatewayUnreachable
from headrace.serve.gateway.http.client import GatewayClient
from support.chat_templates import FAT, LONG
from support.gateway_program import GatewayProgram, gateway_program
from support.gateway_rig import (
    ADMIN,
    CHAT,
    GUARD_S,
    WIRES,
    Client,
    Engine,
    Lines,
    Reply,
    call_text,
    deaf,
    serving,
    soon,
    until,
)
from support.scripted_engine import Ask, segments

AGENTS = 50
TURNS = 6
Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a prompt and of what was sampled from it."""


@dataclass(kw_only=True)
class UnevenEngine(Engine):
    """Engine whose turns have different durations."""

    chance: random.Random = field(default_factory=random.Random)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.latency_s = self.chance.uniform(0.0, 0.15)
        return await super().generate(request)


def unlike_any_other(name: str) -> Any:
    """A script whose answers differ from one another and from those of other engines; every third is a call."""

    def answer(ask: Ask) -> str:
        if ask.number % 3 == 0:
            return call_text("bash", command=f"echo {name}{ask.number}")
        return f"answer {name}{ask.number}" + " and so on" * (ask.number % 7)

    return answer


@dataclass
class Storm:
    """The agents' turns, counted, so that kills come after so many of them."""

    program: GatewayProgram
    http: aiohttp.ClientSession
    attempts: int
    told: int = 0
    lost: int = 0
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill_after(self, turns: int, logs: Path) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
        """Kill it and start it again; what of its turns was finished when it died, and what of that was not told, as
        far as the gateway knew: it notes that after the last byte."""
        while self.told < turns:
            self.grown.clear()
            await self.grown.wait()
        await self.program.kill()
        finished, untold = set(recorded_in(logs)), set(recorded_in(logs, untold=True))
        await self.program.start()
        return finished, untold

    async def converse(self, name: str, client: Client) -> None:
        """An agent: it keeps every answer, and asks the very same again until it has one, as vendors' SDKs do."""
        client.history += client.wire.user(f"I am {name}; begin.")
        for number in range(TURNS):
            reply = await self._persist(client)
            self.told += 1
            self.grown.set()
            client.history += client.wire.echo(reply.kept)
            results = [(call_id, f"{name} ran {number}") for call_id, _, _ in reply.calls]
            client.history += (
                client.wire.results(*results) if results else client.wire.user(f"{name}, and then? {number}")
            )

    async def _persist(self, client: Client) -> Reply:
        body = json.dumps(client.body()).encode()
        for attempt in range(self.attempts):
            if attempt > 1:
                # The first repetition is at once, and mostly finds nobody.
                await soon(self.program.up)
            try:
                reply = await client.send(body)
            except (aiohttp.ClientError, OSError):
                self.lost += 1
                continue
            if reply.status == 200:
                return reply
            assert reply.status >= 500, reply.raw
        raise AssertionError(f"no answer in {self.attempts} attempts")


def recorded_in(logs: Path, *, untold: bool = False) -> Iterator[tuple[int, ...]]:
    """Return the ids of every finished turn, of open and finished sessions; with `untold`, of those not known to have
    been delivered."""
    for path in logs.iterdir():
        events = [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        told = {event.get("delivered") or event.get("accepted") for event in events} if untold else set()
        for event in events:
            turn = event.get("recorded")
            if turn is not None and turn["status"] == "finished" and turn["answer"]["turn_id"] not in told:
                ids = array("i")
                ids.frombytes(base64.b64decode(turn["ids"]))
                yield tuple(ids)


def trained_in(report: SessionReport) -> list[Turn]:
    """Return every trained turn with its prefix in the row."""
    assert report.trajectory is not None
    rows = [(tuple(row.tokens_T.tolist()), segments(row.loss_mask_T)) for row in report.trajectory.rows]
    return [(tokens[:start], tokens[start:end]) for tokens, turns in rows for start, end in turns]


def settings_of(number: int) -> dict[str, Any]:
    return {"wire": WIRES[number % 3], "stream": bool(number // 3 % 2), "tools": ("bash",)}


async def storm(model_dir: Path, folder: Path, *, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(5, AGENTS * TURNS - 20), kills))
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(serving(UnevenEngine.of(model_dir, "<|im_end|>", unlike_any_other(name))))
            for name in ("left", "right")
        ]
        for engine in engines:
            engine.chance.seed(seed)
        logs = folder / "state"
        program = await stack.enter_async_context(gateway_program(model_dir, logs, [one.url for one in engines]))
        patient = aiohttp.ClientTimeout(total=2 * GUARD_S)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=patient, connector=aiohttp.TCPConnector(limit=0))
        )
        admin = await stack.enter_async_context(GatewayClient(program.url, ADMIN))
        names = [SessionId(f"agent-{number}x") for number in range(AGENTS)]
        opened = [await admin.open(SessionSpec(session_id=name)) for name in names]
        agents = Storm(program, http, attempts=2 * kills + 4)
        finished: set[tuple[int, ...]] = set()
        untold: set[tuple[int, ...]] = set()
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(opened):
                client = Client(http, one.base_url, **settings_of(number))
                group.create_task(agents.converse(one.session_id, client))
            for moment in moments:
                of_this_kill = await agents.kill_after(moment, logs)
                finished |= of_this_kill[0]
                untold |= of_this_kill[1]
        reports = await asyncio.gather(*map(admin.finish, names))
        assert agents.lost >= kills, "somebody was struck by each"
        outputs = check(reports, engines, untold)
        assert finished <= outputs, "what was finished when the gateway died is told, not sampled again"
        assert sorted(recorded_in(logs)) == sorted(outputs)


def check(reports: Sequence[Any], engines: Sequence[Engine], untold: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """What the agents were told. A last turn whose delivery the gateway had not noted when it died is trained by none:
    the agent had ended, and did not come back with it."""
    sampled = {(one.prompt_ids, one.output_ids): one.prompt for engine in engines for one in engine.sampled}
    trained: Counter[Turn] = Counter()
    masked_turns: list[tuple[int, ...]] = []
    for report in reports:
        assert isinstance(report, SessionReport)
        assert (report.turns, report.failures) == (TURNS, ())
        masked = report.masked.get("abandoned", 0)
        assert (sum(report.masked.values()), report.sampled_tokens) == (masked, report.trained_tokens + masked)
        turns = trained_in(report)
        assert len(turns) == TURNS - bool(masked)
        if masked:
            lost = [ids for ids in untold if len(ids) == masked and report.session_id in _told_to(ids, sampled)]
            assert len(lost) == 1, "only what was not told when the gateway died"
            masked_turns.append(lost[0])
        for turn in turns:
            assert set(re.findall(r"agent-\d+x", sampled[turn])) == {report.session_id}
        trained.update(turns)
    assert set(trained.values()) == {1}
    outputs = {output for _, output in trained} | set(masked_turns)
    assert len(outputs) == AGENTS * TURNS
    return outputs


def _told_to(ids: tuple[int, ...], sampled: Mapping[Turn, str]) -> set[str]:
    """The agents in whose prompts these ids were sampled."""
    prompts = (prompt for (_, output), prompt in sampled.items() if output == ids)
    return {name for prompt in prompts for name in re.findall(r"agent-\d+x", prompt)}


async def test_agents_of_a_killed_gateway_finish_and_no_token_is_lost_or_duplicated(
    model_dir: Path, tmp_path: Path
) -> None:
    await storm(model_dir, tmp_path, seed=1, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 22))
async def test_no_token_is_lost_whenever_the_gateway_is_killed(model_dir: Path, tmp_path: Path, seed: int) -> None:
    await storm(model_dir, tmp_path, seed=seed, kills=1 + seed % 6)


async def test_an_answer_in_transit_is_replayed_not_resampled(tmp_path: Path) -> None:
    """Killed between the first byte of an answer and its last."""
    model_dir = FAT.write(tmp_path / "model")
    async with AsyncExitStack() as stack:
        script = Lines(LONG * 24_000, LONG * 25_000, "sampled again")
        engine = await stack.enter_async_context(serving(Engine.of(model_dir, "<|im_end|>", script)))
        engine.context_length = 2**20
        program = await stack.enter_async_context(gateway_program(model_dir, tmp_path / "state", [engine.url]))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        admin = await stack.enter_async_context(GatewayClient(program.url, ADMIN))
        budgets = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2**20)
        opened = [await admin.open(SessionSpec(session_id=SessionId(name), budgets=budgets)) for name in ("a", "b")]
        clients = [Client(http, one.base_url, CHAT, stream=one.session_id == "a") for one in opened]
        for client in clients:
            client.history += CHAT.user("go")
            await stack.enter_async_context(deaf(client, client.body()))
        await program.kill()
        await program.start()
        for client, words in zip(clients, (24_000, 25_000), strict=True):
            assert (await client.send(client.body())).text == LONG * words
        reports = [await admin.finish(SessionId(name)) for name in ("a", "b")]
        assert len(engine.requests) == 2
        await program.kill()
        await program.start()
        for told in (reports, [await admin.finish(SessionId(name)) for name in ("a", "b")]):
            for report, one in zip(told, engine.sampled, strict=True):
                assert isinstance(report, SessionReport)
                assert trained_in(report) == [(one.prompt_ids, one.output_ids)]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("form", ["rows", "atif"])
async def test_exports_are_whole_whenever_the_gateway_is_killed(model_dir: Path, tmp_path: Path, form: str) -> None:
    out, names = tmp_path / "out", [SessionId(f"s-{number}") for number in range(12)]
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(Engine.of(model_dir, "<|im_end|>", Lines("word " * 8000))))
        engine.context_length = 2**20
        options = ("--export", str(out), "--export-form", form)
        program = await stack.enter_async_context(
            gateway_program(model_dir, tmp_path / "state", [engine.url], *options)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        admin = await stack.enter_async_context(GatewayClient(program.url, ADMIN))
        budgets = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2**20)
        for one in [await admin.open(SessionSpec(session_id=name, budgets=budgets)) for name in names]:
            client = Client(http, one.base_url, CHAT)
            await client.say("go")
            await client.say("and on")
        for _ in range(2):
            finishing = asyncio.gather(*map(admin.finish, names))
            await until(lambda: bool(whole_in(out)))
            await program.kill()
            with suppress(GatewayUnreachable):
                await finishing
            assert whole_in(out).items() <= {f"{name}.json": name for name in names}.items()
            await program.start()
        reports = await asyncio.gather(*map(admin.finish, names))
        assert all(isinstance(report, SessionReport) for report in reports)
        assert whole_in(out) == {f"{name}.json": name for name in names}
        assert len(list(out.iterdir())) == len(names), "nothing staged is left"


def whole_in(folder: Path) -> dict[str, str]:
    """The session ids of the files that another program reads; each must be complete."""
    return {path.name: json.loads(path.read_bytes())["session_id"] for path in folder.glob("*.json")}
