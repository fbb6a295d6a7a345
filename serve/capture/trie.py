"""The token trie of a session: prompts and sampled turns exactly as the engines saw them.

Invariants:
- A path from a root alternates prompt and sampled nodes; its concatenated ids are exactly the ids that were sent to an
  engine and the ids that it returned. The ids of a node never change.
- Below a sampled node, a prompt node holds the ids that closed that turn, those of the new messages and those that open
  the next turn. A root holds a whole rendered conversation.
- Nodes are numbered in the order in which their turns were recorded, and are never removed.
- Text is not stored: messages are identified by their digests (matching.py).
- Parents own their children, which hold weak references to them, so that an unused forest is freed immediately, without
  garbage collection. Code that holds a node must also hold its Trie.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, TypeVar

from headrace.serve.capture.events import Origin, Recorded, Status
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
from headrace.serve.conversation import Message, Role, ToolCall, TurnAnswer, TurnRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.buffer.token_kinds import KindRuns
    from headrace.buffer.types import VersionSpan
    from headrace.serve.rendering.render import TokenIds


NodeT = TypeVar("NodeT", "PromptNode", "SampledNode")


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptNode:
    """Rendered ids. `parts` are the digests of the messages; `frame` is the same for all parts that `covers` treats as
    equal to them; `length` counts the ids from the root to the end of the node. `kinds` are those of `ids`, None if
    they are not known."""

    above: weakref.ref[SampledNode] | None
    parts: tuple[bytes, ...]
    frame: bytes
    ids: TokenIds
    origin: Origin
    length: int
    number: int
    kinds: KindRuns | None = None
    children: list[SampledNode] = field(default_factory=list)

    @property
    def parent(self) -> SampledNode | None:
        """The sampled node above; None for a root."""
        return _alive(self.above) if self.above else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class SampledNode:
    """Sampled turn; `logprobs` and `spans` are aligned with `ids`. `answer` is retained until the agent has accepted
    it."""

    above: weakref.ref[PromptNode]
    turn_id: str
    ids: TokenIds
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    served: Served
    plain: bytes
    calls: tuple[ToolCall, ...]
    options: str
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
        """The last id of the path, which belongs to the prompt if nothing was sampled."""
        return self.ids[-1] if self.ids else self.parent.ids[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Echo:
    """A request's assistant message that repeats a turn of this session."""

    node: SampledNode
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """Longest known prefix of a request. `parent` is the deepest sampled node that the request continues (None: a new
    root); `rest` is the list of messages after it in canonical form, and `parts` are their digests. `prompt` is the
    node of an identical earlier request. `echoes` are the turns on the path; `elsewhere` are turns that the rest quotes
    at another position, or that it has at the right position but in words too different to recognise."""

    parent: SampledNode | None
    rest: tuple[Message, ...]
    parts: tuple[bytes, ...]
    prompt: PromptNode | None
    echoes: tuple[Echo, ...]
    elsewhere: tuple[Echo, ...]
    origin: Origin


class Trie:
    """Forest of one session's conversations."""

    def __init__(self) -> None:
        self.roots: list[PromptNode] = []
        self.sampled: list[SampledNode] = []
        self._numbers = 0
        self._by_call: dict[str, SampledNode] = {}
        self._by_turn: dict[str, SampledNode] = {}
        self._by_words: dict[bytes, SampledNode] = {}

    def match(self, request: TurnRequest, *, untrained: bool) -> Match:
        """Follow the request down the forest as deep as it matches. Does not change the forest."""
        head = head_digest(request.tools, request.agent)
        walk = _Walk(self, head)
        walk.run(request.messages)
        parts = _parts_of(walk.rest, () if walk.parent else (head,))
        quoted = []
        for message in walk.rest:
            # Turns that are not on the path of the request: its history was edited, or summarised.
            if message.role is Role.ASSISTANT:
                echo = Served.of(message.blocks)
                node = self.node_of(message) or self._by_words.get(echo.exact)
                if node is not None:
                    quoted.append(Echo(node, node.served.drift_to(echo)))
        siblings = walk.parent.children if walk.parent else self.roots
        return Match(
            parent=walk.parent,
            rest=walk.rest,
            parts=parts,
            prompt=_known_prompt(siblings, parts, untrained=untrained),
            echoes=tuple(walk.echoes),
            elsewhere=tuple(quoted or walk.rewritten),
            origin=Origin(
                agent=request.agent,
                purpose=request.purpose,
                has_tools=bool(request.tools),
                knows_us=any(path(echo.node)[0][0].origin.is_ours for echo in quoted),
                untrained=untrained,
            ),
        )

    def as_root(self, match: Match, request: TurnRequest) -> Match:
        """Return a match of the same request as a new root, for a history that must be rendered again."""
        parts = _parts_of(request.messages, (head_digest(request.tools, request.agent),))
        return Match(
            parent=None,
            rest=request.messages,
            parts=parts,
            prompt=_known_prompt(self.roots, parts, untrained=match.origin.untrained),
            echoes=match.echoes,
            elsewhere=match.elsewhere,
            origin=match.origin,
        )

    def accept(self, node: SampledNode) -> None:
        """Mark this turn and all turns before it as accepted by the agent, and drop their answers."""
        for _, sampled in path(node):
            if not sampled.status.is_partial:
                sampled.status, sampled.answer = Status.ACCEPTED, None

    def node_of(self, message: Message) -> SampledNode | None:
        """Return the turn that an assistant message identifies by one of our ids, whatever its wording."""
        for block in message.blocks:
            turn = self._by_call.get(getattr(block, "id", "")) or self._by_turn.get(getattr(block, "signature", ""))
            if turn is not None:
                return turn
        return None

    def by_turn(self, turn_id: str) -> SampledNode | None:
        return self._by_turn.get(turn_id)

    def prompt_ids(self, match: Match, delta: TokenIds) -> TokenIds:
        """Return all ids to send: those on the path to the parent, followed by the new ones."""
        ids = self.path_ids(match.parent) if match.parent else array("i")
        ids.extend(delta)
        return ids

    @staticmethod
    def path_ids(node: SampledNode) -> TokenIds:
        """Return the ids from the root to the end of a sampled node."""
        ids = array("i")
        for prompt, sampled in path(node):
            ids.extend(prompt.ids)
            ids.extend(sampled.ids)
        return ids

    def add(self, event: Recorded) -> SampledNode:
        """Add a sampled turn below its prompt; the prompt is added too if it is new."""
        parent, answer = self._by_turn[event.parent] if event.parent else None, event.answer
        siblings = parent.children if parent else self.roots
        # Concurrent requests with equal parts may have been rendered to different ids.
        same_ids = [one for one in siblings if one.ids == event.delta]
        prompt = _known_prompt(same_ids, event.parts, untrained=event.origin.untrained)
        if prompt is None:
            prompt = PromptNode(
                above=weakref.ref(parent) if parent else None,
                parts=event.parts,
                frame=Frame(event.parts).digest(),
                ids=event.delta,
                origin=event.origin,
                length=(parent.length if parent else 0) + len(event.delta),
                number=self._next_number(),
                kinds=event.kinds,
            )
            siblings.append(prompt)
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
            options=event.options,
            answer=None if event.status.is_partial else answer,
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


def _known_prompt(prompts: Sequence[PromptNode], parts: tuple[bytes, ...], *, untrained: bool) -> PromptNode | None:
    """Return the prompt with these parts, if any. Untrained prompts are kept separate from trained ones with the same
    words."""
    return next((one for one in prompts if one.parts == parts and one.origin.untrained is untrained), None)


def _alive(reference: weakref.ref[NodeT]) -> NodeT:
    node = reference()
    if node is None:
        raise RuntimeError("the trie of this node was freed; hold the Trie as long as its nodes")
    return node


def path(node: SampledNode) -> list[tuple[PromptNode, SampledNode]]:
    """Return the pairs from the root down to `node`."""
    pairs = [(node.parent, node)]
    while (above := pairs[-1][0].parent) is not None:
        pairs.append((above.parent, above))
    return pairs[::-1]


def below(prompt: PromptNode) -> Iterator[SampledNode]:
    """Yield all sampled nodes under a prompt."""
    waiting = [prompt]
    while waiting:
        for node in waiting.pop().children:
            yield node
            waiting += node.children


@dataclass(slots=True)
class _Walk:
    """One walk down from the roots. `rest` begins after the last known message. `rewritten` holds the turns that are
    replaced in the rest by a different assistant message: the agent continued with words of its own."""

    trie: Trie
    head: bytes
    parent: SampledNode | None = None
    rest: tuple[Message, ...] = ()
    echoes: list[Echo] = field(default_factory=list)
    rewritten: list[Echo] = field(default_factory=list)

    def run(self, messages: Sequence[Message]) -> None:
        self.rest = tuple(messages)
        while True:
            # One sampled turn deeper: the longest known segment that an echo follows.
            below = self.parent.children if self.parent else self.trie.roots
            segment = _Segment(() if self.parent else (self.head,), below)
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
                return
            end, found = best
            self.parent = found.node
            self.echoes.append(found)
            shown = {call.id for message in self.rest[: end + 1] for call in message.calls}
            after = without_echoes_of(found.node.served.call_ids - shown, self.rest[end + 1 :])
            self.rest = in_order_of(found.node.calls, after)

    def _echo_at(self, index: int, candidates: Sequence[SampledNode]) -> tuple[int, Echo | None]:
        """Return the index of the last message of the echo that begins at `index`, and the echo, if there is one. (Some
        agents split a turn into several messages.)"""
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
    """Messages since the last known turn, added one by one, and the prompts that match them. The cost per message does
    not grow with the number of prompts, since agents that edit their history have hundreds of them."""

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
        """True when the segment is longer than every prompt."""
        return len(self._parts) > self._longest

    def add(self, message: Message) -> None:
        parts = message_parts(message)
        self._parts += parts
        self._frame.add(parts)

    def answers(self) -> list[SampledNode]:
        """Return the turns that answered these messages, with each prompt's latest turn first."""
        return [
            node
            for prompt in self._prompts.get(self._frame.digest(), ())
            if covers(prompt.parts, self._parts)
            for node in reversed(prompt.children)
            if not node.status.is_partial
        ]


def _parts_of(messages: Sequence[Message], prefix: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return prefix + tuple(part for message in messages for part in message_parts(message))
