"""Timestamps of the API. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_FIRST_S: Final = -62_135_596_800.0
"""0001-01-01T00:00:00Z"""
_LAST_S: Final = 253_402_300_799.0
"""9999-12-31T23:59:59Z"""


def timestamp(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC, for the API and the protobuf JSON mapping. A time outside of its years, as
    files may have, is replaced by the nearest one."""
    within = min(max(seconds, _FIRST_S), _LAST_S)
    return datetime.fromtimestamp(within, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
