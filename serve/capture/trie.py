"""The token trie of a session: prompts and sampled turns, as the engines saw them.

Invariants:
- A path from a root alternates prompt and sampled nodes; its ids, concatenated, are exactly what an engine was sent and
  what it answered. No id of a node ever changes.
- Below a sampled node a prompt node holds what closed that turn, the new messages and the opening of the next turn. A
  root holds a whole rendered conversation.
- Nodes are numbered in the order in which turns were recorded; a node outlives whatever branches off.
- No text is kept: messages are known by their digests (matching.py).
- Nodes are owned from above, and know what they stand below by weak references: a forest that nobody needs any more is
  gone at once, without a collection that finds cycles. Whoever holds a node holds its Trie.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, TypeVar

from headrace.serve.capture.events import Origin, Status
from headrace.serve.capture.matching import (
    Drift,
    Frame,
    Served,
    covers,
    head_digest,
    in_order_of,
    message_parts,
    plain_digest,
    without_echoes_of,
)
from headrace.serve.conversation import Message, Role, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.policies.engine import TokenSpan
    from headrace.serve.capture.events import Recorded
    from headrace.serve.conversation import TurnAnswer, TurnRequest
    from headrace.serve.rendering.render import TokenIds


NodeT = TypeVar("NodeT", "PromptNode", "SampledNode")


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptNode:
    """Ids that were rendered. `parts` are the digests of its messages, `frame` what is the same for all that `covers`
    takes for them; `length` counts the ids from the root to its end."""

    above: weakref.ref[SampledNode] | None
    parts: tuple[bytes, ...]
    frame: bytes
    ids: TokenIds
    origin: Origin
    length: int
    number: int
    children: list[SampledNode] = field(default_factory=list)

    @property
    def parent(self) -> SampledNode | None:
        """None for a root."""
        return _alive(self.above) if self.above else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class SampledNode:
    """A sampled turn; `logprobs` and `spans` are aligned with `ids`. `answer` is kept until the agent has accepted
    it."""

    above: weakref.ref[PromptNode]
    turn_id: str
    ids: TokenIds
    logprobs: array[float]
    spans: tuple[TokenSpan, ...]
    served: Served
    plain: bytes
    calls: tuple[ToolCall, ...]
    wishes: str
    answer: TurnAnswer | None
    status: Status
    truncated: bool
    number: int
    delivered_at: float = 0.0
    replays: int = 0
    children: list[PromptNode] = field(default_factory=list)

    @property
    def parent(self) -> PromptNode:
        return _alive(self.above)

    @property
    def length(self) -> int:
        return self.parent.length + len(self.ids)

    @property
    def last_id(self) -> int:
        """The id at the end of the path; the prompt's where nothing was sampled."""
        return self.ids[-1] if self.ids else self.parent.ids[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Echo:
    """An assistant message of a request that is a turn of ours."""

    node: SampledNode
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """How far a request is known. `parent` is the deepest sampled node it continues (None: a new root), `rest` what
    comes after it, in its one form, with its `parts`. `prompt` is there when exactly this was asked before.
    `echoes` are the turns on the way, `elsewhere` turns of ours that the rest quotes in another place, or that stand
    in their place with words too different to be told by."""

    parent: SampledNode | None
    rest: tuple[Message, ...]
    parts: tuple[bytes, ...]
    prompt: PromptNode | None
    echoes: tuple[Echo, ...]
    elsewhere: tuple[Echo, ...]
    origin: Origin


class Trie:
    """One session's forest."""

    def __init__(self) -> None:
        self.roots: list[PromptNode] = []
        self.sampled: list[SampledNode] = []
        self._numbers = 0
        self._by_call: dict[str, SampledNode] = {}
        self._by_turn: dict[str, SampledNode] = {}
        self._by_words: dict[bytes, SampledNode] = {}

    def match(self, request: TurnRequest, *, untrained: bool) -> Match:
        """Walk as deep as the request goes. Changes nothing."""
        head = head_digest(request.tools, request.agent)
        walk = _Walk(self, head)
        walk.run(request.messages)
        parts = _parts_of(walk.rest, () if walk.parent else (head,))
        quoted = tuple(self._quoted(walk.rest))
        siblings = walk.parent.children if walk.parent else self.roots
        return Match(
            parent=walk.parent,
            rest=walk.rest,
            parts=parts,
            prompt=_asked(siblings, parts, untrained=untrained),
            echoes=tuple(walk.echoes),
            elsewhere=quoted or tuple(walk.rewritten),
            origin=Origin(
                agent=request.agent,
                purpose=request.purpose,
                has_tools=bool(request.tools),
                knows_us=any(path(echo.node)[0][0].origin.is_ours for echo in quoted),
                untrained=untrained,
            ),
        )

    def as_root(self, match: Match, request: TurnRequest) -> Match:
        """The same request as a root of its own, for a history that has to be rendered again."""
        parts = _parts_of(request.messages, (head_digest(request.tools, request.agent),))
        return Match(
            parent=None,
            rest=request.messages,
            parts=parts,
            prompt=_asked(self.roots, parts, untrained=match.origin.untrained),
            echoes=match.echoes,
            elsewhere=match.elsewhere,
            origin=match.origin,
        )

    def _quoted(self, messages: Sequence[Message]) -> Iterator[Echo]:
        """Turns of ours among messages that are not on their path: history was edited, or summarised."""
        for message in messages:
            if message.role is Role.ASSISTANT:
                echo = Served.of(message.blocks)
                node = self.node_of(message) or self._by_words.get(echo.exact)
                if node is not None:
                    yield Echo(node, node.served.drift_to(echo))

    def accept(self, node: SampledNode) -> None:
        """The agent has this turn and all before it; their answers need not be kept."""
        for _, sampled in path(node):
            if sampled.status is not Status.ABORTED:
                sampled.status, sampled.answer = Status.ACCEPTED, None

    def node_of(self, message: Message) -> SampledNode | None:
        """The turn an assistant message names by an id of ours, whatever its words."""
        for block in message.blocks:
            turn = self._by_call.get(getattr(block, "id", "")) or self._by_turn.get(getattr(block, "signature", ""))
            if turn is not None:
                return turn
        return None

    def by_turn(self, turn_id: str) -> SampledNode | None:
        return self._by_turn.get(turn_id)

    def prompt_ids(self, match: Match, delta: TokenIds) -> TokenIds:
        """All ids to send: the path to the parent, and what is new."""
        ids = self.path_ids(match.parent) if match.parent else array("i")
        ids.extend(delta)
        return ids

    @staticmethod
    def path_ids(node: SampledNode) -> TokenIds:
        """The ids from the root to the end of a sampled node."""
        ids = array("i")
        for prompt, sampled in path(node):
            ids.extend(prompt.ids)
            ids.extend(sampled.ids)
        return ids

    def _prompt_node(
        self, parent: SampledNode | None, parts: tuple[bytes, ...], delta: TokenIds, origin: Origin
    ) -> PromptNode:
        siblings = parent.children if parent else self.roots
        # Requests that mean the same may have been rendered to other ids, side by side.
        known = _asked([one for one in siblings if one.ids == delta], parts, untrained=origin.untrained)
        if known is not None:
            return known
        length = (parent.length if parent else 0) + len(delta)
        prompt = PromptNode(
            above=weakref.ref(parent) if parent else None,
            parts=parts,
            frame=Frame(parts).digest(),
            ids=delta,
            origin=origin,
            length=length,
            number=self._next_number(),
        )
        siblings.append(prompt)
        return prompt

    def add(self, event: Recorded) -> SampledNode:
        """A sampled turn, below a prompt that is made when nobody asked it before."""
        parent, answer = self._by_turn[event.parent] if event.parent else None, event.answer
        prompt = self._prompt_node(parent, event.parts, event.delta, event.origin)
        served = Served.of(answer.blocks)
        node = SampledNode(
            above=weakref.ref(prompt),
            turn_id=answer.turn_id,
            ids=array("i", event.ids),
            logprobs=array("f", event.logprobs),
            spans=event.spans,
            served=served,
            plain=plain_digest(answer.blocks),
            calls=answer.calls,
            wishes=event.wishes,
            answer=answer if event.status is not Status.ABORTED else None,
            status=event.status,
            truncated=event.truncated,
            number=self._next_number(),
        )
        prompt.children.append(node)
        self.sampled.append(node)
        self._by_turn[node.turn_id] = node
        if answer.blocks:
            self._by_words[served.exact] = node
        self._by_call.update(dict.fromkeys(served.call_ids, node))
        return node

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


def _asked(prompts: Sequence[PromptNode], parts: tuple[bytes, ...], *, untrained: bool) -> PromptNode | None:
    """The one that was asked before. What is not trained is kept apart from the same words that are."""
    return next((one for one in prompts if one.parts == parts and one.origin.untrained is untrained), None)


def _alive(reference: weakref.ref[NodeT]) -> NodeT:
    node = reference()
    if node is None:
        raise RuntimeError("a node outlived its trie")
    return node


def path(node: SampledNode) -> list[tuple[PromptNode, SampledNode]]:
    """The pairs from the root down to `node`."""
    pairs = [(node.parent, node)]
    while (above := pairs[-1][0].parent) is not None:
        pairs.append((above.parent, above))
    return pairs[::-1]


def below(prompt: PromptNode) -> Iterator[SampledNode]:
    """All sampled nodes under a prompt."""
    waiting = [prompt]
    while waiting:
        for node in waiting.pop().children:
            yield node
            waiting += node.children


@dataclass(slots=True)
class _Walk:
    """One walk from the roots down. `rest` begins after the last message that is known. `rewritten` are the turns in
    whose place the rest has another message of the assistant: the agent went on with it, in words of its own."""

    trie: Trie
    head: bytes
    parent: SampledNode | None = None
    rest: tuple[Message, ...] = ()
    echoes: list[Echo] = field(default_factory=list)
    rewritten: list[Echo] = field(default_factory=list)

    def run(self, messages: Sequence[Message]) -> None:
        self.rest = tuple(messages)
        while self._step():
            pass

    def _step(self) -> bool:
        """Go one sampled turn deeper, if the rest says so: the longest known segment that an echo follows."""
        segment = _Segment(() if self.parent else (self.head,), self._below())
        best: tuple[int, Echo] | None = None
        self.rewritten = []
        for index, message in enumerate(self.rest):
            if segment.is_past:
                break
            if message.role is Role.ASSISTANT and (candidates := segment.answers()):
                last, echo = self._echo_at(index, candidates)
                best = (last, echo) if echo else best
                if echo is None:
                    drift = candidates[0].served.drift_to(Served.of(message.blocks))
                    self.rewritten.append(Echo(candidates[0], drift))
            segment.add(message)
        if best is None:
            return False
        self._go_down(*best)
        return True

    def _below(self) -> list[PromptNode]:
        return self.parent.children if self.parent else self.trie.roots

    def _go_down(self, index: int, echo: Echo) -> None:
        self.parent = echo.node
        self.echoes.append(echo)
        shown = {call.id for message in self.rest[: index + 1] for call in message.calls}
        after = without_echoes_of(echo.node.served.call_ids - shown, self.rest[index + 1 :])
        self.rest = in_order_of(echo.node.calls, after)

    def _echo_at(self, index: int, candidates: Sequence[SampledNode]) -> tuple[int, Echo | None]:
        """The echo that begins at a message, and where it ends: some agents make several messages of one turn."""
        message = self.rest[index]
        run = list(takewhile(lambda one: one.role is Role.ASSISTANT, islice(self.rest, index, None)))
        if len(run) > 1:
            whole = Message(Role.ASSISTANT, tuple(block for one in run for block in one.blocks))
            if echo := _by_words(whole, candidates):
                return index + len(run) - 1, echo
        named = self.trie.node_of(message)
        if named is not None and named in candidates:
            return index, Echo(named, named.served.drift_to(Served.of(message.blocks)))
        return index, _by_words(message, candidates)


def _by_words(message: Message, candidates: Sequence[SampledNode]) -> Echo | None:
    echo = Served.of(message.blocks)
    for node in candidates:
        if node.served.exact == echo.exact:
            return Echo(node, Drift.NONE)
    plain = plain_digest(message.blocks)
    for node in candidates:
        if node.plain == plain:
            return Echo(node, node.served.drift_to(echo))
    return None


class _Segment:
    """Messages since the last known turn, one after the other, and the prompts that say the same. What is looked at
    for each does not grow with the number of prompts: agents that edit their history have hundreds."""

    def __init__(self, prefix: tuple[bytes, ...], prompts: Sequence[PromptNode]) -> None:
        self._parts = list(prefix)
        self._frame = Frame(prefix)
        self._prompts: dict[bytes, list[PromptNode]] = {}
        self._longest = -1
        for prompt in prompts:
            if prompt.children and prompt.parts[: len(prefix)] == prefix:
                self._prompts.setdefault(prompt.frame, []).append(prompt)
                self._longest = max(self._longest, len(prompt.parts))

    @property
    def is_past(self) -> bool:
        """Whether every prompt is shorter."""
        return len(self._parts) > self._longest

    def add(self, message: Message) -> None:
        parts = message_parts(message)
        self._parts += parts
        self._frame.add(parts)

    def answers(self) -> list[SampledNode]:
        """The turns that these messages got, the latest of each prompt first."""
        return [
            node
            for prompt in self._prompts.get(self._frame.digest(), ())
            if covers(prompt.parts, self._parts)
            for node in reversed(prompt.children)
            if node.status is not Status.ABORTED
        ]


def _parts_of(messages: Sequence[Message], prefix: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return prefix + tuple(part for message in messages for part in message_parts(message))
