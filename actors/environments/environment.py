"""The interface of environments: what a loop agent's actions act on, and what it observes.

Invariants:
- An environment is stateless between episodes and picklable; all state of a rollout is in its episode.
- The policy's mistakes (an unknown tool, wrong arguments, a command that fails) are observations. Failures that the
  policy did not cause (a dead sandbox, a service that is down) are raised and end the rollout as infra.
- An episode is closed once, also when its rollout fails or is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

from headrace.actors.evaluation.graders.verdict import Verdict
from headrace.actors.services.chat import ChatMessage, ChatTool
from headrace.actors.services.service import Services
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox

Clock: TypeAlias = Callable[[], float]
"""Monotonic time in seconds."""

RUN: Final = "run"
"""Action that runs `command`."""
BASH: Final = "bash"
"""Action that runs `command` with the deadline `timeout`, in seconds."""
DONE: Final = "done"
"""Action that ends the episode."""
SEARCH: Final = "search"
"""Action that searches for `query`."""
ANSWER: Final = "answer"
"""Action that answers with `text`, which ends the episode."""
RESPOND: Final = "respond"
"""Action that sends `content` to the customer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of the policy: the name of a tool, and its arguments. `remarks` are about the form of the answer from
    which it was read, in words for the policy."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class PartKind(StrEnum):
    """Kind of a part of an observation."""

    OBSERVATION = "observation"
    """Output of the environment."""
    WARNING = "warning"
    """A remark about the policy's answer, for example about its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationPart:
    """A piece of an observation's text."""

    text: str
    kind: PartKind = PartKind.OBSERVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Text that the policy reads next. `ends` is set if the action ended the episode."""

    parts: tuple[ObservationPart, ...] = ()
    ends: bool = False

    @property
    def text(self) -> str:
        """The texts of all parts, joined."""
        return "".join(part.text for part in self.parts)

    @property
    def warnings(self) -> tuple[tuple[int, int], ...]:
        """The characters `[start, end)` of each warning in `text`, in ascending order."""
        ends = list(accumulate(len(part.text) for part in self.parts))
        spans = zip([0, *ends], ends, self.parts, strict=False)
        return tuple((start, end) for start, end, part in spans if part.kind is PartKind.WARNING and start < end)


def observed(text: str, *, ends: bool = False) -> Observation:
    """Return an observation that consists of one part."""
    return Observation(parts=(ObservationPart(text=text),), ends=ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """What an episode leaves: named texts for evaluators, and the environment's own verdict if it has one. Both may
    contain text of the policy."""

    artifacts: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict | None = None


class Episode(Protocol):
    """One rollout in an environment."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Messages that open the conversation. If there are none, the agent writes the task's own messages."""

    @property
    def tools(self) -> tuple[ChatTool, ...]:
        """Tools that the policy is offered, for agents that use tool calls."""

    async def act(self, action: Action) -> Observation:
        """Perform an action. Raises SandboxError, ServiceDown."""

    async def close(self) -> EpisodeEnd:
        """End the episode. Raises SandboxError, ServiceDown."""


class Environment(Protocol):
    """Environment of a recipe's rollouts. If it has a method `check(task)`, a run calls that with each of its tasks
    before it starts; it raises ConfigError for a task that cannot be used."""

    @property
    def needs_sandbox(self) -> bool:
        """Whether an episode acts in a sandbox. If not, none is leased, and `sandbox` is None."""

    @property
    def actions(self) -> frozenset[str] | None:
        """Names of the actions that every episode accepts, or None if they are not known before an episode opens."""

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services that episodes use."""

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> Episode:
        """Open an episode. Raises SandboxError, ServiceDown."""
