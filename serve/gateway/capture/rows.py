"""The training rows of a session: the trained and masked tokens of its trie, and its lineages.

Invariants:
- A row is the path to a turn that no trainable turn continues; no row is a prefix of another.
- Each trained token is trained in one row, that of the longest lineage through it. In other rows it is context.
- Each observation is one in one row too, chosen in the same way. In other rows it is of kind `PROMPT`.
- A row's version spans cover exactly the sampled positions that it owns, so that staleness is computed from trained
  tokens only.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from headrace.buffer.trajectories.codec import decode, encode
from headrace.buffer.trajectories.token_kinds import OBSERVED, TokenKind, from_runs
from headrace.buffer.trajectories.types import Row, Trajectory, VersionSpan
from headrace.serve.gateway.capture.coverage import Coverage
from headrace.serve.gateway.capture.events import Exhausted, Status
from headrace.serve.gateway.capture.session import Session, SessionId, TrainedPart
from headrace.serve.gateway.capture.session_usage import SessionUsage
from headrace.serve.gateway.capture.trie import PromptNode, SampledNode, Trie, below, path
from headrace.serve.gateway.conversation import RequestPurpose


class Masked(StrEnum):
    """Reason why sampled tokens are not trained."""

    ABORTED = "aborted"
    """The turn was cut off: the agent disconnected, the engine failed after partial output, or its wall time ran out in
    a session that does not train such turns."""
    ABANDONED = "abandoned"
    """The agent continued without the turn, which was dropped as malformed, sampled again, or never delivered."""
    SIDE = "side"
    """A side call (for a title or a summary for people), or a call to a model name that is served but not trained."""
    SAMPLING = "sampling"
    """Sampled with temperature 0, top_p or top_k, so that the engine's log-probabilities are not those of the behaviour
    policy, or with a grammar, so that they are those of a distribution that a learner does not have."""
    TRUNCATED = "truncated"
    """Cut off by the context limit, in a session that does not train such turns."""
    OVERRUN = "overrun"
    """Sampled after the stop string that ended the turn, and left out of the row."""
    STOP_BORDER = "stop_border"
    """The turn's stop string ends inside a token: the policy sampled more text than the agent was given."""


IN_ROWS = (None, Masked.SAMPLING, Masked.TRUNCATED, Masked.STOP_BORDER)
"""Verdicts of the turns that rows contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """Sampled turn as text: `prompt` is the text that was new to the engine since the turn `parent` ("" opens a row),
    and `answer` is the sampled text; both contain spelled-out special tokens. `status`, `masked` (the reason why the
    turn is not trained) and `lineage` come from the trie; `versions` are the versions of the weights that sampled
    it."""

    turn_id: str
    parent: str
    lineage: str
    prompt: str
    answer: str
    sampled_tokens: int
    status: str
    masked: str
    versions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Description of a row. `name` is unique within the session; `truncated` is true if the context limit cut off its
    last turn. `turns` has the id and the tokens `[start, end)` of each turn that is trained in this row."""

    name: str
    truncated: bool
    turns: tuple[tuple[str, int, int], ...] = ()


def _encoded(trajectory: Trajectory) -> str:
    return b64encode(encode(trajectory)).decode()


def _decoded(text: str) -> Trajectory:
    return decode(b64decode(text))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionReport:
    """Report of a closed session. `trajectory` is None when no row has a sampled turn; `lineages` has one entry per
    row. `failures` are engine, gateway and network failures that reached the agent: any of them makes the outcome
    infra, whatever the score. `drift` counts turns by how their echoes differed, and `lost_calls` counts pieces of call
    markup that could not be parsed. `rerendered` counts the conversations after the first that began with a full
    render, and `replays` requests that got the answer of an earlier, equal one again. `conversation` holds every
    sampled turn as text, if requested. `usage` says where the time went. `unhonoured` counts the turns by the kind of
    a constraint that no engine could honour."""

    session_id: SessionId
    trajectory: Annotated[Trajectory, PlainValidator(_decoded), PlainSerializer(_encoded)] | None
    turns: int
    sampled_tokens: int
    trained_tokens: int
    masked: dict[str, int]
    rerendered: int
    exhausted: Exhausted
    failures: tuple[str, ...]
    lineages: tuple[Lineage, ...] = ()
    drift: dict[str, int] = field(default_factory=dict)
    lost_calls: int = 0
    replays: int = 0
    conversation: tuple[TranscriptTurn, ...] = ()
    usage: SessionUsage = field(default_factory=SessionUsage)
    unhonoured: dict[str, int] = field(default_factory=dict)

    @property
    def coverage(self) -> Coverage:
        return Coverage(sessions=1, sampled=self.sampled_tokens, trained=self.trained_tokens, masked=self.masked)


def report_of(session: Session) -> SessionReport:
    """Return the report of a session."""
    verdicts = verdicts_of(session)
    in_rows = {node for node, reason in verdicts.items() if reason in IN_ROWS}
    inner = {sampled for node in in_rows for _, sampled in path(node)[:-1]}
    leaves = [node for node in verdicts if node in in_rows and node not in inner]
    owned: set[SampledNode] = set()
    seen: set[PromptNode] = set()
    rows_by_leaf: dict[SampledNode, Row] = {}
    lineages: dict[SampledNode, Lineage] = {}
    for leaf in sorted(leaves, key=lambda node: -node.length):
        # The longest row owns the turns that several share.
        in_order = [sampled for _, sampled in path(leaf)]
        mine = in_rows.intersection(in_order) - owned
        trained = {node for node in mine if verdicts[node] is None}
        rows_by_leaf[leaf] = _row(leaf, mine, trained, seen)
        lineages[leaf] = Lineage(
            name=lineage_name(leaf, session.trie),
            truncated=leaf.truncated,
            turns=tuple(
                (node.turn_id, node.length - len(node.ids), node.length) for node in in_order if node in trained
            ),
        )
        owned |= mine
        seen |= {prompt for prompt, _ in path(leaf)}
    rows = tuple(rows_by_leaf[leaf] for leaf in leaves)
    masked = Counter[str]()
    for node, reason in verdicts.items():
        if reason is not None:
            masked[str(reason)] += len(node.ids)
        masked[str(Masked.OVERRUN)] += node.dropped
    return SessionReport(
        session_id=session.spec.session_id,
        trajectory=Trajectory(rows=rows, temperature=session.spec.sampling.temperature) if rows else None,
        turns=session.turns,
        sampled_tokens=session.sampled_tokens,
        trained_tokens=sum(int(row.loss_mask_T.sum()) for row in rows),
        masked={reason: tokens for reason, tokens in masked.items() if tokens},
        replays=sum(node.replays for node in session.trie.sampled),
        rerendered=max(0, len(session.trie.roots) - 1),
        exhausted=session.exhausted,
        failures=tuple(session.failures),
        lineages=tuple(lineages[leaf] for leaf in leaves),
        drift={str(kind): number for kind, number in session.drift.items() if kind},
        lost_calls=session.lost_calls,
        unhonoured={kind: number for kind, number in session.unhonoured.items() if number},
    )


def verdicts_of(session: Session) -> dict[SampledNode, Masked | None]:
    """Return for every sampled turn, in the order sampled, the reason why it is masked, or None if it is trained."""
    side: set[SampledNode] = set()
    roots, train = session.trie.roots, session.spec.train
    if TrainedPart.SIDE not in train and any(root.origin.has_tools for root in roots):
        # In a session whose agents have tools: conversations without tools that neither summarise nor continue another.
        side = {node for root in roots if not root.origin.is_ours for node in below(root)}
    verdicts: dict[SampledNode, Masked | None] = {}
    for node in session.trie.sampled:
        if node.status is Status.ABORTED or (node.status is Status.CUT and not session.spec.train_cut):
            verdicts[node] = Masked.ABORTED
        elif node in side or node.parent.origin.untrained:
            verdicts[node] = Masked.SIDE
        elif TrainedPart.ABANDONED not in train and is_abandoned(node, session.trie):
            verdicts[node] = Masked.ABANDONED
        elif not session.spec.sampling.exact or node.is_constrained:
            verdicts[node] = Masked.SAMPLING
        elif node.border:
            verdicts[node] = Masked.STOP_BORDER
        else:
            verdicts[node] = Masked.TRUNCATED if node.truncated and not session.spec.train_truncated else None
    return verdicts


def is_abandoned(node: SampledNode, trie: Trie) -> bool:
    """Return whether the agent dropped this turn and continued from the point before it."""
    if node.status is Status.FINISHED:
        return True
    prompt = node.parent
    if node.status is Status.ACCEPTED or node.children or not _is_echoed(prompt):
        return False
    siblings = [sibling for sibling in prompt.children if sibling is not node]
    if any(sibling.number > node.number and not sibling.status.is_partial for sibling in siblings):
        return True
    if any(child.number > node.number for sibling in siblings for child in sibling.children):
        # Of several samples, the agent went on with another one.
        return True
    # A later root is the same conversation without its first answer if it only appends messages.
    others = prompt.parent.children if prompt.parent is not None else trie.roots
    return any(
        other.number > node.number
        and _is_echoed(other)
        and (prompt.parent is not None or other.parts[: len(prompt.parts)] == prompt.parts)
        for other in others
    )


def _is_echoed(prompt: PromptNode) -> bool:
    """Return whether the agent would continue from the answer. It does not continue from a summary of its history,
    which it requests separately, or from an untrained turn."""
    return prompt.origin.purpose is not RequestPurpose.COMPACTION and not prompt.origin.untrained


def _row(leaf: SampledNode, mine: set[SampledNode], trained: set[SampledNode], seen: set[PromptNode]) -> Row:
    """Return the path to `leaf`, with log-probabilities and spans of the turns it owns, the mask of the trained ones,
    and the kinds of tokens if all its prompts have them. Prompts in `seen` are in another row, which has their
    observations."""
    ids = array("i")
    mask, logprobs = np.zeros(leaf.length, dtype=np.bool_), np.zeros(leaf.length, dtype=np.float32)
    spans: list[VersionSpan] = []
    kinds: list[np.ndarray[Any, np.dtype[np.uint8]]] | None = []
    for prompt, sampled in path(leaf):
        ids.extend(prompt.ids)
        start = len(ids)
        ids.extend(sampled.ids)
        if kinds is not None and prompt.kinds is not None:
            of_prompt = from_runs(prompt.kinds)
            if prompt in seen:
                of_prompt[np.isin(of_prompt, OBSERVED)] = TokenKind.PROMPT
            kinds += [of_prompt, np.full(len(sampled.ids), TokenKind.SAMPLED, dtype=np.uint8)]
        else:
            kinds = None
        if sampled in mine:
            mask[start : len(ids)] = sampled in trained
            logprobs[start : len(ids)] = sampled.logprobs
            spans += [span.shifted(start) for span in sampled.spans]
    return Row(
        tokens_T=np.array(ids, dtype=np.int32),
        loss_mask_T=mask,
        logprobs_T=logprobs,
        versions=tuple(spans),
        kinds_T=np.concatenate(kinds) if kinds else None,
    )


def lineage_name(leaf: SampledNode, trie: Trie) -> str:
    """Return the lineage's name: `0` for the first conversation; `2.compaction` and `1.agent-7` name the purpose and
    the agent, if known."""
    root, origin = path(leaf)[0][0], leaf.parent.origin
    purpose = origin.purpose.value if origin.purpose is not RequestPurpose.TURN else ""
    return ".".join(part for part in (str(trie.roots.index(root)), origin.agent, purpose) if part)


def tree_of(session: Session) -> list[dict[str, object]]:
    """Return the sampled nodes of the trie as JSON, in the order sampled."""
    return [
        {
            "turn_id": node.turn_id,
            "parent": node.parent.parent.turn_id if node.parent.parent else None,
            "lineage": lineage_name(node, session.trie),
            "rendered_tokens": len(node.parent.ids),
            "sampled_tokens": len(node.ids) + node.dropped,
            "dropped_tokens": node.dropped,
            "resumes": node.parent.resumes,
            "status": node.status.value,
            "masked": reason.value if reason else None,
            "truncated": node.truncated,
            "constraint": node.constraint or None,
            "honoured": node.honoured,
            "calls": [{"id": call.id, "name": call.name} for call in node.calls],
            "versions": [list(span.to_json()[:3]) for span in node.spans],
        }
        for node, reason in verdicts_of(session).items()
    ]


def conversation_of(session: Session, decode: Callable[[Sequence[int]], str]) -> tuple[TranscriptTurn, ...]:
    """Return every sampled turn as text, in the order sampled, including turns that were cut off or dropped."""
    return tuple(
        TranscriptTurn(
            turn_id=node.turn_id,
            parent=node.parent.parent.turn_id if node.parent.parent else "",
            lineage=lineage_name(node, session.trie),
            prompt=decode(node.parent.ids),
            answer=decode(node.ids),
            sampled_tokens=len(node.ids) + node.dropped,
            status=node.status.value,
            masked=reason.value if reason else "",
            versions=tuple(str(version) for version in sorted({span.version for span in node.spans})),
        )
        for node, reason in verdicts_of(session).items()
    )
