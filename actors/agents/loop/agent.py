"""The loop agent: asks the policy, reads an action from its answer, acts in an environment, and shows the observation.

Invariants:
- The policy's text is sent back unchanged, so that the gateway finds the tokens that it sampled.
- An answer without an action costs a turn. It is answered with the recipe's text, or ends the rollout as invalid.
- The agent keeps its own deadline, so that the record of an episode that ran out of time can still be evaluated.
- The environment's episode is closed once, also after an error.
- The judge's votes are asked for while the agent works, and waited for only at its end.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

from opentelemetry import trace

from headrace.actors.agents.loop.action_parsers import PARSERS, Malformed
from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.loop.contexts import HeadAndTail, head_share
from headrace.actors.agents.loop.judge import ARTIFACT, Judge, Step, judged_problem
from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.actors.environments.environment import (
    RUN,
    Environment,
    Episode,
    EpisodeEnd,
    Observation,
    ObservationPart,
    PartKind,
)
from headrace.actors.evaluation.graders.verdict import Author, EpisodeRecord, SpokenPart
from headrace.actors.record.files.parts import in_span
from headrace.actors.services.chat import ChatContextExceeded, ChatMessage, ChatOptions, ChatReply
from headrace.actors.services.templates import MarkedText, filled, filled_around
from headrace.buffer.tasks.parts import least
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.breakdown import TOOL
from headrace.buffer.trajectories.timeline import head_of
from headrace.sandboxes.base import HostFolder, Sandbox
from headrace.serve.tracing import span_names

tracer = trace.get_tracer("headrace.actors.agents.loop.agent")

MAX_COMMAND_CHARACTERS = 1000
"""Maximum length of an action in the agent's report."""
MAX_LATE_S = 2.0
"""Time after the agent's deadline at which the last votes are given up; less than a rollout allows for the end of an
agent that keeps its own time."""


class LoopAgent:
    """Agent that acts in an environment. Stateless between runs."""

    keeps_time = True
    marks_warnings = True

    def __init__(self, config: LoopConfig, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._parser = PARSERS[config.parser]

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    @property
    def needs_sandbox(self) -> bool:
        return self._environment.needs_sandbox

    async def run(self, *, session: AgentSession, sandbox: Sandbox | None, task: Task) -> AgentReport:
        """Work on a task until the episode ends or a limit is reached.

        Raises:
            ChatFailed: the gateway failed or refused the request.
            SandboxError, ServiceDown: the environment failed.
        """
        clock = asyncio.get_running_loop().time
        episode = await self._environment.open(task, sandbox, session.services, clock)
        opened_s = clock()
        talk = _Conversation(opening=self._opening(task, episode))
        if self._config.judge.is_set:
            talk.judge = Judge(
                config=self._config.judge,
                services=session.services,
                task=task.id,
                problem=judged_problem(talk.opening),
            )
        stop = StopReason.TIME
        try:
            try:
                try:
                    async with asyncio.timeout(session.agent_s) as deadline:
                        stop = await self._converse(session, episode, talk, task)
                except TimeoutError:
                    # Another timeout than this one is a failure of the environment, which uses up no budget.
                    if not deadline.expired():
                        raise
            except BaseException:
                with suppress(Exception):
                    await episode.close()
                raise
            end = await episode.close()
        except BaseException:
            if talk.judge is not None:
                talk.judge.drop()
            raise
        judgement = None
        if talk.judge is not None:
            left_s = math.inf if session.agent_s is None else opened_s + session.agent_s + MAX_LATE_S - clock()
            judgement = await talk.judge.finish(left_s)
            end = replace(end, artifacts={**end.artifacts, ARTIFACT: judgement.artifact()})
        return AgentReport(
            stop=stop,
            turns=talk.answers,
            commands=tuple(talk.actions),
            episode=talk.record(end),
            user=getattr(episode, "user", "root"),
            judgement=judgement,
        )

    def _opening(self, task: Task, episode: Episode) -> list[ChatMessage]:
        given = task.environment.given if task.environment else {}
        opening = [ChatMessage(role=message.role, content=message.content) for message in task.messages]
        opening += episode.messages
        if not opening:
            first = filled(self._config.first, instruction=task.instruction, given=given)
            opening.append(ChatMessage(role="user", content=first))
        if self._config.system:
            system = filled(self._config.system, instruction=task.instruction, given=given)
            opening.insert(0, ChatMessage(role="system", content=system))
        return opening

    async def _converse(self, session: AgentSession, episode: Episode, talk: _Conversation, task: Task) -> StopReason:
        config = self._config
        max_turns = int(least(config.max_turns, task.limits.turns) or config.max_turns)
        share = head_share(config.context)
        context = None
        if share is not None and session.prompt_tokens is not None:
            context = HeadAndTail(budget_tokens=session.prompt_tokens, head_share=share, count=session.chat.count)
        tools = episode.tools if self._parser.uses_calls else ()
        for turn in range(1, max_turns + 1):
            messages = talk.messages if context is None else await context.shown(talk.opening, talk.turns)
            options = ChatOptions(
                tools=tools,
                stop=config.stop_strings,
                continues=config.inline and turn > 1,
                raw=self._parser.is_raw,
            )
            try:
                reply = await session.chat(messages, options)
            except ChatContextExceeded:
                return StopReason.CONTEXT
            talk.heard(reply, inline=config.inline)
            if reply.finish_reason == "length" and config.truncated == "end":
                return StopReason.LENGTH
            observation = await self._observation(reply, episode, talk)
            if observation is None:
                return StopReason.INVALID
            seen = MarkedText(text=observation.text, warnings=observation.warnings)
            if observation.ends:
                talk.observe(seen, inline=config.inline)
                return StopReason.FINISHED
            shown = filled_around(config.observation, "observation", seen, turns_left=max_turns - turn)
            talk.observe(shown, inline=config.inline)
        return StopReason.TURNS

    async def _observation(self, reply: ChatReply, episode: Episode, talk: _Conversation) -> Observation | None:
        """Act on an answer. Returns None if it is malformed and the recipe has no text for that."""
        action = self._parser.parse(reply)
        if isinstance(action, Malformed):
            if not self._config.malformed:
                return None
            return Observation(parts=(ObservationPart(text=self._config.malformed, kind=PartKind.WARNING),))
        name = f"{span_names.TOOL} {action.name}"
        attributes = {span_names.OPERATION: span_names.TOOL, span_names.TOOL_NAME: action.name}
        given = " ".join(map(str, action.arguments.values()))[:MAX_COMMAND_CHARACTERS]
        part, turn, head = f"{TOOL}{action.name}", talk.answers, head_of(given)
        with in_span(tracer, name, part, turn=turn, detail=head, attributes=attributes):
            observation = await episode.act(action)
        command = given if action.name == RUN else f"{action.name} {given}"[:MAX_COMMAND_CHARACTERS]
        talk.actions.append(command)
        if talk.judge is not None:
            step = Step(turn=talk.answers, id=reply.turn_id, answer=reply.text, observation=observation.text)
            talk.judge.see(step, judged=not observation.ends)
        return observation


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """Messages of one run, by turn, and what has been said in it."""

    opening: list[ChatMessage]
    turns: list[list[ChatMessage]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    parts: list[SpokenPart] = field(default_factory=list)
    answers: int = 0
    judge: Judge | None = None

    @property
    def messages(self) -> list[ChatMessage]:
        """All messages, in order."""
        return [*self.opening, *(message for turn in self.turns for message in turn)]

    def heard(self, reply: ChatReply, *, inline: bool) -> None:
        """Add the policy's answer."""
        self.answers += 1
        self.parts.append(SpokenPart(source=Author.POLICY, text=reply.text, calls=reply.calls))
        if inline and self.turns:
            # One message grows through the whole conversation.
            before = self.turns[-1][-1]
            self.turns[-1][-1] = replace(before, content=before.content + reply.text)
        else:
            self.turns.append([ChatMessage(role="assistant", content=reply.text, calls=reply.calls)])

    def observe(self, seen: MarkedText, *, inline: bool) -> None:
        """Add an observation; `seen` is what the policy reads of it."""
        text, warnings = seen.text, seen.warnings
        self.parts.append(SpokenPart(source=Author.ENVIRONMENT, text=text))
        turn = self.turns[-1]
        if inline:
            before = turn[-1]
            shifted = ((len(before.content) + start, len(before.content) + end) for start, end in warnings)
            turn[-1] = replace(before, content=before.content + text, warnings=(*before.warnings, *shifted))
        elif calls := turn[0].calls:
            turn.append(ChatMessage(role="tool", content=text, call_id=calls[0].id, warnings=warnings))
            not_run = ((0, len(NOT_RUN)),)
            turn.extend(
                ChatMessage(role="tool", content=NOT_RUN, call_id=call.id, warnings=not_run) for call in calls[1:]
            )
        else:
            turn.append(ChatMessage(role="user", content=text, warnings=warnings))

    def record(self, end: EpisodeEnd) -> EpisodeRecord:
        """Return the record for evaluators."""
        opening = [SpokenPart(source=Author.TASK, text=message.content) for message in self.opening]
        return EpisodeRecord(parts=(*opening, *self.parts), artifacts=end.artifacts, verdict=end.verdict)


NOT_RUN = "Not run: only the first call of an answer is."
