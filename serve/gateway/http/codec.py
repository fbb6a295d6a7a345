"""The JSON formats of the admin routes, shared by gateway and client.

Invariants:
- A spec and a report are their dataclasses, which have the limits on each field.
- Input is validated: unknown keys or wrong types raise a BadRequest that names the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from headrace.buffer.trajectories.types import Row
from headrace.serve.gateway.capture.rows import Lineage, Masked, SessionReport, tree_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.errors import BadRequest
from headrace.serve.gateway.exports import json_pieces

FormT = TypeVar("FormT", bound=BaseModel)
_STRICT = ConfigDict(frozen=True, extra="forbid")
_MOST_OF_A_KEY: Final = 200
"""Number of characters of an unknown key that an error message repeats."""


_SPEC: Final = TypeAdapter(SessionSpec)
_REPORT: Final = TypeAdapter(SessionReport)


class FinishForm(BaseModel):
    """Body of `POST /sessions/{id}/finish`."""

    model_config = _STRICT
    tree: bool = False
    packed: bool = False
    """Whether the report is in the format for workers."""
    conversation: bool = False
    """Whether a packed report includes every turn as text."""


def read_spec(body: bytes, default_id: SessionId, most_context: int | None = None) -> SessionSpec:
    """Return the spec in the body of `POST /sessions`, where `max_context_tokens` is a shorthand for the key in
    `budgets`. Where nothing sets the session's context length it is `most_context` (None: our default). Raises a
    BadRequest that names the first invalid key."""
    try:
        # Python's own JSON has NaN and Infinity, which the checks of their fields name.
        document = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise BadRequest(f"body: {error}", None) from None
    if not isinstance(document, dict):
        raise BadRequest("body: not a JSON object", None)
    short = document.pop("max_context_tokens", None)
    if document.get("session_id") is None:
        document["session_id"] = default_id
    if isinstance(document.get("budgets", {}), dict):
        # The context length of the engines is a default.
        given = {"max_context_tokens": most_context} if most_context else {}
        own = {"max_context_tokens": short} if short is not None else {}
        document["budgets"] = given | document.get("budgets", {}) | own
    try:
        return _SPEC.validate_python(document)
    except ValidationError as error:
        raise _refused(error, "budgets." if short is not None else "") from None


def read_form(form: type[FormT], body: bytes) -> FormT:
    """Parse and validate a body. Raises a BadRequest that names the first invalid key."""
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError, prefix: str = "") -> BadRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:_MOST_OF_A_KEY]
    if where == f"{prefix}max_context_tokens":
        where = "max_context_tokens"
    return BadRequest(f"{where or 'body'}: {first['msg']}", where or None)


def write_report(report: SessionReport) -> dict[str, object]:
    """Return the report in the format for workers, with the trajectory as the ledger stores it, in base64."""
    document: dict[str, object] = _REPORT.dump_python(report, mode="json")
    return document


def read_report(document: object) -> SessionReport:
    """Return the report that `write_report` wrote. Raises ValidationError, CodecError."""
    return _REPORT.validate_python(document)


def write_plain_report(report: SessionReport) -> dict[str, object]:
    """Return the report in the format for people and other programs, with plain numbers."""
    rows = report.trajectory.rows if report.trajectory else ()
    return {
        "session_id": report.session_id,
        "rows": [plain_row(row, lineage) for row, lineage in zip(rows, report.lineages, strict=True)],
        **plain_counts(report),
    }


def plain_row(row: Row, lineage: Lineage) -> dict[str, object]:
    """Return a row as plain numbers."""
    return {
        "tokens": row.tokens_T.tolist(),
        "loss_mask": row.loss_mask_T.astype(int).tolist(),
        "logprobs": row.logprobs_T.tolist(),
        "versions": [span.to_json() for span in row.versions],
        "lineage": lineage.name,
        "truncated": lineage.truncated,
    }


def plain_counts(report: SessionReport) -> dict[str, object]:
    """Return the counts of a report, with a number for each reason to mask tokens."""
    return _counts(report) | {"masked": {reason.value: report.masked.get(reason, 0) for reason in Masked}}


def plain_pieces(session: Session, report: SessionReport) -> Iterator[bytes]:
    """Yield the pieces of the JSON of a whole session, with plain numbers: its report, its sampling, and its tree with
    the ids and log-probabilities of every turn, of which `rendered_ids` follow those of the turn's parent."""
    rows = zip(report.trajectory.rows if report.trajectory else (), report.lineages, strict=True)
    tree = (
        entry | {"rendered_ids": list(node.parent.ids), "sampled_ids": list(node.ids), "logprobs": list(node.logprobs)}
        for entry, node in zip(tree_of(session), session.trie.sampled, strict=True)
    )
    head = {"session_id": report.session_id, "sampling": session.spec.sampling} | plain_counts(report)
    return json_pieces.document(
        [
            *((name, json_pieces.value(entry)) for name, entry in head.items()),
            ("rows", json_pieces.array(json_pieces.value(plain_row(row, lineage)) for row, lineage in rows)),
            ("tree", json_pieces.array(map(json_pieces.value, tree))),
        ]
    )


def _counts(report: SessionReport) -> dict[str, object]:
    return {
        "turns": report.turns,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "masked": report.masked,
        "drift": report.drift,
        "rerendered": report.rerendered,
        "replays": report.replays,
        "lost_calls": report.lost_calls,
        "unhonoured": report.unhonoured,
        "exhausted": report.exhausted.value,
        "failures": list(report.failures),
    }
