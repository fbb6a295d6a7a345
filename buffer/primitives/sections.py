"""Base of configurations, and the merge of documents of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of configurations and of their sections: frozen, unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with another one over it: tables are merged key by key, everything else is replaced."""
    both = dict(below)
    for key, value in above.items():
        known = both.get(key)
        both[key] = overlaid(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both
