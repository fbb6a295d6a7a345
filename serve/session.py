"""The pure core of a session: which tokens one agent's conversation is made of.

Invariants:
- Within a row, the prompt of turn k+1 is prompt plus output of turn k plus a bridge, token for token. Sampled ids are
  kept raw and are never rendered again.
- A request that does not extend the recorded conversation opens a new row by a full render; the older row stays as it
  is.
- `sampled_tokens == trained_tokens + sum(masked)`.
- No clock and no I/O: `now` is an argument, ids come from a Renderer, completions from whoever asked the engine.

Linear first form: one turn at a time, one row grows. Branches, replay of undelivered answers and durability belong to
the token trie.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

import numpy as np

from headrace.buffer.types import Row, Trajectory, VersionSpan
from headrace.policies.engine import MAX_TOKEN_CHARACTERS, FinishReason
from headrace.serve.conversation import Message, Role, TurnAnswer, TurnEnd
from headrace.serve.errors import ContextExceeded

if TYPE_CHECKING:
    from headrace.policies.engine import Completion
    from headrace.serve.conversation import TurnRequest
    from headrace.serve.render import Renderer

SessionId = NewType("SessionId", str)


class Masked(StrEnum):
    """Why sampled tokens are not trained."""

    ABORTED = "aborted"
    """The turn was cut: agent gone, wall time over, engine failed after partial output. The tokens are in no row."""
    SAMPLING = "sampling"
    """Sampled with temperature 0, top_p or top_k: the engine's log-probabilities are not those of the behaviour
    policy."""


class Exhausted(StrEnum):
    """The budget that ended the agent first."""

    NONE = ""
    """None: the agent ended by itself."""
    TURNS = "turns"
    """budgets.max_turns"""
    CONTEXT = "context"
    """budgets.max_context_tokens"""
    WALL = "wall"
    """budgets.wall_s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The recipe's sampling: law for every turn, whatever the agent sends (DESIGN 7)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probabilities are those of the distribution sampled from."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What one agent may use. `max_context_tokens` counts prompt plus output; `wall_s` counts from the opening of the
    session."""

    max_turns: int = 64
    max_tokens_per_turn: int = 4096
    max_context_tokens: int = 32768
    wall_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """One session to open. `session_id` is the caller's, open at most once; `traceparent` is the agent span of the
    rollout."""

    session_id: SessionId
    sampling: Sampling = field(default_factory=Sampling)
    budgets: Budgets = field(default_factory=Budgets)
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What to ask the engine. `extends` is whether the prompt continues the current row."""

    request: TurnRequest
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    extends: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionReport:
    """What a session leaves. `trajectory` is None when nothing was sampled. `failures` are engine, gateway and network
    failures that reached the agent: when there is one the outcome is infra, whatever is scored. `rerendered` counts
    the rows after the first."""

    session_id: SessionId
    trajectory: Trajectory | None
    turns: int
    sampled_tokens: int
    trained_tokens: int
    masked: dict[str, int]
    rerendered: int
    exhausted: Exhausted
    failures: tuple[str, ...]


@dataclass(slots=True)
class _GrowingRow:
    """`logprobs` is aligned with `ids` (0 for what was not sampled); `sampled` are the output ranges `[start, end)`."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: list[tuple[int, int]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    messages: tuple[Message, ...] = ()

    def extend_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        new = prompt_ids[len(self.ids) :]
        self.ids.extend(new)
        self.logprobs.frombytes(bytes(4 * len(new)))

    def extend_output(self, completion: Completion) -> None:
        start = len(self.ids)
        self.ids.extend(completion.output_ids)
        self.logprobs.extend(completion.logprobs)
        self.sampled.append((start, len(self.ids)))
        self.spans += [
            VersionSpan(start=start + span.start, end=start + span.end, version=span.version)
            for span in completion.spans
        ]

    def freeze(self, *, trained: bool) -> Row:
        mask = np.zeros(len(self.ids), dtype=np.bool_)
        for start, end in self.sampled:
            mask[start:end] = trained
        return Row(
            tokens_T=np.array(self.ids, dtype=np.int32),
            loss_mask_T=mask,
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            versions=tuple(self.spans),
        )


class Session:
    """One agent's conversation. Call `plan`, ask an engine, then exactly one of `record`, `cut` or `fail`."""

    def __init__(self, spec: SessionSpec, opened_at: float) -> None:
        self.spec = spec
        self.turns = 0
        self._opened_at = opened_at
        self._rows: list[_GrowingRow] = []
        self._recorded_tokens = 0
        self._aborted_tokens = 0
        self._exhausted = Exhausted.NONE
        self._failures: list[str] = []

    def wall_left_s(self, now: float) -> float:
        return self._opened_at + self.spec.budgets.wall_s - now

    def spent(self, now: float) -> Exhausted:
        """The budget that forbids a further turn, remembered as the one that ended the agent; NONE when it may go
        on."""
        if self.turns >= self.spec.budgets.max_turns:
            return self.exhaust(Exhausted.TURNS)
        if self.wall_left_s(now) <= 0:
            return self.exhaust(Exhausted.WALL)
        return Exhausted.NONE

    def exhaust(self, budget: Exhausted) -> Exhausted:
        """Remember the first budget that ran out; returns `budget`."""
        self._exhausted = self._exhausted or budget
        return budget

    def plan(self, request: TurnRequest, renderer: Renderer) -> TurnPlan:
        """The prompt of the next turn. Changes nothing but the exhausted budget.

        Raises:
            ContextExceeded: the prompt leaves no room for one token.
        """
        self._refuse_hopeless(request)
        row = self._rows[-1] if self._rows else None
        known = len(row.messages) if row else 0
        extends = row is not None and len(request.messages) > known and request.messages[:known] == row.messages
        if row is not None and extends:
            history = tuple(row.ids)
            prompt = history + renderer.bridge(history[-1], request.messages[known:])
        else:
            prompt = renderer.render(request.messages)
        return TurnPlan(
            request=request, prompt_ids=prompt, max_new_tokens=self._room(len(prompt), request), extends=extends
        )

    def _refuse_hopeless(self, request: TurnRequest) -> None:
        """Megabytes that cannot fit anyway are not rendered: that takes seconds in which no other session is served."""
        most = self.spec.budgets.max_context_tokens
        characters = sum(len(message.content) for message in request.messages)
        if len(request.messages) > most or characters > most * MAX_TOKEN_CHARACTERS:
            self.exhaust(Exhausted.CONTEXT)
            raise ContextExceeded(
                f"This model's maximum context length is {most} tokens. However, your {len(request.messages)} messages "
                f"have {characters} characters. Please reduce the length of the messages.",
                "messages",
            )

    def _room(self, prompt_tokens: int, request: TurnRequest) -> int:
        budgets = self.spec.budgets
        left = budgets.max_context_tokens - prompt_tokens
        if left < 1:
            self.exhaust(Exhausted.CONTEXT)
            raise ContextExceeded(
                f"This model's maximum context length is {budgets.max_context_tokens} tokens. However, your messages "
                f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
                "messages",
            )
        return min(left, budgets.max_tokens_per_turn, request.max_tokens or left)

    def record(self, plan: TurnPlan, completion: Completion) -> TurnAnswer:
        """Append a finished turn to its row; the answer the agent gets."""
        if not plan.extends:
            self._rows.append(_GrowingRow())
        row = self._rows[-1]
        row.extend_prompt(plan.prompt_ids)
        row.extend_output(completion)
        row.messages = (*plan.request.messages, Message(role=Role.ASSISTANT, content=completion.text))
        self.turns += 1
        self._recorded_tokens += len(completion.output_ids)
        return TurnAnswer(
            text=completion.text,
            end=TurnEnd.STOP if completion.finish is FinishReason.STOP else TurnEnd.LENGTH,
            prompt_tokens=len(plan.prompt_ids),
            completion_tokens=len(completion.output_ids),
            cached_tokens=completion.cached_tokens,
        )

    def cut(self, sampled_tokens: int) -> None:
        """A turn ended without an answer after so many tokens: they are counted and trained nowhere."""
        self._aborted_tokens += sampled_tokens

    def fail(self, failure: str) -> None:
        """A failure that reached the agent."""
        self._failures.append(failure)

    def report(self) -> SessionReport:
        trained = self.spec.sampling.exact
        rows = tuple(row.freeze(trained=trained) for row in self._rows)
        masked = {Masked.ABORTED: self._aborted_tokens, Masked.SAMPLING: 0 if trained else self._recorded_tokens}
        return SessionReport(
            session_id=self.spec.session_id,
            trajectory=Trajectory(rows=rows, temperature=self.spec.sampling.temperature) if rows else None,
            turns=self.turns,
            sampled_tokens=self._recorded_tokens + self._aborted_tokens,
            trained_tokens=self._recorded_tokens if trained else 0,
            masked={str(reason): tokens for reason, tokens in masked.items() if tokens},
            rerendered=max(0, len(self._rows) - 1),
            exhausted=self._exhausted,
            failures=tuple(self._failures),
        )
