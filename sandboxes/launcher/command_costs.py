"""Processor time of commands by what they were for. Only the launcher writes it."""

from __future__ import annotations

from typing import Final

_MAX_NAMES: Final = 64
"""Clients choose the purposes: what comes after so many names counts as `other`."""


class Costs:
    """Commands that ended and their CPU seconds, user and system, with all children that they waited for."""

    def __init__(self) -> None:
        self._ended: dict[str, tuple[int, float]] = {}

    def add(self, purpose: str, operation: str, cpu_s: float) -> None:
        """`purpose` is the sandbox's label of that name, `operation` what the launcher was asked for."""
        name = f"{purpose or 'other'}.{operation}"
        if name not in self._ended and len(self._ended) >= _MAX_NAMES:
            name = "other"
        count, seconds = self._ended.get(name, (0, 0.0))
        self._ended[name] = count + 1, seconds + cpu_s

    def to_json(self) -> dict[str, tuple[int, float]]:
        """`purpose.operation` -> (commands, CPU seconds), since the launcher's start."""
        return dict(self._ended)
