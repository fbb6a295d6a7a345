"""The loop agent through a real gateway: scripted engines sample, and every row holds exactly what they sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.loop import agent as loop_agent
from headrace.actors.agents.loop.agent import NOT_RUN, LoopAgent
from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason, marks_warnings
from headrace.actors.environments.environment import (
    Action,
    Clock,
    EpisodeEnd,
    Observation,
    ObservationPart,
    PartKind,
    observed,
)
from headrace.actors.environments.search import SearchConfig, SearchEnvironment
from headrace.actors.evaluation.graders.answer import has_structure, score_answer
from headrace.actors.evaluation.graders.verdict import Author
from headrace.actors.services.chat import ChatClient, ChatMessage, ChatTool
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.service import NO_SERVICES, ServiceDown, Services
from headrace.actors.services.started import resolved, running_services, stop_services
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.tasks.datasets.facts import Fact, write_corpus
from headrace.buffer.tasks.evaluators import EnvironmentEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.sanitizer import plain_scores
from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.sandboxes.base import Sandbox
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from support.gateway_rig import Lines, World, world
from support.scripted_engine import Fault, check_exact

FACT = Fact("otter", "color")
SEARCH = LoopConfig.model_validate({"parser": "search", "inline": True, "max_turns": 4, "malformed": "\nAgain.\n"})
ECHO_TASK = Task(id=TaskId("echo"), family="echo", instruction="Go.", evaluator=EnvironmentEvaluator())


@dataclass
class Repeating:
    """An environment that repeats what it is told, and counts how often its episodes were closed."""

    needs_sandbox = False
    actions = None
    services = ()
    fails: bool = False
    closed: list[int] = field(default_factory=list)

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> RepeatingEpisode:
        return RepeatingEpisode(self)


class RepeatingEpisode:
    messages: tuple[ChatMessage, ...] = (ChatMessage(role="user", content="Begin."),)
    tools = (ChatTool(name="repeat", description="Repeats.", parameters={"type": "object", "properties": {}}),)

    def __init__(self, environment: Repeating) -> None:
        self._environment = environment
        self._acts = 0

    async def act(self, action: Action) -> Observation:
        if self._environment.fails:
            raise ServiceDown("repeater", "no answer")
        self._acts += 1
        text = f"{self._acts}: {action.name} {dict(action.arguments)}"
        return observed(text, ends="stop" in text)

    async def close(self) -> EpisodeEnd:
        self._environment.closed.append(self._acts)
        return EpisodeEnd(artifacts={"acts": str(self._acts)})


@asynccontextmanager
async def retriever(folder: Path) -> AsyncIterator[Services]:
    """A real retriever in a process of its own."""
    write_corpus(folder / "corpus.jsonl")
    config = {"retriever": ServiceConfig.model_validate({"kind": "retriever", "corpus": folder / "corpus.jsonl"})}
    try:
        async with (
            running_services(config, folder / "services") as urls,
            ServiceClients(resolved(config, urls)) as clients,
        ):
            yield clients
    finally:
        await stop_services(folder / "services")


async def play(
    w: World,
    agent: LoopAgent,
    task: Task,
    *,
    services: Services = NO_SERVICES,
    agent_s: float | None = None,
    budgets: Budgets | None = None,
    marks_warnings: bool = False,
) -> tuple[AgentReport, SessionReport]:
    allowed = budgets or Budgets()
    base_url = await w.open(budgets=allowed, marks_warnings=marks_warnings)
    session = AgentSession(
        base_url=base_url,
        chat=ChatClient(w.http, base_url),
        context_tokens=allowed.max_context_tokens,
        turn_tokens=allowed.max_tokens_per_turn,
        services=services,
        agent_s=agent_s,
    )
    report = await agent.run(session=session, sandbox=None, task=task)
    return report, await w.finish()


async def test_an_inline_search_is_one_row_that_ends_with_its_tag(model_dir: Path, tmp_path: Path) -> None:
    said = [f"<think>which?</think><search>{FACT.query}</search>", f"<think>so</think><answer>{FACT.value}</answer>"]
    # F15: this engine runs on after the tag.
    lines = Lines(*(f"{text} and more text that nobody asked for" for text in said))
    agent = LoopAgent(SEARCH, SearchEnvironment(SearchConfig()))
    async with world(model_dir, lines) as w, retriever(tmp_path) as services:
        report, record = await play(w, agent, FACT.task(), services=services)
        check_exact(record, w.engines)
        decode = w.engines[0].tokenizer.decode
        assert (report.stop, report.turns) == (StopReason.FINISHED, 2)
        assert record.trajectory is not None
        (row,) = record.trajectory.rows
        assert decode(row.tokens_T[row.loss_mask_T].tolist()) == "".join(said)
        assert decode(row.tokens_T.tolist()).endswith(said[1])
        context = decode(row.tokens_T[~row.loss_mask_T].tolist(), skip_special_tokens=False)
        assert f"Doc 1(Title: otter) {FACT.passage}" in context
        assert w.engines[0].sampled[1].prompt.count("<|im_start|>assistant") == 1
    assert report.episode is not None
    assert [part.source for part in report.episode.parts][:3] == [Author.TASK, Author.POLICY, Author.ENVIRONMENT]
    assert [part.text for part in report.episode.parts if part.source is Author.POLICY] == said
    assert has_structure("answer", report.episode.parts)
    spec = FACT.task().evaluator.answer
    assert spec is not None
    assert score_answer(spec, report.episode).solved


async def test_a_malformed_answer_costs_a_turn_and_is_answered(model_dir: Path, tmp_path: Path) -> None:
    lines = Lines("I do not know", "<search> </search>", f"<answer>{FACT.value}</answer>")
    agent = LoopAgent(SEARCH, SearchEnvironment(SearchConfig()))
    async with world(model_dir, lines) as w, retriever(tmp_path) as services:
        report, record = await play(w, agent, FACT.task(), services=services)
        check_exact(record, w.engines)
        # The end of the turn that the policy sampled stays before the text.
        assert "I do not know<|im_end|>\nAgain.\n" in w.engines[0].sampled[1].prompt
        assert len(record.lineages) == 1
        assert "The query is empty" in w.engines[0].sampled[2].prompt
    assert (report.stop, report.turns, report.commands) == (StopReason.FINISHED, 3, ("search ", f"answer {FACT.value}"))


async def test_without_a_text_for_it_a_malformed_answer_ends_the_rollout(model_dir: Path) -> None:
    environment = Repeating()
    async with world(model_dir, Lines("two\nlines")) as w:
        report, _ = await play(w, LoopAgent(LoopConfig(), environment), ECHO_TASK)
    assert (report.stop, report.turns, environment.closed) == (StopReason.INVALID, 1, [0])


async def test_tool_calls_are_answered_by_tool_messages(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = configure(TelemetryConfig(), process="worker", spans_dir=tmp_path / "spans", install=False)
    monkeypatch.setattr(loop_agent, "tracer", telemetry.tracer("test"))

    def call(number: int) -> str:
        return f'<tool_call>\n{{"name": "repeat", "arguments": {{"n": {number}}}}}\n</tool_call>'

    lines = Lines(call(1), call(2) + "\n" + call(3), "Please stop")
    config = LoopConfig.model_validate({"parser": "calls", "system": "Help {{ instruction }}"})
    async with world(model_dir, lines) as w:
        report, record = await play(w, LoopAgent(config, Repeating()), ECHO_TASK)
        check_exact(record, w.engines)
        prompts = [sampled.prompt for sampled in w.engines[0].sampled]
    assert report.stop is StopReason.FINISHED
    assert report.commands == ("repeat 1", "repeat 2", "respond Please stop")
    telemetry.shutdown()
    spans = SpanFolder.of_run(tmp_path).spans()
    assert [span["attributes"][names.TOOL_NAME] for span in spans] == ["repeat", "repeat", "respond"]
    assert "Help Go." in prompts[0]
    assert '"name": "repeat"' in prompts[0]
    assert "1: repeat {'n': 1}" in prompts[1]
    assert "2: repeat {'n': 2}" in prompts[2]
    assert NOT_RUN in prompts[2]
    assert len(record.lineages) == 1


async def test_warnings_of_an_environment_have_a_kind_of_their_own(model_dir: Path) -> None:
    def call(number: int) -> str:
        return f'<tool_call>\n{{"name": "repeat", "arguments": {{"n": {number}}}}}\n</tool_call>'

    class Warning(RepeatingEpisode):
        async def act(self, action: Action) -> Observation:
            seen = await super().act(action)
            remark = ObservationPart(text=f"WARNINGS: {len(action.remarks)}\n", kind=PartKind.WARNING)
            return replace(seen, parts=(remark, *seen.parts))

    class WarningEnvironment(Repeating):
        async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> Warning:
            return Warning(self)

    config = LoopConfig.model_validate({"parser": "calls", "observation": "{{ observation }}\n{{ turns_left }} left"})
    agent = LoopAgent(config, WarningEnvironment())
    assert marks_warnings(agent)
    renderer = load_renderer(model_dir, token_kinds=True)
    for allowed in (True, False):
        lines = Lines(call(1) + call(2), "Please stop")
        async with world(model_dir, lines, renderer=renderer, token_kinds=True) as w:
            _, record = await play(w, agent, ECHO_TASK, marks_warnings=allowed)
            check_exact(record, w.engines)
        assert record.trajectory is not None
        (row,) = record.trajectory.rows
        assert row.kinds_T is not None
        warned = renderer.decode(row.tokens_T[row.kinds_T == TokenKind.WARNING].tolist())
        seen = renderer.decode(row.tokens_T[row.kinds_T == TokenKind.OBSERVATION].tolist())
        said = "1: repeat {'n': 1}\n15 left"
        # A line end of the template after a body may be in one token with it.
        if allowed:
            assert warned.split() == f"WARNINGS: 1 {NOT_RUN}".split()
            assert seen.strip() == said
        else:
            assert warned == ""
            assert "".join(seen.split()) == "".join(f"WARNINGS: 1 {said}{NOT_RUN}".split())


async def test_an_agent_out_of_time_still_reports_its_episode(model_dir: Path) -> None:
    environment = Repeating()
    script = iter(["one", Fault.HANG])
    async with world(model_dir, lambda _: next(script)) as w:
        report, record = await play(w, LoopAgent(LoopConfig(), environment), ECHO_TASK, agent_s=2.0)
        check_exact(record, w.engines)
    assert (report.stop, environment.closed) == (StopReason.TIME, [1])
    assert report.episode is not None
    assert report.episode.artifacts == {"acts": "1"}


async def test_a_failed_environment_is_raised_and_closed(model_dir: Path) -> None:
    environment = Repeating(fails=True)
    async with world(model_dir) as w:
        with pytest.raises(ServiceDown, match="service repeater: no answer"):
            await play(w, LoopAgent(LoopConfig(), environment), ECHO_TASK)
    assert environment.closed == [0]


async def test_a_timeout_of_the_environment_is_not_the_agent_s(model_dir: Path) -> None:
    class Slow(RepeatingEpisode):
        async def act(self, action: Action) -> Observation:
            raise TimeoutError("the environment's own")

    class SlowEnvironment(Repeating):
        async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> Slow:
            return Slow(self)

    environment = SlowEnvironment()
    async with world(model_dir) as w:
        with pytest.raises(TimeoutError, match="the environment's own"):
            await play(w, LoopAgent(LoopConfig(), environment), ECHO_TASK, agent_s=60.0)
    assert environment.closed == [0]


async def test_turns_and_tokens_of_a_task_end_its_rollouts(model_dir: Path) -> None:
    limits: dict[str, Any] = {"turns": 2}
    task = Task(**{name: getattr(ECHO_TASK, name) for name in ("id", "family", "instruction", "evaluator")})
    object.__setattr__(task, "limits", type(task.limits)(**limits))
    async with world(model_dir) as w:
        report, _ = await play(w, LoopAgent(LoopConfig(), Repeating()), task)
    assert (report.stop, report.turns) == (StopReason.TURNS, 2)


async def test_head_and_tail_contexts_are_what_the_engine_is_sent(model_dir: Path) -> None:
    """Every turn is a row with the context that it was sampled from."""
    config = LoopConfig.model_validate({"max_turns": 12, "context": "head_tail(0.3)"})
    budgets = Budgets(max_context_tokens=360, max_tokens_per_turn=40)
    lines = Lines(*(f"say {number} {'x ' * 6}" for number in range(12)))
    async with world(model_dir, lines) as w:
        report, record = await play(w, LoopAgent(config, Repeating()), ECHO_TASK, budgets=budgets)
        check_exact(record, w.engines)
        sampled = w.engines[0].sampled
    assert (report.stop, report.turns, len(sampled)) == (StopReason.TURNS, 12, 12)
    assert all(len(one.prompt_ids) <= 320 for one in sampled)
    assert "earlier turns are omitted]" in sampled[-1].prompt
    assert "say 0 " in sampled[-1].prompt
    assert "say 10 " in sampled[-1].prompt
    assert record.trained_tokens == record.sampled_tokens


async def test_a_judge_votes_on_the_turns_with_actions(model_dir: Path) -> None:
    """F22: the second answer is malformed, and the last one ends the episode; neither is judged."""
    judge = {"rule": "support.judging_rules:likes_even_turns", "votes": 2}
    config = LoopConfig.model_validate({"max_turns": 5, "malformed": "Again.", "judge": judge})
    lines = Lines("one", "two\nlines", "three", "four", "stop")
    environment = Repeating()
    async with world(model_dir, lines) as w:
        report, record = await play(w, LoopAgent(config, environment), ECHO_TASK)
        decode = w.engines[0].tokenizer.decode
    assert (report.stop, report.turns, environment.closed) == (StopReason.FINISHED, 5, [4])
    assert report.judgement is not None
    assert report.judgement.votes == {1: (-1, -1), 3: (-1, -1), 4: (1, 1)}
    assert judged_texts(report, record, decode) == {1: "one", 3: "three", 4: "four"}
    assert report.episode is not None
    assert json.loads(report.episode.artifacts["judge"])["mean"] == pytest.approx(-1 / 3)
    assert report.episode.artifacts["acts"] == "4"


def judged_texts(report: AgentReport, record: SessionReport, decode: Callable[[list[int]], str]) -> dict[int, str]:
    """The trained text of each step with a score, by turn."""
    assert report.judgement is not None
    assert record.trajectory is not None
    rows = record.trajectory.rows
    scores = plain_scores(report.judgement.of_tokens(1.0, record.lineages), record.trajectory)
    return {
        step.turn: "".join(decode(rows[row].tokens_T[start:end].tolist()) for row, start, end in step.spans)
        for step in scores.steps
    }


async def test_a_score_belongs_to_the_tokens_of_its_turn_in_every_row(model_dir: Path) -> None:
    """F22: with omitted turns, each turn is trained in a row of its own."""
    judge = {"rule": "support.judging_rules:likes_even_turns", "votes": 1}
    config = LoopConfig.model_validate({"max_turns": 12, "context": "head_tail(0.3)", "judge": judge})
    budgets = Budgets(max_context_tokens=360, max_tokens_per_turn=40)
    said = [f"say {number} {'x ' * 6}" for number in range(12)]
    async with world(model_dir, Lines(*said)) as w:
        report, record = await play(w, LoopAgent(config, Repeating()), ECHO_TASK, budgets=budgets)
        decode = w.engines[0].tokenizer.decode
    assert len(record.lineages) > 1
    texts = judged_texts(report, record, decode)
    assert list(texts) == list(range(1, 13))
    assert all(texts[number + 1].startswith(text.rstrip()) for number, text in enumerate(said))


async def test_late_votes_do_not_outlast_the_agents_deadline(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.agents.loop.judge.GRACE_S", 600.0)
    judge = {"rule": "support.judging_rules:hangs_on_the_first", "votes": 1}
    config = LoopConfig.model_validate({"max_turns": 2, "judge": judge})
    async with world(model_dir, Lines("one", "two")) as w:
        report, _ = await play(w, LoopAgent(config, Repeating()), ECHO_TASK, agent_s=1.0)
    assert report.judgement is not None
    assert report.judgement.votes == {1: (None,), 2: (1,)}
