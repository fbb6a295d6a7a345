"""Pages of sandboxes: filters, order and tokens of the list routes. Pure."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote

from headrace.serve.e2b_sandboxes.errors import ApiError
from headrace.serve.e2b_sandboxes.table import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.serve.e2b_sandboxes.table import Row

MAX_LIMIT: Final = 100
SHOWN: Final = frozenset({State.RUNNING, State.PAUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a client wants to see. `after` is the (started_at, id) of the last row of the page before."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[State] = SHOWN
    template: str = ""
    started_after: float = 0.0
    limit: int = MAX_LIMIT
    ascending: bool = False
    after: tuple[float, str] | None = None


def parse_query(parameters: Mapping[str, str]) -> Query:
    """Raises ApiError 400."""
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: {order[:20]!r} is neither asc nor desc")
    return Query(
        metadata=_metadata(parameters.get("metadata", "")),
        states=_states(parameters.get("state", "")),
        template=parameters.get("template", ""),
        started_after=_time(parameters.get("startedAfter", "")),
        limit=_limit(parameters.get("limit", "")),
        ascending=order == "asc",
        after=_token(parameters.get("nextToken", "")),
    )


def _metadata(text: str) -> dict[str, str]:
    """`key=value&...`, names and values quoted once more by the SDKs."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError as error:
        raise ApiError(400, f"metadata: {error}") from error
    return {unquote(key): unquote(value) for key, value in pairs}


def _states(text: str) -> frozenset[State]:
    names = [name for name in text.split(",") if name]
    wrong = [name for name in names if name not in {state.value for state in SHOWN}]
    if wrong:
        raise ApiError(400, f"state: {wrong[0][:20]!r} is neither running nor paused")
    return frozenset(State(name) for name in names) or SHOWN


def _limit(text: str) -> int:
    if not text:
        return MAX_LIMIT
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise ApiError(400, f"limit: {text[:20]!r} is not a number from 1 to {MAX_LIMIT}")
    return int(text)


def _time(text: str) -> float:
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ApiError(400, f"startedAfter: {text[:40]!r} is not a time") from error


def _token(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    try:
        started, _, sandbox_id = base64.urlsafe_b64decode(text.encode()).decode().partition("_")
        return float.fromhex(started), sandbox_id
    except (ValueError, binascii.Error, OverflowError) as error:
        raise ApiError(400, "nextToken: not a token of this server") from error


def page(rows: Iterable[Row], query: Query) -> tuple[list[Row], str]:
    """The rows of this page and the token of the next, "" at the end."""

    def wanted(row: Row) -> bool:
        return (
            row.state in query.states
            and (not query.template or row.template == query.template)
            and row.started_at >= query.started_after
            and query.metadata.items() <= row.metadata.items()
        )

    found = sorted(filter(wanted, rows), key=_place, reverse=not query.ascending)
    if query.after is not None:
        after = query.after
        found = [row for row in found if (_place(row) > after if query.ascending else _place(row) < after)]
    here = found[: query.limit]
    return here, encode_token(here[-1]) if len(found) > query.limit else ""


def encode_token(row: Row) -> str:
    return base64.urlsafe_b64encode(f"{row.started_at.hex()}_{row.id}".encode()).decode()


def _place(row: Row) -> tuple[float, str]:
    return row.started_at, row.id
