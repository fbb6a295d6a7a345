"""The JSON formats of the admin routes, shared by gateway and client.

Invariants:
- Arrays are encoded as base64 of their little-endian bytes: int32 ids, float32 log-probabilities, packed mask bits
  (numpy `packbits`).
- Input is validated: unknown keys or wrong types raise a BadRequest that names the key.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Final, TypeVar

import numpy as np
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from headrace.buffer.trajectories.token_kinds import KindRuns, from_runs, to_runs
from headrace.buffer.trajectories.types import Row, Trajectory, VersionSpan
from headrace.serve.gateway.capture.events import Exhausted
from headrace.serve.gateway.capture.rows import Lineage, Masked, SessionReport, TranscriptTurn, tree_of
from headrace.serve.gateway.capture.session import (
    FINAL_TEXT,
    Budgets,
    Sampling,
    Session,
    SessionId,
    SessionSpec,
    TrainedPart,
    with_main,
)
from headrace.serve.gateway.capture.session_usage import SessionUsage
from headrace.serve.gateway.errors import BadRequest
from headrace.serve.gateway.exports import json_pieces

_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/-]+$")]
FormT = TypeVar("FormT", bound=BaseModel)
_STRICT = ConfigDict(frozen=True, extra="forbid")
_MOST: Final = 2**31 - 1
"""Largest position or id, since both are int32."""
_MOST_OF_A_KEY: Final = 200
"""Number of characters of an unknown key that an error message repeats."""


class SamplingForm(BaseModel):
    """JSON form of `Sampling`."""

    model_config = _STRICT
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=_MOST)


class BudgetsForm(BaseModel):
    """JSON form of `Budgets`."""

    model_config = _STRICT
    max_turns: int = Field(default=64, ge=1, le=_MOST)
    max_tokens_per_turn: int = Field(default=4096, ge=1, le=_MOST)
    max_context_tokens: int = Field(default=32768, ge=1, le=_MOST)
    max_sampled_tokens: int | None = Field(default=None, ge=1, le=_MOST)
    wall_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    final_text: str = Field(default=FINAL_TEXT, max_length=4096)

    def to_budgets(self, most_context: int | None, context: int | None = None) -> Budgets:
        """Return the budgets. If neither `context` nor the form sets the session's context length, it is `most_context`
        (None: our default)."""
        fields = self.model_dump()
        given = fields["max_context_tokens"] if "max_context_tokens" in self.model_fields_set else None
        default = most_context or fields["max_context_tokens"]
        return Budgets(**fields | {"max_context_tokens": context or given or default})


class _SettingsForm(BaseModel):
    """What every session can be opened with."""

    model_config = _STRICT
    sampling: SamplingForm = SamplingForm()
    budgets: BudgetsForm = BudgetsForm()
    traceparent: str = Field(default="", max_length=64)
    train_truncated: bool = True
    train_cut: bool = False
    train: Annotated[tuple[TrainedPart, ...], AfterValidator(with_main)] = (TrainedPart.MAIN,)
    marks_warnings: bool = False
    serve_unhonoured: bool = False

    def spec_of(self, session_id: str, budgets: Budgets, *, rollout: str = "", attempt: int = 0) -> SessionSpec:
        """Return the spec of a session with these settings."""
        return SessionSpec(
            session_id=SessionId(session_id),
            sampling=Sampling(**self.sampling.model_dump()),
            budgets=budgets,
            traceparent=self.traceparent,
            train_truncated=self.train_truncated,
            train_cut=self.train_cut,
            train=self.train,
            marks_warnings=self.marks_warnings,
            serve_unhonoured=self.serve_unhonoured,
            rollout=rollout,
            attempt=attempt,
        )


class SpecForm(_SettingsForm):
    """JSON form of `SessionSpec`."""

    session_id: _Name
    rollout: str = Field(default="", max_length=256)
    attempt: int = Field(default=0, ge=0, le=_MOST)

    def to_spec(self, most_context: int | None = None) -> SessionSpec:
        """Return the spec; `most_context` is the context length of the engines, if known."""
        budgets = self.budgets.to_budgets(most_context)
        return self.spec_of(self.session_id, budgets, rollout=self.rollout, attempt=self.attempt)


class OpenOneForm(_SettingsForm):
    """Body of `POST /sessions` for one session; `max_context_tokens` is a shorthand for the key in `budgets`."""

    session_id: _Name | None = None
    max_context_tokens: int | None = Field(default=None, ge=1, le=_MOST)

    def to_spec(self, default_id: SessionId, most_context: int | None = None) -> SessionSpec:
        """Return the spec; `most_context` is the context length of the engines, if known."""
        budgets = self.budgets.to_budgets(most_context, self.max_context_tokens)
        return self.spec_of(self.session_id or default_id, budgets)


class OpenForm(BaseModel):
    """Body of `POST /sessions` for many sessions."""

    model_config = _STRICT
    sessions: list[SpecForm] = Field(min_length=1, max_length=4096)


class FinishForm(BaseModel):
    """Body of `POST /sessions/finish`."""

    model_config = _STRICT
    session_ids: list[_Name] = Field(min_length=1, max_length=4096)
    conversation: bool = False


class FinishOneForm(BaseModel):
    """Body of `POST /sessions/{id}/finish`."""

    model_config = _STRICT
    tree: bool = False


def opens_many(body: bytes) -> bool:
    """Return whether a `POST /sessions` body is an OpenForm."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(document, dict) and "sessions" in document


def read_form(form: type[FormT], body: bytes) -> FormT:
    """Parse and validate a body. Raises a BadRequest that names the first invalid key."""
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:_MOST_OF_A_KEY]
        raise BadRequest(f"{where or 'body'}: {first['msg']}", where or None) from None


def open_body(specs: Sequence[SessionSpec]) -> dict[str, object]:
    return {"sessions": [asdict(spec) for spec in specs]}


def write_report(report: SessionReport) -> dict[str, object]:
    """Return the report in the format for workers, with arrays in base64."""
    trajectory = report.trajectory
    return {
        "session_id": report.session_id,
        "temperature": trajectory.temperature if trajectory else None,
        "rows": [
            {
                "tokens": _encode(row.tokens_T.astype("<i4").tobytes()),
                "loss_mask": _encode(np.packbits(row.loss_mask_T).tobytes()),
                "logprobs": _encode(row.logprobs_T.astype("<f4").tobytes()),
                "versions": [span.to_json() for span in row.versions],
                "kinds": None if row.kinds_T is None else to_runs(row.kinds_T),
            }
            for row in (trajectory.rows if trajectory else ())
        ],
        "lineages": [asdict(lineage) for lineage in report.lineages],
        "conversation": [turn.to_json() for turn in report.conversation],
        "usage": asdict(report.usage),
        **_counts(report),
    }


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


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class RowForm(BaseModel):
    """Form of a row in the result of `write_report`."""

    model_config = _STRICT
    tokens: str
    loss_mask: str
    logprobs: str
    versions: list[tuple[int, int, str, bool]]
    kinds: KindRuns | None = None

    def to_row(self) -> Row:
        tokens = np.frombuffer(base64.b64decode(self.tokens), dtype="<i4").astype(np.int32)
        bits = np.frombuffer(base64.b64decode(self.loss_mask), dtype=np.uint8)
        return Row(
            tokens_T=tokens,
            loss_mask_T=np.unpackbits(bits, count=len(tokens)).astype(np.bool_),
            logprobs_T=np.frombuffer(base64.b64decode(self.logprobs), dtype="<f4").astype(np.float32),
            versions=tuple(VersionSpan.from_json(*span) for span in self.versions),
            kinds_T=None if self.kinds is None else from_runs(self.kinds),
        )


class ReportForm(BaseModel):
    """Form of the result of `write_report`."""

    model_config = _STRICT
    session_id: str
    temperature: float | None
    rows: list[RowForm]
    lineages: list[Lineage]
    conversation: list[TranscriptTurn] = []
    usage: SessionUsage = SessionUsage()
    turns: int
    sampled_tokens: int
    trained_tokens: int
    masked: dict[str, int]
    drift: dict[str, int]
    rerendered: int
    replays: int = 0
    lost_calls: int
    unhonoured: dict[str, int] = {}
    exhausted: Exhausted
    failures: list[str]

    def to_report(self) -> SessionReport:
        rows = tuple(row.to_row() for row in self.rows)
        return SessionReport(
            session_id=SessionId(self.session_id),
            trajectory=None if self.temperature is None else Trajectory(rows=rows, temperature=self.temperature),
            turns=self.turns,
            sampled_tokens=self.sampled_tokens,
            trained_tokens=self.trained_tokens,
            masked=self.masked,
            rerendered=self.rerendered,
            replays=self.replays,
            exhausted=self.exhausted,
            failures=tuple(self.failures),
            lineages=tuple(self.lineages),
            drift=self.drift,
            lost_calls=self.lost_calls,
            unhonoured=self.unhonoured,
            conversation=tuple(self.conversation),
            usage=self.usage,
        )
