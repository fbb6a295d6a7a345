"""The token trie of a session: prompts and sampled turns exactly as the engines saw them.

Invariants:
- A path from a root alternates prompt and sampled nodes; its concatenated ids are exactly the ids that were sent to an
  engine and the ids that it returned. The ids of a node never change.
- Below a sampled node, a prompt node holds the ids that closed that turn, those of the new messages and those that open
  the next turn. A root holds a whole rendered conversation. A prompt node that resumes a turn holds only the ids of the
  text that the agent inserted into the turn's message.
- A stop token that ended a turn stays in the row when the turn is resumed: the policy sampled it.
- Nodes are numbered in the order in which their turns were recorded, and are never removed.
- Text is not stored: messages are identified by their digests (matching.py, echoes.py).
- Parents own their children, which hold weak references to them, so that an unused forest is freed immediately, without
  garbage collection. Code that holds a node must also hold its Trie.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeVar

from headrace.buffer.trajectories.token_kinds import KindRuns
from headrace.buffer.trajectories.types import VersionSpan
from headrace.serve.gateway.capture.echoes import Drift, KnownChanges, TurnFingerprint, Words, changes_of, digest
from headrace.serve.gateway.capture.events import LineageOrigin, Recorded, Status
from headrace.serve.gateway.capture.matching import (
    PartsDigest,
    head_digest,
    in_order_of,
    message_parts,
    opened_part,
    split_echo,
)
from headrace.serve.gateway.conversation import Message, Reasoning, Role, ToolCall, TurnAnswer, TurnRequest, ending_of
from headrace.serve.gateway.rendering.render import TokenIds

NodeT = TypeVar("NodeT", "PromptNode", "SampledNode")


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptNode:
    """Rendered ids. `parts` are the digests of the messages, the last of which is open if `opened`, the number of its
    characters, is not None; `closed` is the digest of the other parts. A node that `resumes` its parent has no other
    part. `length` counts the ids from the root to the end of the node. `kinds`
    are those of `ids`, None if they are not known."""

    above: weakref.ref[SampledNode] | None
    parts: tuple[bytes, ...]
    closed: bytes
    ids: TokenIds
    origin: LineageOrigin
    length: int
    number: int
    opened: int | None
    resumes: bool
    kinds: KindRuns | None = None
    children: list[SampledNode] = field(default_factory=list)

    @property
    def parent(self) -> SampledNode | None:
        """The sampled node above; None for a root."""
        return _alive(self.above) if self.above else None

    @property
    def closed_parts(self) -> tuple[bytes, ...]:
        return self.parts if self.opened is None else self.parts[:-1]


@dataclass(slots=True, eq=False, weakref_slot=True)
class SampledNode:
    """Sampled turn; `logprobs` and `spans` are aligned with `ids`. `answer` is retained until the agent has accepted
    it, or longer if the trie keeps answers. `said` is the digest of the turn's text as the agent continues it, with its
    stop string, and `said_characters` its length. `dropped`, `border`, `constraint` and `honoured` are those of the
    event."""

    above: weakref.ref[PromptNode]
    turn_id: str
    ids: TokenIds
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    served: TurnFingerprint
    calls: tuple[ToolCall, ...]
    options: str
    answer: TurnAnswer | None
    status: Status
    truncated: bool
    number: int
    said: bytes
    said_characters: int
    dropped: int
    border: bool
    constraint: str = ""
    honoured: bool = True
    replays: int = 0
    children: list[PromptNode] = field(default_factory=list)
    last_echo: tuple[bytes, KnownChanges | None, bool, Drift] | None = None
    """The last message that was compared with the turn, how it was compared, and the result: an agent repeats the same
    echo with each request."""

    @property
    def parent(self) -> PromptNode:
        return _alive(self.above)

    @property
    def length(self) -> int:
        return self.parent.length + len(self.ids)

    @property
    def is_constrained(self) -> bool:
        """True if a grammar restricted what could be sampled."""
        return bool(self.constraint) and self.honoured

    @property
    def last_id(self) -> int:
        """The last id of the path, which belongs to the prompt if nothing was sampled."""
        return self.ids[-1] if self.ids else Trie.path_ids(self)[-1]

    @property
    def opening_turn(self) -> SampledNode:
        """The turn that began the message of which this one is a part."""
        node = self
        while node.parent.resumes and (above := node.parent.parent) is not None:
            node = above
        return node


@dataclass(frozen=True, slots=True, eq=False)
class Echo:
    """A request's assistant message that repeats a turn of this session, or stands in its place."""

    node: SampledNode
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """Longest known prefix of a request. `parent` is the deepest sampled node that the request continues (None: a new
    root); `rest` is the list of messages after it in canonical form, and `parts` are their digests. `prompt` is the
    node of an identical earlier request. `echoes` are the turns on the path; `elsewhere` are turns that the rest quotes
    at another position, or that it has at the right position but in words too different to recognise. `opened` and
    `resumes` are those of the prompt node; with `resumes`, the rest is the inserted text."""

    parent: SampledNode | None
    rest: tuple[Message, ...]
    parts: tuple[bytes, ...]
    prompt: PromptNode | None
    echoes: tuple[Echo, ...]
    elsewhere: tuple[Echo, ...]
    origin: LineageOrigin
    opened: int | None = None
    resumes: bool = False


class Trie:
    """Forest of one session's conversations. With `keeps_answers`, it holds answers also after they were accepted."""

    def __init__(self, *, keeps_answers: bool = False) -> None:
        self._keeps_answers = keeps_answers
        self.roots: list[PromptNode] = []
        self.sampled: list[SampledNode] = []
        self._numbers = 0
        self._by_call: dict[str, SampledNode] = {}
        self._by_turn: dict[str, SampledNode] = {}
        self._by_words: dict[bytes, SampledNode] = {}

    def match(self, request: TurnRequest, *, untrained: bool) -> Match:
        """Follow the request down the forest as deep as it matches. Does not change the forest."""
        head = head_digest(request.tools, request.agent)
        walk = _Walk(self, head, changes_of(request.client), keeps_order=request.keeps_order)
        walk.run(request.messages[:-1] if request.continues else request.messages)
        quoted = []
        for message in walk.rest:
            # Turns that are not on the path of the request: its history was edited, or summarised.
            if message.role is Role.ASSISTANT:
                words = walk.words_of(message)
                node = self.node_of(message) or self._by_words.get(words.exact)
                if node is not None:
                    quoted.append(Echo(node, walk.drift(node, words)))
        if request.continues:
            walk.open(request.messages[-1])
        opened = len(walk.rest[-1].text) if request.continues else None
        parts = _parts_of(walk.rest, () if walk.parent else (head,), opens=request.continues, resumes=walk.resumes)
        siblings = walk.parent.children if walk.parent else self.roots
        return Match(
            parent=walk.parent,
            rest=walk.rest,
            parts=parts,
            prompt=_known_prompt(siblings, parts, untrained=untrained),
            echoes=tuple(walk.echoes),
            elsewhere=tuple(quoted or walk.rewritten),
            origin=LineageOrigin(
                agent=request.agent,
                purpose=request.purpose,
                has_tools=bool(request.tools),
                knows_us=any(path(echo.node)[0][0].origin.is_ours for echo in quoted),
                untrained=untrained,
            ),
            opened=opened,
            resumes=walk.resumes,
        )

    def as_root(self, match: Match, request: TurnRequest) -> Match:
        """Return a match of the same request as a new root, for a history that must be rendered again."""
        parts = _parts_of(request.messages, (head_digest(request.tools, request.agent),), opens=request.continues)
        return Match(
            parent=None,
            rest=request.messages,
            parts=parts,
            prompt=_known_prompt(self.roots, parts, untrained=match.origin.untrained),
            echoes=match.echoes,
            elsewhere=match.elsewhere,
            origin=match.origin,
            opened=len(request.messages[-1].text) if request.continues else None,
            resumes=False,
        )

    def accept(self, node: SampledNode) -> None:
        """Mark this turn and all turns before it as accepted by the agent, and drop their answers."""
        for _, sampled in path(node):
            if not sampled.status.is_partial:
                sampled.status = Status.ACCEPTED
                if not self._keeps_answers:
                    sampled.answer = None

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
                closed=PartsDigest(event.parts if event.opened is None else event.parts[:-1]).digest(),
                ids=event.delta,
                origin=event.origin,
                length=(parent.length if parent else 0) + len(event.delta),
                number=self._next_number(),
                opened=event.opened,
                resumes=event.resumes,
                kinds=event.kinds,
            )
            siblings.append(prompt)
        served, said = TurnFingerprint.of(answer.blocks), answer.text
        if not said.endswith(answer.stop_string) and not (answer.blocks and isinstance(answer.blocks[-1], Reasoning)):
            # The ids have the stop string even where the answer does not, so a continuation has to begin with it.
            said += answer.stop_string
        node = SampledNode(
            above=weakref.ref(prompt),
            turn_id=answer.turn_id,
            ids=array("i", event.ids),
            logprobs=array("f", event.logprobs),
            spans=event.spans,
            served=served,
            calls=answer.calls,
            options=event.options,
            answer=None if event.status.is_partial else answer,
            status=event.status,
            truncated=event.truncated,
            number=self._next_number(),
            said=digest(said),
            said_characters=len(said),
            dropped=event.dropped,
            border=event.border,
            constraint=event.constraint,
            honoured=event.honoured,
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
    """One walk down from the roots. `rest` begins after the last known message, or, with `resumes`, within it.
    `rewritten` holds the turns that are replaced in the rest by a different assistant message: the agent continued with
    words of its own."""

    trie: Trie
    head: bytes
    changes: KnownChanges | None
    keeps_order: bool
    parent: SampledNode | None = None
    rest: tuple[Message, ...] = ()
    resumes: bool = False
    echoes: list[Echo] = field(default_factory=list)
    rewritten: list[Echo] = field(default_factory=list)
    _words: dict[int, Words] = field(default_factory=dict)
    """Words of the request's messages, by the identity of the message."""

    def run(self, messages: Sequence[Message]) -> None:
        self.rest = tuple(messages)
        while True:
            # One sampled turn deeper: the longest known segment that an echo follows.
            below = self.parent.children if self.parent else self.trie.roots
            segment = _Segment(() if self.parent else (self.head,), below)
            best: tuple[Echo, tuple[Message, ...]] | None = None
            self.rewritten = []
            for index, message in enumerate(self.rest):
                if segment.is_past:
                    break
                if message.role is not Role.ASSISTANT:
                    segment.add(message_parts(message))
                    continue
                if prompts := segment.prompts():
                    found = self._echo_at(index, prompts)
                    best = found or best
                    if found is None and (candidates := _answers(prompts)):
                        named = self.trie.node_of(message)
                        replaced = named if named is not None and named in candidates else candidates[0]
                        self.rewritten.append(Echo(replaced, Drift.EDITED))
                if segment.is_full:
                    break
                segment.add((self.words_of(message).exact,))
            if best is None:
                return
            echo, after = best
            self.parent = echo.node
            self.echoes.append(echo)
            self.rest = in_order_of(echo.node.calls, after)

    def open(self, message: Message) -> None:
        """Go on within the last message, which the policy is to continue: to the deepest turn with whose text, and with
        what was inserted before it, the message begins."""
        siblings = self.parent.children if self.parent else self.trie.roots
        segment = _Segment(() if self.parent else (self.head,), siblings)
        for one in self.rest:
            segment.add(message_parts(one))
        prompts, text = segment.prompts(), message.text
        # An empty turn at the end of the message would make a repeated request a new one.
        is_given = any(isinstance(block, Reasoning) for block in message.blocks)
        found = [
            (end, node)
            for node, start, end, fits in _pieces(text, prompts)
            if fits and (start < end or end < len(text) or is_given)
        ]
        # A stop token that ended a turn stays in the row, before what was inserted: the policy sampled it, and many
        # templates cannot render a message that is left open.
        end, _, deepest = max(((end, node.number, node) for end, node in found), default=(0, 0, None))
        if deepest is not None:
            self.parent, self.resumes = deepest, True
            self.echoes.append(Echo(deepest, Drift.NONE))
            self.rest = (ending_of(message, end),)
            return
        self.rest = (*self.rest, message)
        if candidates := _answers(prompts):
            self.rewritten.append(Echo(candidates[0], Drift.EDITED))

    def words_of(self, message: Message) -> Words:
        """Return the words of a message of the request, which outlives the walk; digests are computed once."""
        if (words := self._words.get(id(message))) is None:
            words = self._words[id(message)] = Words(message.blocks)
        return words

    def drift(self, node: SampledNode, words: Words) -> Drift:
        asked = (words.exact, self.changes, self.keeps_order)
        if node.last_echo is None or node.last_echo[:3] != asked:
            node.last_echo = (*asked, node.served.drift_of(words, self.changes, ordered=self.keeps_order))
        return node.last_echo[3]

    def _echo_at(self, index: int, prompts: Sequence[PromptNode]) -> tuple[Echo, tuple[Message, ...]] | None:
        """Return the echo that begins with the message at `index`, and the messages after it; None if the message
        repeats no turn after these prompts."""
        message, candidates = self.rest[index], _answers(prompts)
        run = list(takewhile(lambda one: one.role is Role.ASSISTANT, islice(self.rest, index, None)))
        if len(run) > 1:
            # Some agents split a turn into several messages.
            whole = Message(Role.ASSISTANT, tuple(block for one in run for block in one.blocks))
            if echo := self._same(whole, Words(whole.blocks), candidates):
                return echo, self.rest[index + len(run) :]
        named = self.trie.node_of(message)
        if named is not None and (missing := named.served.call_ids - self.words_of(message).call_ids):
            whole, after = split_echo(missing, self.rest[index:])
            if named in candidates and (echo := self._same(whole, Words(whole.blocks), [named])):
                return echo, after
        echo = self._same(message, self.words_of(message), candidates) or self._last_piece(message, prompts)
        return None if echo is None else (echo, self.rest[index + 1 :])

    def _same(self, message: Message, words: Words, candidates: Sequence[SampledNode]) -> Echo | None:
        """Return the echo of one of these turns that a message is. Among turns with equal words, the one that an id
        names comes first, then one with the same reasoning, then the latest."""
        echoes = [Echo(node, Drift.NONE) for node in candidates if node.served.exact == words.exact]
        if not echoes:
            drifts = ((node, self.drift(node, words)) for node in candidates)
            echoes = [Echo(node, drift) for node, drift in drifts if drift is not Drift.EDITED]
        if len(echoes) > 1:
            named, reasoning = self.trie.node_of(message), words.reasoning
            echoes.sort(key=lambda echo: (echo.node is not named, echo.node.served.reasoning != reasoning))
        return echoes[0] if echoes else None

    def _last_piece(self, message: Message, prompts: Sequence[PromptNode]) -> Echo | None:
        """Return the echo of the last turn of a message in several pieces: text of the agent's and turns that resumed
        one another."""
        text, words = message.text, self.words_of(message)
        ends = [
            node
            for node, start, *_ in _pieces(text, prompts)
            if node.parent.opened is not None
            and node.served.values == words.values
            and digest(text[start:]) in (node.served.text, node.said)
        ]
        named = self.trie.node_of(message)
        last = max(ends, key=lambda node: (node is named, node.number), default=None)
        return None if last is None else Echo(last, Drift.NONE)


def _answers(prompts: Sequence[PromptNode]) -> list[SampledNode]:
    """Return the complete turns that answered prompts without an open message, with each prompt's latest turn first."""
    return [
        node
        for prompt in prompts
        if prompt.opened is None
        for node in reversed(prompt.children)
        if not node.status.is_partial
    ]


def _pieces(text: str, prompts: Iterable[PromptNode]) -> Iterator[tuple[SampledNode, int, int, bool]]:
    """Yield the complete turns below these prompts, in one message with the turns and the inserted texts before them,
    if the message's text begins with these. Each turn comes with the places where it would begin and end in the text,
    and True if the text has its words there."""
    waiting = [(prompt, 0) for prompt in prompts]
    while waiting:
        prompt, start = waiting.pop()
        if prompt.opened is not None:
            begin, start = start, start + prompt.opened
            if opened_part(text[begin:start], resumes=prompt.resumes) != prompt.parts[-1]:
                continue
        for node in prompt.children:
            if node.status.is_partial:
                continue
            end = start + node.said_characters
            fits = digest(text[start:end]) == node.said
            yield node, start, end, fits
            if fits:
                waiting += [(child, end) for child in node.children if child.resumes]


class _Segment:
    """Parts since the last known turn, added message by message, and the prompts that match them. The cost per message
    does not grow with the number of prompts, since agents that edit their history have hundreds of them."""

    def __init__(self, prefix: tuple[bytes, ...], prompts: Sequence[PromptNode]) -> None:
        self._length = len(prefix)
        self._digest = PartsDigest(prefix)
        self._prompts: dict[bytes, list[PromptNode]] = {}
        self._longest = -1
        for prompt in prompts:
            # A prompt that resumes a turn belongs to the turn's own message.
            if prompt.children and not prompt.resumes and prompt.closed_parts[: len(prefix)] == prefix:
                self._prompts.setdefault(prompt.closed, []).append(prompt)
                self._longest = max(self._longest, len(prompt.closed_parts))

    @property
    def is_past(self) -> bool:
        """True when the segment is longer than every prompt."""
        return self._length > self._longest

    @property
    def is_full(self) -> bool:
        """True when the segment is as long as the longest prompt."""
        return self._length >= self._longest

    def add(self, parts: Sequence[bytes]) -> None:
        self._length += len(parts)
        self._digest.add(parts)

    def prompts(self) -> list[PromptNode]:
        """Return the prompts with these messages, some of which also open a message of the policy's."""
        return self._prompts.get(self._digest.digest(), [])


def _parts_of(
    messages: Sequence[Message], prefix: tuple[bytes, ...], *, opens: bool = False, resumes: bool = False
) -> tuple[bytes, ...]:
    closed = messages[:-1] if opens else messages
    parts = prefix + tuple(part for message in closed for part in message_parts(message))
    return (*parts, opened_part(messages[-1].text, resumes=resumes)) if opens else parts
