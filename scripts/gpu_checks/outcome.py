"""Outcome of one check, and its entry in the report.

Invariants:
- A check passes when it ended, and every bounded figure is within its bounds. Nothing else decides.
- What a device cannot show stands in `not_run` with the reason, whether it is a part of a check or all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Figure: TypeAlias = "int | float | str"
Bounds: TypeAlias = "tuple[float | None, float | None]"
"""Smallest and largest value allowed; None leaves that side open."""


class State(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check that ended has measured. The names say the units; those in `bounds` are names of `measured`."""

    measured: Mapping[str, Figure] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    not_run: str = ""
    """Part of the check that this device cannot show, and why."""
    remedy: str = ""
    """What would mend a figure that is out of bounds."""

    def misses(self) -> list[str]:
        """Return a sentence for each figure that is out of bounds."""
        found = []
        for name, (low, high) in self.bounds.items():
            value = self.measured[name]
            assert not isinstance(value, str), name
            # A figure that is not a number is within no bounds.
            if not ((low is None or value >= low) and (high is None or value <= high)):
                allowed = " and ".join(
                    f"{word} {bound:g}" for word, bound in (("at least", low), ("at most", high)) if bound is not None
                )
                found.append(f"{name} is {value:g}, and should be {allowed}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry of the report. `reason` says why a check failed or was not run; `log` is the end of a failed check's own
    output."""

    state: State
    shows: str
    measured: Mapping[str, Figure] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    reason: str = ""
    not_run: str = ""
    seconds: float = 0.0
    log: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcome: Outcome, *, shows: str, seconds: float) -> Entry:
        """Judge the outcome of a check."""
        misses = outcome.misses()
        return cls(
            state=State.FAILED if misses else State.PASSED,
            shows=shows,
            measured=outcome.measured,
            bounds=outcome.bounds,
            reason="; ".join([*misses, outcome.remedy] if misses and outcome.remedy else misses),
            not_run=outcome.not_run,
            seconds=round(seconds, 2),
        )
