"""Simulated users, with whom a policy talks.

Invariants:
- A simulator is one user of one episode: `reset` returns the first line, and `step` answers the agent's text. It never
  sees tool calls or their results. `###STOP###` anywhere in a line ends the conversation.
- A helper model that does not answer, or that answers with nothing usable, raises ServiceDown: no reward follows.
- Nothing blocks the event loop: the only waiting is for the helper model, and for an injected latency.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, Self

from pydantic import Field, model_validator

from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.rule_user import STOP, RuleUser
from headrace.actors.services.service import HelperModel, ServiceDown, Services
from headrace.buffer.primitives.sections import Section

GREETING: Final = "Hi! How can I help you today?"
"""The agent's words before the user's first line, for helper models."""

RULES: Final = f"""You play a customer who talks to a customer service agent. This is what you want:

{{instruction}}

Rules:
- Write one line at a time, as the customer; never write the agent's lines.
- Do not reveal everything at once. Say only what the current step needs.
- Do not invent anything that is not written above. If you are asked for such a thing, say that you do not remember it \
or do not have it.
- Once everything that you want has been done, answer with {STOP} alone and nothing else.
- Do not repeat the text above word for word. Use your own words, and keep to the personality that it describes.
"""
THINKING: Final = """
Think first, then speak. Always answer in exactly this form:
Thought: <what has been done, and what to say next>
User Response: <the line that the agent reads>
"""
_SPOKEN: Final = "User Response:"
CHECK: Final = """You check the last line of a simulated customer in a conversation with an agent.

The customer was told:
{instruction}

The conversation so far:
{conversation}

The proposed line:
{line}

The line is wrong if it contradicts what the customer was told, invents something, ends the conversation with {stop} \
although something is still open, or goes on although everything has been done. Answer with "true" if the line is \
right and with "false" if it is wrong, and then give the reason in one sentence.
"""
REVISE: Final = """Your line was not right: {reason}
Write the line again, without that mistake. Write the line alone."""


class UserSimulator(Protocol):
    """A simulated user of one episode."""

    async def reset(self, instruction: str) -> str:
        """Return the first line. Raises ServiceDown."""

    async def step(self, text: str) -> str:
        """Return the answer to the agent's text. Raises ServiceDown."""


class SimulatorKind(StrEnum):
    """Kind of simulated user."""

    RULE = "rule"
    """Follows fixed rules and needs no model."""
    LLM = "llm"
    """A helper model."""
    REACT = "react"
    """A helper model that thinks before each line."""
    VERIFY = "verify"
    """A helper model whose lines are checked by a second request; a wrong line is written anew."""
    REFLECTION = "reflection"
    """Like verify, but a wrong line is revised with the reason."""


TRIES: Final = 3
"""Maximum number of proposals for one line."""


class SimulatorConfig(Section):
    """Settings of the simulated user."""

    simulator: SimulatorKind = SimulatorKind.RULE
    """Simulated user: `rule` (no model), `llm`, `react` (thinks before each line), `verify` (lines are checked and
    written anew) or `reflection` (lines are checked and revised)."""
    service: str = ""
    """Name of the service (`[services.NAME]`) with the helper model; not used by `rule`."""
    user_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of one answer of the helper model."""
    user_temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the helper model."""
    seed: int | None = None
    """Random seed for the user's lines: all attempts at a task then meet the same user. Without one, `rule` uses 0 and
    a helper model samples freely."""

    @model_validator(mode="after")
    def _check_service(self) -> Self:
        if (self.simulator is SimulatorKind.RULE) == bool(self.service):
            raise ValueError(
                f"service: {'is not used by' if self.service else 'is needed by'} simulator = "
                f"{str(self.simulator)!r}; {'remove it' if self.service else 'name a service with a model'}"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldAction:
    """One action of the reference solution."""

    name: str
    arguments: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a simulated user wants. All fields are secret: only the simulator and the final check know them."""

    instruction: str = field(repr=False)
    user_id: str = field(default="", repr=False)
    actions: tuple[GoldAction, ...] = field(default=(), repr=False)
    outputs: tuple[str, ...] = field(default=(), repr=False)
    """Strings that the agent must tell the user."""

    @classmethod
    def parse(cls, secret: Mapping[str, Any]) -> Self:
        """Parse the secret of a task's environment. Raises ValueError, without the contents."""
        match secret:
            case {"instruction": str() as instruction, "actions": [*actions], **rest}:
                pass
            case _:
                raise ValueError("must have an instruction (a text) and actions (a list)")
        user_id, outputs = rest.get("user_id", ""), rest.get("outputs", ())
        if not isinstance(user_id, str):
            raise ValueError("user_id: must be a text")
        if not isinstance(outputs, list | tuple) or not all(isinstance(output, str) for output in outputs):
            raise ValueError("outputs: must be a list of texts")
        gold = []
        for number, action in enumerate(actions):
            match action:
                case {"name": str() as name, "kwargs": dict() as arguments}:
                    gold.append(GoldAction(name=name, arguments=arguments))
                case _:
                    raise ValueError(f"actions.{number}: must have a name and kwargs")
        return cls(instruction=instruction, user_id=user_id, actions=tuple(gold), outputs=tuple(outputs))


class ModelUser:
    """User whose lines a helper model writes."""

    rules = RULES

    def __init__(self, model: HelperModel, config: SimulatorConfig, *, seed: int | None = None) -> None:
        """With a seed, the n-th request of the episode is made with `seed + n`."""
        self._model = model
        self._config = config
        self._seeds: Iterator[int | None] = itertools.repeat(None) if seed is None else itertools.count(seed)
        self._instruction = ""
        self._messages: list[ChatMessage] = []

    async def reset(self, instruction: str) -> str:
        """Return the first line. Raises ServiceDown."""
        self._instruction = instruction
        rules = self.rules.replace("{instruction}", instruction)
        self._messages = [ChatMessage(role="system", content=rules)]
        return await self.step(GREETING)

    async def step(self, text: str) -> str:
        """Return the answer to the agent's text. Raises ServiceDown."""
        self._messages.append(ChatMessage(role="user", content=text))
        line = await self.line()
        self._messages.append(ChatMessage(role="assistant", content=line))
        return line

    async def line(self) -> str:
        """Return the next line. Raises ServiceDown."""
        return await self.propose(self._messages)

    async def propose(self, messages: Sequence[ChatMessage]) -> str:
        """Return one line for a conversation. Raises ServiceDown after too many empty answers."""
        for _ in range(TRIES):
            if line := self.spoken(await self.complete(messages)):
                return line
        raise ServiceDown(self._config.service, f"the simulated user wrote no line in {TRIES} answers")

    async def complete(self, messages: Sequence[ChatMessage]) -> str:
        """Return the helper model's answer without its reasoning. Raises ServiceDown."""
        answer = await self._model.complete(
            messages,
            max_tokens=self._config.user_tokens,
            temperature=self._config.user_temperature,
            seed=next(self._seeds),
        )
        return answer.rpartition("</think>")[2].strip()

    def spoken(self, answer: str) -> str:
        """Return the one line that the agent reads; empty if there is none."""
        return " ".join(answer.split())

    def conversation(self) -> str:
        """Return the conversation as text, one line per message."""
        names = {"user": "Agent", "assistant": "Customer"}
        return "\n".join(
            f"{names[message.role]}: {message.content}" for message in self._messages if message.role in names
        )


class ThinkingUser(ModelUser):
    """User whose helper model thinks before each line; the agent does not see the thoughts."""

    rules = RULES + THINKING

    def spoken(self, answer: str) -> str:
        """Return the line after the marker; empty if the model forgot the marker."""
        return " ".join(answer.rpartition(_SPOKEN)[2].split()) if _SPOKEN in answer else ""


class CheckedUser(ModelUser):
    """User whose lines the helper model checks. The last proposal is used if none passes."""

    revises = False

    async def line(self) -> str:
        """Return the first line that passes the check. Raises ServiceDown."""
        line, messages = await self.propose(self._messages), self._messages
        for _ in range(TRIES - 1):
            check = CHECK.format(instruction=self._instruction, conversation=self.conversation(), line=line, stop=STOP)
            answer = await self.complete([ChatMessage(role="user", content=check)])
            if not answer.lower().lstrip("\"'*. ").startswith("false"):
                return line
            if self.revises:
                revise = REVISE.format(reason=answer)
                messages = [
                    *self._messages,
                    ChatMessage(role="assistant", content=line),
                    ChatMessage(role="user", content=revise),
                ]
            line = await self.propose(messages)
        return line


class RevisingUser(CheckedUser):
    """User whose lines the helper model checks, and revises with the reason."""

    revises = True


_MODEL_USERS: Final[Mapping[SimulatorKind, type[ModelUser]]] = {
    SimulatorKind.LLM: ModelUser,
    SimulatorKind.REACT: ThinkingUser,
    SimulatorKind.VERIFY: CheckedUser,
    SimulatorKind.REFLECTION: RevisingUser,
}


def make_user(config: SimulatorConfig, goal: Goal, services: Services, *, name: str) -> UserSimulator:
    """Create the user of an episode. `name` is added to the seed, so that tasks have different users. Raises
    ConfigError if the service does not exist."""
    seed = f"{config.seed or 0}:{name}"
    user: UserSimulator
    if config.simulator is SimulatorKind.RULE:
        orders = frozenset(
            order for action in goal.actions if isinstance(order := action.arguments.get("order_id"), str)
        )
        user = RuleUser(user_id=goal.user_id, orders=orders, outputs=goal.outputs, seed=seed)
    else:
        start = None if config.seed is None else random.Random(seed).getrandbits(31)
        user = _MODEL_USERS[config.simulator](services.model(config.service), config, seed=start)
    return user
