"""Scheduler that assigns generations to cache rows, ends them, and pauses them. Pure: no clock, no I/O, no torch.

Invariants:
- A generation is in exactly one state: waiting, running (its index is its cache row), or finished; it finishes once.
- Nothing is admitted while `paused` or `holding` (a weight update session is open), and nothing is sampled while
  `paused`.
- A pause in place leaves generations in their rows: their cache is kept, and the next token is sampled from it.
- Every output token carries the version that sampled it.
- `moves` lists the row copies that the cache needs, in order, before the next forward pass.
- As in SGLang, an abort of a request that arrived during a pause is lost: callers repeat it after the pause. An abort
  of a request that was paused in place takes effect when the pause ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.policies.cpu_engine.grammars import GrammarState
from headrace.policies.cpu_engine.requests import Prompt
from headrace.policies.engine import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The sequence ended at a stop id or a stop string."""

    matched: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReached:
    """The sequence reached max_new_tokens."""

    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The sequence was aborted. `queued` is True if it had no cache row at that time; SGLang's reply lacks some keys in
    that case."""

    queued: bool


Finish = Stopped | LengthReached | Aborted


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """Sequence that is being generated."""

    prompt: Prompt
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Label of the weights that sampled each output token."""
    retractions: int = 0
    arrived_paused: bool = False
    abort_asked: bool = False
    """True if the sequence was aborted during a pause in place; it finishes when the pause ends."""
    grammar: GrammarState | None = None
    """Position in the grammar of the request, if it has one."""
    refusal: str = ""
    """Why the grammar could not be followed to its end; such a sequence was dropped."""
    finish: Finish | None = None
    arrived_s: float | None = None
    """Time of arrival, on a monotonic clock in seconds; like the next two, None until it is known."""
    forward_s: float | None = None
    """Time at which the first prefill began."""
    first_token_s: float | None = None
    """Time at which the first token was sampled."""

    @property
    def token_count(self) -> int:
        return len(self.prompt.input_ids) + len(self.output_ids)

    def tokens(self) -> list[int]:
        return [*self.prompt.input_ids, *self.output_ids]

    def append(self, token: int, logprob: float, version: str) -> None:
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMove:
    """Copy of the first `length` tokens of cache row `source` to row `target`."""

    source: int
    target: int
    length: int


class Scheduler:
    """Core of the engine. `tail_text` decodes ids to text, including special tokens; `eos_ids` are the model's stop
    ids."""

    def __init__(
        self,
        *,
        max_running: int,
        max_prefill_tokens: int,
        eos_ids: frozenset[int],
        tail_text: Callable[[Sequence[int]], str],
    ) -> None:
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.eos_ids = eos_ids
        self.tail_text = tail_text
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.moves: list[RowMove] = []
        self.paused = False
        self.holding = False

    @property
    def runnable(self) -> bool:
        """True if a step would do something."""
        return not self.paused and (bool(self.running) or (bool(self.waiting) and not self.holding))

    @property
    def drained(self) -> bool:
        """True if nothing is being sampled: all rows are free, or paused."""
        return self.paused or not self.running

    def knows(self, request_id: str) -> bool:
        return any(item.prompt.request_id == request_id for item in (*self.running, *self.waiting))

    def add(self, generation: Generation) -> list[Generation]:
        """Queue a generation. If there is nothing to sample, it finishes at once and is returned."""
        generation.arrived_paused = self.paused
        if generation.prompt.sampling.max_new_tokens == 0:
            generation.finish = LengthReached(length=0)
            return [generation]
        self.waiting.append(generation)
        return []

    def admit(self) -> list[Generation]:
        """Assign rows to waiting generations, in order of arrival, up to the padded size of one prefill."""
        admitted: list[Generation] = []
        widest = 0
        while self.waiting and not self.paused and not self.holding and len(self.running) < self.max_running:
            widest = max(widest, self.waiting[0].token_count)
            if admitted and widest * (len(admitted) + 1) > self.max_prefill_tokens:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def record(self, rows: range, tokens: Iterable[int], logprobs: Iterable[float], version: str) -> list[Generation]:
        """Append one sampled token to each of the running `rows`, and return the finished generations."""
        finished = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            generation = self.running[row]
            generation.append(token, logprob, version)
            generation.finish = self._finish_of(generation)
            if generation.finish is not None:
                finished.append(generation)
        self._release(finished)
        return finished

    def abort(self, request_id: str | None) -> list[Generation]:
        """Abort the request with this id (None: all requests), except those that arrived during the current pause. A
        request with a row that is paused in place finishes when the pause ends."""
        chosen = [
            item
            for item in (*self.running, *self.waiting)
            if (request_id is None or item.prompt.request_id == request_id)
            and not (self.paused and item.arrived_paused)
        ]
        if not self.paused:
            return self._abort(chosen)
        held = set(map(id, self.running))
        for generation in chosen:
            generation.abort_asked = id(generation) in held
        return self._abort([item for item in chosen if not item.abort_asked])

    def drop(self, generations: Sequence[Generation]) -> list[Generation]:
        """Finish generations whose client has disconnected."""
        return self._abort([item for item in generations if item.finish is None])

    def pause(self, mode: PauseMode) -> list[Generation]:
        """Stop sampling, and return the generations that finish as a result. `retract` frees all rows and keeps the
        tokens, `in_place` keeps both."""
        self.paused = True
        if mode is PauseMode.IN_PLACE:
            return []
        finished = self._abort([*self.running, *self.waiting]) if mode is PauseMode.ABORT else []
        for generation in reversed(self.running):
            generation.retractions += 1
            self.waiting.appendleft(generation)
        self.running.clear()
        return finished

    def resume(self) -> list[Generation]:
        """Resume sampling, and return the generations that were aborted during the pause."""
        self.paused = False
        for generation in self.waiting:
            generation.arrived_paused = False
        return self._abort([item for item in (*self.running, *self.waiting) if item.abort_asked])

    def _finish_of(self, generation: Generation) -> Finish | None:
        sampling, outputs = generation.prompt.sampling, generation.output_ids
        if len(outputs) >= sampling.max_new_tokens:
            return LengthReached(length=sampling.max_new_tokens)
        last = outputs[-1]
        if not sampling.ignore_eos and (last in self.eos_ids or last in (sampling.stop_token_ids or ())):
            return Stopped(matched=last)
        stops = sampling.stop_strings()
        if stops:
            # A token has at least one byte, so this many tokens contain the longest stop string.
            tail = self.tail_text(outputs[-max(len(stop.encode()) for stop in stops) - 1 :])
            matched = next((stop for stop in stops if stop in tail), None)
            if matched is not None:
                return Stopped(matched=matched)
        return None

    def _abort(self, chosen: Sequence[Generation]) -> list[Generation]:
        running = set(map(id, self.running))
        for generation in chosen:
            generation.finish = Aborted(queued=id(generation) not in running)
        self._release(chosen)
        return list(chosen)

    def _release(self, finished: Sequence[Generation]) -> None:
        gone = set(map(id, finished))
        if not gone:
            return
        self.waiting = deque(item for item in self.waiting if id(item) not in gone)
        # From the end, so that the last row, which fills the gap, is never one to be released as well.
        for row in reversed(range(len(self.running))):
            if id(self.running[row]) in gone:
                last = self.running.pop()
                if row < len(self.running):
                    self.running[row] = last
                    self.moves.append(RowMove(source=len(self.running), target=row, length=last.token_count))
