"""The alarm for a collapse: a family or a source of tasks whose answers are mostly invalid, or whose groups all fail.

Equal rewards give no gradient, so that nothing pulls the policy back: the rest of the run teaches it nothing about
these tasks (docs/objectives.md). Only steps whose batch has the family or source count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

STEPS: Final = 3
"""Number of last steps that are looked at."""
INVALID_SHARE: Final = 0.5
"""Share of invalid answers above which the alarm is raised."""
_COUNTS: Final = ("rollouts", "invalid", "groups", "flat_groups")
ADVICE: Final = (
    "equal failures have no gradient that would pull the policy back; continue from an earlier checkpoint with a lower "
    'learner.learning_rate, or with learner.warmup_steps, learner.entropy_coef or learner.loss_weight "constant"; '
    "tasks that were never solved need easier ones beside them, graded rewards or a better start policy"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Collapse of a family or source. `until` is the first step without it, None while it lasts."""

    name: str
    since: int
    reason: str
    until: int | None = None

    def line(self) -> str:
        """Return the collapse as one line."""
        end = "" if self.until is None else f" until step {self.until}"
        return f"{self.name} collapsed at step {self.since}{end}: {self.reason}"


@dataclass(slots=True)
class CollapseWatch:
    """Watch over the steps of a run, in order. `lasting` are the collapses that last, `ended` the others."""

    lasting: dict[str, Collapse] = field(default_factory=dict)
    ended: list[Collapse] = field(default_factory=list)
    _seen: dict[str, deque[Mapping[str, Any]]] = field(default_factory=dict)

    def see(self, step: int, parts: Mapping[str, Mapping[str, Any]]) -> list[Collapse]:
        """Take in the parts of a step's batch, by family or source (`metrics.BatchPart`), and return what collapsed."""
        new = []
        for name, part in parts.items():
            seen = self._seen.setdefault(name, deque(maxlen=STEPS))
            seen.append(part)
            invalid = sum(each["invalid"] for each in seen) / max(1, sum(each["rollouts"] for each in seen))
            reason = ""
            if len(seen) == STEPS and invalid > INVALID_SHARE:
                reason = f"{invalid:.0%} of the answers in its last {STEPS} steps are invalid"
            elif len(seen) == STEPS and all(each["flat_groups"] == each["groups"] for each in seen):
                reason = f"all groups of its last {STEPS} steps have equal rewards of at most 0"
            if reason and name not in self.lasting:
                self.lasting[name] = Collapse(name=name, since=step, reason=reason)
                new.append(self.lasting[name])
            elif not reason and name in self.lasting:
                over = self.lasting.pop(name)
                self.ended.append(Collapse(name=name, since=over.since, reason=over.reason, until=step))
        return new

    def lines(self) -> tuple[str, ...]:
        """Return the collapses that last, one line each."""
        return tuple(found.line() for found in self.lasting.values())


def collapses(steps: Iterable[Mapping[str, Any]]) -> tuple[Collapse, ...]:
    """Return the collapses of a run in order, from its records of steps. Parts that are not whole are left out."""
    watch = CollapseWatch()
    for record in steps:
        step, tables = record.get("step"), [record.get(name) for name in ("families", "sources")]
        if isinstance(step, int):
            parts = {name: part for table in tables if isinstance(table, dict) for name, part in table.items()}
            whole = {
                name: part
                for name, part in parts.items()
                if isinstance(part, dict) and all(isinstance(part.get(key), int) for key in _COUNTS)
            }
            watch.see(step, whole)
    return tuple(sorted((*watch.ended, *watch.lasting.values()), key=lambda found: (found.since, found.name)))
