"""From the trie to rows: what of a session is trained, what is masked and why, and the lineages.

Invariants:
- A row is the path to a turn that nothing trainable continues: true lineages, no copies of one another.
- Each trained token is trained in one row: that of the longest lineage through it. In the others it is context.
- The version spans of a row cover the sampled positions it owns, and no others: staleness counts what is trained.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.buffer.types import Row, Trajectory, VersionSpan
from headrace.serve.capture.events import Status
from headrace.serve.capture.trie import below, path
from headrace.serve.conversation import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.serve.capture.events import Exhausted
    from headrace.serve.capture.session import Session, SessionId
    from headrace.serve.capture.trie import PromptNode, SampledNode, Trie


class Masked(StrEnum):
    """Why sampled tokens are not trained."""

    ABORTED = "aborted"
    """The turn was cut: agent gone, wall time over, engine failed after partial output."""
    ABANDONED = "abandoned"
    """The agent went on without the turn: dropped as malformed, sampled again, or never delivered."""
    SIDE = "side"
    """A side call (a title, a summary for people), or a model name that is served and not trained."""
    SAMPLING = "sampling"
    """Sampled with temperature 0, top_p or top_k: the engine's log-probabilities are not those of the behaviour
    policy."""
    TRUNCATED = "truncated"
    """Cut by the end of the context, where the session says that such turns are not trained."""


_IN_ROWS = (None, Masked.SAMPLING, Masked.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidTurn:
    """One sampled turn as text: `prompt` is what was new to the engine since the turn `parent` ("" opens a row),
    `answer` what was sampled; both with special tokens as they are spelled. `status`, `masked` (why it is not trained)
    and `lineage` as in the trie; `versions` are the weights that sampled it."""

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
    """What a row is: `name` within its session; `truncated`: the end of the context cut its last turn."""

    name: str
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionReport:
    """What a session leaves. `trajectory` is None when nothing was sampled that stands in a row; `lineages` has one
    entry for each of its rows. `failures` are engine, gateway and network failures that reached the agent: when there
    is one the outcome is infra, whatever is scored. `drift` counts turns by how their echo differed, `lost_calls` call
    markup that gave no call. `rerendered` counts the conversations begun by a full render, after the first.
    `conversation` holds every sampled turn as text, for those who asked for it."""

    session_id: SessionId
    trajectory: Trajectory | None
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
    conversation: tuple[SaidTurn, ...] = ()


def report_of(session: Session) -> SessionReport:
    """What the session leaves."""
    verdicts = verdicts_of(session)
    rows, lineages = _rows(session.trie, verdicts)
    masked = Counter[str]()
    for node, reason in verdicts.items():
        if reason is not None:
            masked[str(reason)] += len(node.ids)
    return SessionReport(
        session_id=session.spec.session_id,
        trajectory=Trajectory(rows=rows, temperature=session.spec.sampling.temperature) if rows else None,
        turns=session.turns,
        sampled_tokens=session.sampled_tokens,
        trained_tokens=sum(int(row.loss_mask_T.sum()) for row in rows),
        masked={reason: tokens for reason, tokens in masked.items() if tokens},
        rerendered=max(0, len(session.trie.roots) - 1),
        exhausted=session.exhausted,
        failures=tuple(session.failures),
        lineages=lineages,
        drift={str(kind): number for kind, number in session.drift.items() if kind},
        lost_calls=session.lost_calls,
    )


def verdicts_of(session: Session) -> dict[SampledNode, Masked | None]:
    """For every sampled turn, in the order sampled, why it is masked; None: it is trained."""
    side = _side_turns(session.trie)
    verdicts: dict[SampledNode, Masked | None] = {}
    for node in session.trie.sampled:
        if node.status is Status.ABORTED:
            verdicts[node] = Masked.ABORTED
        elif node in side or node.parent.origin.untrained:
            verdicts[node] = Masked.SIDE
        elif is_abandoned(node, session.trie):
            verdicts[node] = Masked.ABANDONED
        elif not session.spec.sampling.exact:
            verdicts[node] = Masked.SAMPLING
        else:
            verdicts[node] = Masked.TRUNCATED if node.truncated and not session.spec.train_truncated else None
    return verdicts


def _side_turns(trie: Trie) -> set[SampledNode]:
    """Turns of conversations without tools, in a session whose agents have tools, that neither summarise nor continue
    one of ours."""
    if not any(root.origin.has_tools for root in trie.roots):
        return set()
    return {node for root in trie.roots if not root.origin.is_ours for node in below(root)}


def is_abandoned(node: SampledNode, trie: Trie) -> bool:
    """Whether the agent went on from before this turn, without it."""
    if node.status is Status.FINISHED:
        return True
    if node.status is Status.ACCEPTED or node.children or not _goes_on(node.parent):
        return False
    prompt = node.parent
    if any(sibling.number > node.number and sibling.status is not Status.ABORTED for sibling in prompt.children):
        return True
    if prompt.parent is not None:
        return any(_goes_on(other) and other.number > node.number for other in prompt.parent.children)
    return any(_goes_on(other) and other.number > node.number and _continues(prompt, other) for other in trie.roots)


def _goes_on(prompt: PromptNode) -> bool:
    """A summary of the history is asked for beside the agent's way, and never echoed; so is what is not trained."""
    return prompt.origin.purpose is not Purpose.COMPACTION and not prompt.origin.untrained


def _continues(prompt: PromptNode, other: PromptNode) -> bool:
    """Whether a later root is the same conversation without its first answer: only messages were appended."""
    return other.parts[: len(prompt.parts)] == prompt.parts


def _rows(trie: Trie, verdicts: dict[SampledNode, Masked | None]) -> tuple[tuple[Row, ...], tuple[Lineage, ...]]:
    """A row for every kept turn that no kept turn continues; the longest owns what several share."""
    kept = {node for node, reason in verdicts.items() if reason in _IN_ROWS}
    inner = {sampled for node in kept for _, sampled in path(node)[:-1]}
    leaves = [node for node in verdicts if node in kept and node not in inner]
    owned: set[SampledNode] = set()
    rows: dict[SampledNode, Row] = {}
    for leaf in sorted(leaves, key=lambda node: -node.length):
        mine = {sampled for _, sampled in path(leaf)} & kept - owned
        rows[leaf] = _row(leaf, mine, {node for node in mine if verdicts[node] is None})
        owned |= mine
    lineages = tuple(Lineage(name=_name(leaf, trie), truncated=leaf.truncated) for leaf in leaves)
    return tuple(rows[leaf] for leaf in leaves), lineages


def _row(leaf: SampledNode, mine: set[SampledNode], trained: set[SampledNode]) -> Row:
    """The path to `leaf`, with log-probabilities and spans of the turns it owns, and the mask of those trained."""
    ids = array("i")
    mask, logprobs = np.zeros(leaf.length, dtype=np.bool_), np.zeros(leaf.length, dtype=np.float32)
    spans: list[VersionSpan] = []
    for prompt, sampled in path(leaf):
        ids.extend(prompt.ids)
        start = len(ids)
        ids.extend(sampled.ids)
        if sampled in mine:
            mask[start : len(ids)] = sampled in trained
            logprobs[start : len(ids)] = sampled.logprobs
            spans += [
                VersionSpan(
                    start=start + span.start, end=start + span.end, version=span.version, stale_kv=span.stale_kv
                )
                for span in sampled.spans
            ]
    return Row(tokens_T=np.array(ids, dtype=np.int32), loss_mask_T=mask, logprobs_T=logprobs, versions=tuple(spans))


def _name(leaf: SampledNode, trie: Trie) -> str:
    """`0` for the first conversation; `2.compaction`, `1.agent-7`: what it is for, where the wire told."""
    root, asked = path(leaf)[0][0], leaf.parent.origin
    purpose = asked.purpose.value if asked.purpose is not Purpose.TURN else ""
    return ".".join(part for part in (str(trie.roots.index(root)), asked.agent, purpose) if part)


def tree_of(session: Session) -> list[dict[str, object]]:
    """The trie as JSON, node by node: what every turn was, how long, what became of it."""
    verdicts = verdicts_of(session)
    return [_describe(node, verdicts[node], session.trie) for node in session.trie.sampled]


def conversation_of(session: Session, decode: Callable[[Sequence[int]], str]) -> tuple[SaidTurn, ...]:
    """Every sampled turn as text, in the order sampled, those that were cut or dropped too."""
    return tuple(
        SaidTurn(
            turn_id=node.turn_id,
            parent=node.parent.parent.turn_id if node.parent.parent else "",
            lineage=_name(node, session.trie),
            prompt=decode(node.parent.ids),
            answer=decode(node.ids),
            sampled_tokens=len(node.ids),
            status=node.status.value,
            masked=reason.value if reason else "",
            versions=tuple(str(version) for version in sorted({span.version for span in node.spans})),
        )
        for node, reason in verdicts_of(session).items()
    )


def _describe(node: SampledNode, reason: Masked | None, trie: Trie) -> dict[str, object]:
    prompt = node.parent
    return {
        "turn_id": node.turn_id,
        "parent": prompt.parent.turn_id if prompt.parent else None,
        "lineage": _name(node, trie),
        "rendered_tokens": len(prompt.ids),
        "sampled_tokens": len(node.ids),
        "status": node.status.value,
        "masked": reason.value if reason else None,
        "truncated": node.truncated,
        "calls": [{"id": call.id, "name": call.name} for call in node.calls],
        "versions": [[span.start, span.end, str(span.version)] for span in node.spans],
    }
