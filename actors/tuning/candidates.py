"""What the tuner tries: acceptance rules, bounds, slots and over-issue around what was recorded.

Invariants:
- Every candidate is one that the buffer accepts: rules that can never be met, or always are, are left out.
- Times in rules come from the fitted durations, rounded to two digits: nobody pastes 61.2374 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace.actors.simulation.plan import SimulationPlan
    from headrace.actors.tuning.duration_fit import Fit

CARRY: Final = "carry"
ABORT: Final = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One setting. `over_issue` members more than `group_size` are started, and the last ones to run are aborted."""

    rule: str
    unfinished: str
    max_staleness: int
    slots: int
    over_issue: int = 0

    def plan(self, base: SimulationPlan, *, steps: int) -> SimulationPlan:
        changes: dict[str, Any] = {
            "rule": self.rule,
            "max_staleness": self.max_staleness,
            "slots": self.slots,
            "group_size": base.group_size + self.over_issue,
            "buffer": base.buffer | {"unfinished": self.unfinished},
            "steps": steps,
        }
        return base.model_copy(update=changes)

    def label(self) -> str:
        """For a person: `fraction(0.75) abort, bound 4, 64 slots`."""
        parts = [self.rule + (" abort" if self.unfinished == ABORT else "")]
        if self.over_issue:
            parts.append(f"{self.over_issue} more issued")
        return ", ".join([*parts, f"bound {self.max_staleness}", f"{self.slots} slots"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values to try; empty ones follow from the record."""

    slots: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    rules: tuple[str, ...] = ()


def recorded_candidate(base: SimulationPlan) -> Candidate:
    """What the record was made with."""
    return Candidate(
        rule=base.rule,
        unfinished=base.buffer.get("unfinished", CARRY),
        max_staleness=base.max_staleness,
        slots=base.slots,
    )


def candidates(base: SimulationPlan, fit: Fit, space: Space, sandboxes: int | None = None) -> tuple[Candidate, ...]:
    """All that can be simulated, the recorded one first. Raises ConfigError for a rule, bound or number of slots that
    was asked for and cannot work."""
    slots = space.slots or _slots(base.slots, sandboxes)
    bounds = space.bounds or _bounds(base.max_staleness)
    rules = [(rule, unfinished, 0) for rule in space.rules for unfinished in (CARRY, ABORT)]
    asked = [
        Candidate(rule=rule, unfinished=unfinished, max_staleness=bound, slots=places, over_issue=more)
        for (rule, unfinished, more), bound, places in product(rules or _rules(base.group_size, fit), bounds, slots)
        if rule != "all" or unfinished == CARRY
    ]
    recorded = recorded_candidate(base)
    recorded.plan(base, steps=1).buffer_config()
    return (recorded, *_possible(asked, base, recorded, strict=bool(space.rules)))


def _possible(
    asked: Iterable[Candidate], base: SimulationPlan, recorded: Candidate, *, strict: bool
) -> Iterator[Candidate]:
    for candidate in dict.fromkeys(asked):
        try:
            candidate.plan(base, steps=1).buffer_config()
        except ConfigError:
            if strict:
                raise
            continue
        if candidate != recorded:
            yield candidate


def _slots(recorded: int, sandboxes: int | None) -> tuple[int, ...]:
    """Half as many, as many and, where the sandboxes have room, twice as many."""
    most = recorded if sandboxes is None else max(recorded, min(2 * recorded, sandboxes))
    return tuple(sorted({max(1, recorded // 2), recorded, most}))


def _bounds(recorded: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, recorded // 2), max(1, recorded), 2 * max(1, recorded)}))


def _rules(group_size: int, fit: Fit) -> list[tuple[str, str, int]]:
    """(rule, what becomes of the unfinished, over-issue)"""
    slow_s, slowest_s = _round(fit.quantile_s(0.75)), _round(fit.quantile_s(0.95))
    grace_s = _round(fit.quantile_s(0.9) - fit.quantile_s(0.5))
    carried = [
        "all",
        "fraction(0.75)",
        "fraction(0.5)",
        f"fraction(0.75) & grace({grace_s})",
        f"all | deadline({slowest_s})",
        "all | expiring(1)",
    ]
    aborted = ["fraction(0.75)", f"count({group_size - 1})", f"all | deadline({slowest_s})"]
    aborted += [f"fraction(0.5) & deadline({slow_s})"]
    more = max(1, group_size // 4)
    return [
        *((rule, CARRY, 0) for rule in carried),
        *((rule, ABORT, 0) for rule in aborted),
        (f"count({group_size})", ABORT, more),
    ]


def _round(seconds: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{max(seconds, 0.01):.2g}'):.12g}"


def describe(sequence: Sequence[Candidate]) -> str:
    """`63 settings: 10 rules, bounds 2 4 8, slots 32 64`."""
    rules = {(candidate.rule, candidate.unfinished, candidate.over_issue) for candidate in sequence}
    bounds = sorted({candidate.max_staleness for candidate in sequence})
    slots = sorted({candidate.slots for candidate in sequence})
    return (
        f"{len(sequence)} settings: {len(rules)} rules, bounds {' '.join(map(str, bounds))}, "
        f"slots {' '.join(map(str, slots))}"
    )
