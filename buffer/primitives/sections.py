"""Bases of configurations and of records in files, and the merge of documents of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of configurations and of their sections: frozen, unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StrictRecord:
    """Base of dataclasses that pydantic reads from users' files: unknown keys and other types are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with another one over it: tables are merged key by key, everything else is replaced."""
    both = dict(below)
    for key, value in above.items():
        known = both.get(key)
        both[key] = overlaid(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both
