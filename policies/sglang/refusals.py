"""Maps SGLang's refusals to errors by route and text, which are the same in all supported versions."""

from __future__ import annotations

from typing import Final

from headrace.policies.errors import (
    EngineRefused,
    FlushRefused,
    NoSession,
    SessionAlreadyOpen,
    UnknownGroup,
    WeightsMixed,
)

_TEXTS: Final[tuple[tuple[str, str, type[EngineRefused]], ...]] = (
    ("", "partially updated", WeightsMixed),
    ("", "Weights were updated, but", WeightsMixed),
    ("/begin_weight_update", "already open", SessionAlreadyOpen),
    ("/end_weight_update", "session is open", NoSession),
    ("/update_weights_from_", "must run between", NoSession),
    ("/update_weights_from_", "session is open", NoSession),
    ("/update_weights_from_distributed", "not in [", UnknownGroup),
    ("/update_weights_from_distributed", "does not exist", UnknownGroup),
    ("/destroy_weights_update_group", "does not exist", UnknownGroup),
    ("/flush_cache", "", FlushRefused),
)
"""Prefix of the route, part of the text, and error; the first match counts."""


def refusal(status: int, path: str, text: str, engine: str) -> EngineRefused:
    """Return the error for a 4xx reply."""
    kinds = (kind for route, part, kind in _TEXTS if path.startswith(route) and part in text)
    return next(kinds, EngineRefused)(status, f"{engine}: {path}: {text}")
