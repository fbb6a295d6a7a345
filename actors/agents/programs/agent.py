"""The interface of agents: what an agent receives, how the worker runs it, and how it reports its end.

Invariants:
- An agent ends with exactly one StopReason. Failures of the gateway, the sandbox or the agent's own installation are
  raised, never turned into a StopReason.
- An agent's output is treated as data: it is bounded, and never executed or resolved as a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.actors.evaluation.graders.rewards import Judgement
from headrace.actors.evaluation.graders.verdict import EpisodeRecord
from headrace.actors.services.chat import Chat
from headrace.actors.services.service import NO_SERVICES, Services
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import HostFolder, Sandbox


class StopReason(StrEnum):
    """Reason why an agent stopped."""

    FINISHED = "finished"
    """The agent finished: a white-box agent with its last command, a program by exiting without an error."""
    TURNS = "turns"
    """All allowed turns were used."""
    CONTEXT = "context"
    """The conversation no longer fits in the context budget."""
    LENGTH = "length"
    """An answer was truncated, or the budget of the session was used up; the truncated command was not run."""
    INVALID = "invalid"
    """An answer was not a valid command line: it was empty, had several lines, or contained a NUL character."""
    TIME = "time"
    """The agent was stopped because its time was up."""
    ERROR = "error"
    """The agent's program failed; see `AgentReport.exit_code` and `result`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Result of a rollout's agent phase. `turns` counts the policy's answers, as far as the agent reports them;
    `commands` lists the commands that a white-box agent ran. The other fields are for agents that are programs: the
    exit code (None while running), `result` (final message or error), and the end of the output."""

    stop: StopReason
    turns: int
    commands: tuple[str, ...] = ()
    exit_code: int | None = None
    result: str = ""
    log_tail: str = ""
    episode: EpisodeRecord | None = None
    """Record of a loop agent's episode."""
    user: str = "root"
    """User that ran the policy's commands."""
    judgement: Judgement | None = None
    """Votes of the recipe's judge on the steps."""


class SimulatedPolicy(Protocol):
    """Interface to simulated engines for one run of the simulated agent."""

    @property
    def key(self) -> str:
        """Name of the attempt, which is the same in every run: task, rollout and attempt number."""

    async def turn(self, tokens: int, seconds: float) -> None:
        """Generate one answer of `tokens` tokens in `seconds` seconds."""

    async def use(self, tool: str, seconds: float) -> None:
        """Let a tool take `seconds` seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """Access to the policy for one run of an agent. `base_url` is the URL of the session
    (`http://host:port/s/<token>`), reachable from this process; `chat` is a client for it. `context_tokens` limits the
    prompt and the answer together; None if the limit is unknown."""

    base_url: str
    chat: Chat
    context_tokens: int | None = None
    simulated: SimulatedPolicy | None = None
    """Replaces `base_url` and `chat` when the engines are simulated."""
    services: Services = NO_SERVICES
    """The recipe's services."""
    agent_s: float | None = None
    """Deadline for agents that keep their own time (`keeps_time`), in seconds; None for no deadline."""
    turn_tokens: int | None = None
    """Maximum number of tokens in one answer."""

    @property
    def prompt_tokens(self) -> int | None:
        """Maximum number of tokens in a prompt that leaves room for the longest answer; None if it is unknown."""
        if self.context_tokens is None:
            return None
        return self.context_tokens - (self.turn_tokens or 0)


class Agent(Protocol):
    """An agent that works on one task; stateless between runs, picklable."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        """Host folders that are mounted in the agent's sandbox, but not in the evaluator's sandboxes."""

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Work on the task. Raises AgentNotStarted, and gateway and sandbox errors, which the caller classifies."""


def agent_name(agent: Agent) -> str:
    """Return the name of an agent's kind, as in `agent.kind`; an agent of another package may have an attribute
    `name`."""
    words = re.findall(r"[A-Z][a-z0-9]*", type(agent).__name__.removesuffix("Agent"))
    return str(getattr(agent, "name", "")) or "_".join(words).lower()


def needs_sandbox(agent: Agent) -> bool:
    """Return whether an agent acts in a sandbox. If its attribute `needs_sandbox` is false, none is leased, and `run`
    gets None."""
    return bool(getattr(agent, "needs_sandbox", True))


def keeps_time(agent: Agent) -> bool:
    """Return whether an agent ends by itself within `AgentSession.agent_s`, so that its report is not lost. Agents say
    so with an attribute `keeps_time`."""
    return bool(getattr(agent, "keeps_time", False))


def marks_warnings(agent: Agent) -> bool:
    """Return whether the parts of an agent's messages that it marks as warnings get token kinds of their own. Agents
    say so with an attribute `marks_warnings`; only those that run in the worker may, since the marks decide what an
    objective on observations leaves out."""
    return bool(getattr(agent, "marks_warnings", False))


class AgentNotStarted(Exception):
    """The agent's program is missing or could not run, which is not the policy's fault."""


class ImmediateAgent:
    """Agent that finishes before its first turn, so that nothing is sampled or trained: it measures the orchestration
    around it."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        return AgentReport(stop=StopReason.FINISHED, turns=0)
