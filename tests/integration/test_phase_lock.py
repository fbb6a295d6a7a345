"""F13: many sessions with a slow simulated customer wait for it together, and the event loop stays free."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from headrace.actors.agents.loop.agent import LoopAgent
from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.actors.environments.retail.environment import RetailConfig, RetailEnvironment, load_shop
from headrace.actors.services.chat import ChatCall, ChatMessage, ChatOptions, ChatReply
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.rule_user import STOP
from headrace.actors.services.service import Services
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from support.retail_shop import CANCEL, OneModel, retail_task, secret_of, write_shop
from support.scripted_service import ScriptedService, completion

SESSIONS, LINES = 64, 6
MEAN_S, SIGMA = 1.0, 0.5


def lognormal_delays(mean_s: float, sigma: float, seed: str) -> Iterator[float]:
    """Yield lognormal delays in seconds, without end."""
    source = random.Random(seed)
    while True:
        yield source.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)


@dataclass
class Customer:
    """Helper model with lognormal latency that plays the customer of every session: it answers LINES - 1 times, and
    then ends the conversation."""

    latencies_s: dict[str, Iterator[float]] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    """Latencies of each session, added up."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """Time of each change of the number of requests in progress, and the change."""

    async def complete(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> str:
        return await self.line(messages[0].content, sum(message.role == "assistant" for message in messages))

    async def line(self, instruction: str, spoken: int) -> str:
        session = instruction.split("zip code is ")[1][:5]
        delays_s = self.latencies_s.setdefault(session, lognormal_delays(MEAN_S, SIGMA, session))
        clock = asyncio.get_running_loop().time
        self.changes.append((clock(), 1))
        self.waited_s[session] = self.waited_s.get(session, 0.0) + (delay_s := next(delays_s))
        await asyncio.sleep(delay_s)
        self.changes.append((clock(), -1))
        return STOP if spoken + 1 >= LINES else "Please cancel order #W1."

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion."""
        said = (await request.json())["messages"]
        spoken = sum(message["role"] == "assistant" for message in said)
        return web.json_response(completion(await self.line(said[0]["content"], spoken)))

    def mean_in_progress(self, until_s: float) -> float:
        """Mean number of requests in progress from the first one on."""
        total, number, since_s = 0.0, 0, self.changes[0][0]
        for at_s, change in self.changes:
            if at_s > until_s:
                break
            total += number * (at_s - since_s)
            number, since_s = number + change, at_s
        return (total + number * (until_s - since_s)) / (until_s - self.changes[0][0])


class Script:
    """A policy that cancels the order, and then asks whether there is anything else."""

    def __init__(self) -> None:
        self._answers = 0

    async def __call__(self, messages: Sequence[ChatMessage], options: ChatOptions) -> ChatReply:
        self._answers += 1
        if self._answers != 1:
            return ChatReply(text="It has been cancelled. Is there anything else?", finish_reason="stop")
        call = ChatCall(id="1", name=CANCEL["name"], arguments=json.dumps(CANCEL["kwargs"]))
        return ChatReply(text="", finish_reason="tool_calls", calls=(call,))


@dataclass(frozen=True, kw_only=True)
class Played:
    """`first_end_s` is the time at which the first session ended, `wall_s` the time that all took."""

    reports: list[AgentReport]
    first_end_s: float
    wall_s: float


async def play(shop: Path, services: Services) -> Played:
    """Play all sessions at once."""
    environment = RetailEnvironment(RetailConfig(data=str(shop), simulator="llm", service="user"))
    agent = LoopAgent(LoopConfig(parser="calls", max_turns=30), environment)
    clock = asyncio.get_running_loop().time
    ends_s = []

    async def one(number: int) -> AgentReport:
        instruction = f"Your name is Una Bergh and your zip code is {10000 + number}. Cancel order #W1."
        task = retail_task(secret_of(CANCEL, instruction=instruction), name=f"t{number}")
        report = await agent.run(
            session=AgentSession(base_url="", chat=Script(), services=services),  # type: ignore[arg-type]
            sandbox=None,
            task=task,
        )
        ends_s.append(clock())
        return report

    start_s = clock()
    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(one(number)) for number in range(SESSIONS)]
    reports = [done.result() for done in playing]
    return Played(reports=reports, first_end_s=min(ends_s), wall_s=clock() - start_s)


def check(played: Played, customer: Customer) -> None:
    assert all(report.stop is StopReason.FINISHED and report.turns == LINES for report in played.reports)
    verdicts = [report.episode.verdict for report in played.reports if report.episode is not None]
    assert [verdict.reward for verdict in verdicts if verdict is not None] == [1.0] * SESSIONS
    assert customer.mean_in_progress(played.first_end_s) >= 0.8 * SESSIONS
    assert played.wall_s <= 1.3 * max(customer.waited_s.values())


def test_F13_sessions_with_a_slow_customer_wait_together(tmp_path: Path) -> None:
    """In virtual time, whatever runs one after the other shows; the event loop's lag does not."""
    load_shop(RetailConfig(data=str(write_shop(tmp_path)), simulator="llm", service="user"))
    customer = Customer()
    check(run_virtual(play(tmp_path, OneModel(customer))), customer)


@pytest.mark.slow
async def test_F13_the_event_loop_is_free_while_sessions_wait_for_a_slow_customer(tmp_path: Path) -> None:
    """In real time, over HTTP."""
    customer, lags_s = Customer(), []

    async def watch() -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + 0.01
            await asyncio.sleep(0.01)
            lags_s.append(clock() - due_s)

    async with ScriptedService(customer.answer).served() as url:
        services = {"user": ServiceConfig(kind="model", url=url, max_concurrency=SESSIONS)}
        async with ServiceClients(services) as clients:
            watching = asyncio.create_task(watch())
            played = await play(write_shop(tmp_path), clients)
            watching.cancel()
            totals = clients.figures()["user"].totals
    check(played, customer)
    assert (totals.calls, totals.failures, totals.retries) == (SESSIONS * LINES, 0, 0)
    assert sorted(lags_s)[int(0.99 * len(lags_s))] < 0.05
