"""Concurrent turns of one session that are cut, repeated or rewritten, with a restart in between: an engine is always
sent the path in the trie, and each token is trained once or masked for a reason."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from headrace.policies.engine import FinishReason
from headrace.serve.gateway.capture.events import Delivered, Status
from headrace.serve.gateway.capture.rows import IN_ROWS, Masked, report_of, verdicts_of
from headrace.serve.gateway.capture.session import Budgets, Session, SessionId, SessionSpec, TurnPlan
from headrace.serve.gateway.conversation import (
    Message,
    Reasoning,
    RequestPurpose,
    Role,
    Text,
    ToolCall,
    ToolSpec,
    TurnAnswer,
    TurnRequest,
    say,
)
from headrace.serve.gateway.exports.atif import AtifWriter
from headrace.serve.gateway.exports.prompt_messages import MessageShape
from headrace.serve.gateway.exports.rollout_details import rollout_details
from headrace.serve.gateway.http import codec
from support.session_rig import ByteChat, Rig, asks, call, results, user

ROOM = Budgets(max_turns=1000, max_tokens_per_turn=10_000, max_context_tokens=1_000_000, wall_s=1e9)
TOOLS = (ToolSpec("bash"), ToolSpec("edit"))
OUTPUTS = st.sampled_from(
    [
        "ls",
        "ls\n",
        "",
        "THINK hm\n",
        "THINK hm\nDone.",
        call("bash", command="ls"),
        "I look.\n" + call("bash", command="ls") + call("bash", command="ls"),
        call("edit", path="a", count=1.0) + "after",
    ]
)
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])


@dataclass(frozen=True)
class Running:
    request: TurnRequest
    plan: TurnPlan


@dataclass
class Spelled:
    """A history as the agent has it."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = TOOLS
    agent: str = ""


@dataclass
class Ledger:
    """What the engine saw, by turn."""

    whole: dict[str, list[int]] = field(default_factory=dict)
    sampled: int = 0


def rewritten(draw: Any, answer: TurnAnswer) -> Message:
    """An echo with other ids, other words, without calls or reasoning, or as it was."""
    kind = draw(st.sampled_from(["same", "same", "same", "no ids", "no calls", "short", "blank", "no reasoning"]))
    blocks: list[Any] = []
    for block in answer.blocks:
        if isinstance(block, ToolCall):
            call_id = "own" if kind == "no ids" else block.id
            blocks += [] if kind == "no calls" else [ToolCall(call_id, block.name, block.arguments)]
        elif isinstance(block, Text):
            text = {"short": block.text[:1], "blank": f" {block.text} "}.get(kind, block.text)
            blocks.append(Text(text))
        elif kind != "no reasoning":
            blocks.append(Reasoning(block.text, "" if kind == "no ids" else block.signature))
    return Message(Role.ASSISTANT, tuple(blocks))


class Interleaved(RuleBasedStateMachine):
    """Plans are made and completed in any order, as turns of parallel requests are."""

    histories = Bundle("histories")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.played = self.rig(Session(SessionSpec(session_id=SessionId("r-1"), budgets=ROOM), 0.0))

    bridges = True

    def rig(self, core: Session) -> Rig:
        return Rig(core, ByteChat(bridges=self.bridges))

    @initialize(target=histories)
    def begins_once(self) -> Spelled:
        return Spelled((say(Role.SYSTEM, "s"), user("go")))

    @rule(target=histories, task=st.sampled_from(["go", "go ", "stop"]), agent=st.sampled_from(["", "", "child"]))
    def begins(self, task: str, agent: str) -> Spelled:
        return Spelled((say(Role.SYSTEM, "s"), user(task)), agent=agent)

    @rule(target=histories, history=histories, index=st.integers(0, 9), text=st.sampled_from(["", " ", "edited"]))
    def edits(self, history: Spelled, index: int, text: str) -> Spelled:
        """A message changed, one way or another."""
        messages = list(history.messages)
        index %= len(messages)
        messages[index] = say(Role.USER, text)
        return Spelled(tuple(messages), history.tools, history.agent)

    @rule(target=histories, history=histories, start=st.integers(2, 9))
    def compacts(self, history: Spelled, start: int) -> Spelled:
        return Spelled((user("Before: much."), *history.messages[start:], user("on")), history.tools, history.agent)

    @rule(target=histories, history=histories)
    def drops_its_tools(self, history: Spelled) -> Spelled:
        return Spelled(history.messages, (), history.agent)

    @rule(
        target=running,
        history=histories,
        max_tokens=st.sampled_from([None, 5]),
        untrained=st.sampled_from([False, False, False, True]),
        purpose=st.sampled_from([RequestPurpose.TURN, RequestPurpose.TURN, RequestPurpose.COMPACTION]),
    )
    def asks_for_a_turn(
        self, history: Spelled, max_tokens: int | None, untrained: bool, purpose: RequestPurpose
    ) -> tuple[Spelled, Running]:
        fields: dict[str, Any] = {"max_tokens": max_tokens, "agent": history.agent, "purpose": purpose}
        request = asks(*history.messages, tools=history.tools, **fields)
        return history, Running(request, self.played.plan(request, untrained=untrained))

    @rule(target=histories, asked=running, output=OUTPUTS, data=st.data())
    def is_answered(self, asked: tuple[Spelled, Running], output: str, data: st.DataObject) -> Any:
        return self.served(*asked, output, data) or multiple()

    @rule(target=histories, history=histories, output=OUTPUTS, data=st.data(), turns=st.integers(1, 4))
    def goes_on(self, history: Spelled, output: str, data: st.DataObject, turns: int) -> Any:
        """A few turns, one after the other."""
        found = []
        for _ in range(turns):
            request = asks(*history.messages, tools=history.tools, agent=history.agent)
            history = self.served(history, Running(request, self.played.plan(request)), output, data) or history
            found.append(history)
        return multiple(*found)

    @rule(target=histories, history=histories, output=OUTPUTS, data=st.data(), blanks=st.sampled_from(["", " "]))
    def asks_twice_at_once(self, history: Spelled, output: str, data: st.DataObject, blanks: str) -> Any:
        """The same in two spellings, with other options."""
        last = history.messages[-1]
        spelled = (*history.messages[:-1], user(last.text + blanks) if last.role is Role.USER else last)
        requests = [
            asks(*messages, tools=history.tools, agent=history.agent, max_tokens=most)
            for messages, most in ((history.messages, None), (spelled, 5))
        ]
        running = [Running(request, self.played.plan(request)) for request in requests]
        found = [self.served(history, turn, output, data) for turn in running]
        return multiple(*filter(None, found))

    def served(self, history: Spelled, turn: Running, output: str, data: st.DataObject) -> Spelled | None:
        """The history with the answer; None when it was lost on its way."""
        played = self.played
        ids = [] if not output and data.draw(st.booleans()) else output
        completion = played.completion(ids, data.draw(FINISHES))
        played.outputs.append(list(completion.output_ids))
        turn_id = played.core.next_turn_id()
        event = played.core.recorded(turn_id, turn.plan, completion, played.renderer, played.parser)
        self.keep(turn_id, turn.plan, list(completion.output_ids))
        played.record(event)
        if not data.draw(st.integers(0, 5)):
            return None
        played.record(Delivered(turn_id=turn_id))
        messages = (*turn.request.messages, rewritten(data.draw, event.answer))
        calls = [block.id for block in event.answer.blocks if isinstance(block, ToolCall)]
        given = [(call_id, "out") for call_id in calls if data.draw(st.booleans())]
        following = (results(*given),) if given else (user(data.draw(st.sampled_from(["on", "and"]))),)
        return Spelled((*messages, *following), history.tools, history.agent)

    @rule(asked=running, tokens=st.integers(1, 4))
    def is_cut(self, asked: tuple[Spelled, Running], tokens: int) -> None:
        turn_id, ids = self.played.core.next_turn_id(), [65] * tokens
        self.keep(turn_id, asked[1].plan, ids)
        completion = self.played.completion(ids, FinishReason.ABORT)
        self.played.record(self.played.core.aborted(turn_id, asked[1].plan, completion, self.played.renderer))

    def keep(self, turn_id: str, plan: TurnPlan, output: list[int]) -> None:
        self.ledger.whole[turn_id] = list(plan.prompt_ids) + output
        self.ledger.sampled += len(output)

    @rule()
    def comes_back_after_a_kill(self) -> None:
        """What runs is lost with a gateway; here it goes on in the next one, which only makes it harder."""
        again = Session(self.played.core.spec, 0.0)
        for event in self.played.events:
            again.apply(event)
        assert codec.write_report(report_of(again)) == codec.write_report(report_of(self.played.core))
        self.played.core = again

    @invariant()
    def the_sums_are_right_and_rows_are_what_engines_saw(self) -> None:
        core = self.played.core
        report = report_of(core)
        assert report.sampled_tokens == self.ledger.sampled == report.trained_tokens + sum(report.masked.values())
        for node in core.trie.sampled:
            assert list(core.trie.path_ids(node)) == self.ledger.whole[node.turn_id]
        whole = [np.array(ids, dtype=np.int32) for ids in self.ledger.whole.values()]
        for row in report.trajectory.rows if report.trajectory else ():
            assert any(np.array_equal(row.tokens_T, ids) for ids in whole)

    @invariant()
    def what_the_agent_has_is_trained(self) -> None:
        """Of what came back nothing is masked but by its kind."""
        for node, reason in verdicts_of(self.played.core).items():
            if node.status is Status.ACCEPTED:
                assert reason in (None, Masked.SIDE)

    @invariant()
    def each_turn_is_exported_once(self) -> None:
        core, report = self.played.core, report_of(self.played.core)
        details = json.loads(b"".join(rollout_details(core)))
        assert len(details) == len(report.lineages)
        turns = [turn_id for detail in details for turn_id in detail["extra"]["turn_id"]]
        assert sorted(turns) == sorted(node.turn_id for node, reason in verdicts_of(core).items() if reason in IN_ROWS)
        assert sum(sum(mask) for one in details for mask in one["extra"]["loss_mask"]) == report.trained_tokens
        for detail in details:
            before: list[int] = []
            ids = zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True)
            for turn_id, (prompt, completion) in zip(detail["extra"]["turn_id"], ids, strict=True):
                assert prompt[: len(before)] == before
                before = prompt + completion
                assert before == self.ledger.whole[turn_id]
        shape = MessageShape.of(self.played.renderer)
        whole = json.loads(b"".join(AtifWriter(self.played.renderer.decode, shape).pieces(core, report)))
        steps = [step for one in [whole, *whole.get("subagent_trajectories", ())] for step in one["steps"]]
        own = [step for step in steps if "metrics" in step]
        assert sorted(step["extra"]["turn_id"] for step in own) == sorted(self.ledger.whole)
        for step in own:
            ids = step["metrics"]["prompt_token_ids"] + step["metrics"]["completion_token_ids"]
            assert ids == self.ledger.whole[step["extra"]["turn_id"]]
        trained = [len(step["metrics"]["logprobs"]) for step in own if step["extra"]["masked"] is None]
        assert sum(trained) == report.trained_tokens


class InterleavedRows(Interleaved):
    """The same where the template cannot be continued."""

    bridges = False


TestInterleaved = pytest.mark.whole(Interleaved.TestCase)
TestInterleaved.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestInterleavedRows = pytest.mark.whole(InterleavedRows.TestCase)
TestInterleavedRows.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
