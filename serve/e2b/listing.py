"""Filters, order and page tokens of the routes that list sandboxes. Pure."""

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
    """Parameters of a list request. `after` is the (started_at, id) of the last row of the previous page."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[State] = SHOWN
    template: str = ""
    started_after: float = 0.0
    limit: int = MAX_LIMIT
    ascending: bool = False
    after: tuple[float, str] | None = None


def parse_query(parameters: Mapping[str, str]) -> Query:
    """Parse the parameters of a list request. Raises ApiError 400."""
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: {order[:20]!r} is neither asc nor desc")
    try:
        metadata = parameters.get("metadata", "")
        pairs = parse_qsl(metadata, keep_blank_values=True, strict_parsing=bool(metadata))
    except ValueError as error:
        raise ApiError(400, f"metadata: {error}") from error
    states = [name for name in parameters.get("state", "").split(",") if name]
    if wrong := [name for name in states if name not in {state.value for state in SHOWN}]:
        raise ApiError(400, f"state: {wrong[0][:20]!r} is neither running nor paused")
    started_after = parameters.get("startedAfter", "")
    try:
        started_after_s = datetime.fromisoformat(started_after).timestamp() if started_after else 0.0
    except ValueError as error:
        raise ApiError(400, f"startedAfter: {started_after[:40]!r} is not a time") from error
    limit = parameters.get("limit", "") or str(MAX_LIMIT)
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise ApiError(400, f"limit: {limit[:20]!r} is not a number from 1 to {MAX_LIMIT}")
    return Query(
        # The SDKs quote names and values once more.
        metadata={unquote(key): unquote(value) for key, value in pairs},
        states=frozenset(State(name) for name in states) or SHOWN,
        template=parameters.get("template", ""),
        started_after=started_after_s,
        limit=int(limit),
        ascending=order == "asc",
        after=_token(parameters.get("nextToken", "")),
    )


def _token(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    try:
        started, _, sandbox_id = base64.urlsafe_b64decode(text.encode()).decode().partition("_")
        return float.fromhex(started), sandbox_id
    except (ValueError, binascii.Error, OverflowError) as error:
        raise ApiError(400, "nextToken: not a token of this server") from error


def page(rows: Iterable[Row], query: Query) -> tuple[list[Row], str]:
    """Return the rows of a page and the token of the next one, which is "" for the last page."""

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
