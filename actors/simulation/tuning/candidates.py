"""The tuner's candidate settings: acceptance rules, bounds, slots and over-issue around the recorded values.

Invariants:
- The buffer accepts every candidate: rules that can never be met, or that are always met, are left out.
- Times in rules come from the fitted durations, rounded to two significant digits for readability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.errors import ConfigError
from headrace.actors.simulation.tuning.duration_fit import Fit

if TYPE_CHECKING:
    from headrace.actors.simulation.virtual.plan import SimulationPlan

CARRY: Final = "carry"
ABORT: Final = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One setting. Groups start `over_issue` more rollouts than `group_size`, and the last ones still running are
    aborted."""

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
        """Return the setting as text, e.g. `fraction(0.75) abort, bound 4, 64 slots`."""
        parts = [self.rule + (" abort" if self.unfinished == ABORT else "")]
        if self.over_issue:
            parts.append(f"{self.over_issue} more issued")
        return ", ".join([*parts, f"bound {self.max_staleness}", f"{self.slots} slots"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values to try; those left empty are derived from the recording."""

    slots: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    rules: tuple[str, ...] = ()


def recorded_candidate(base: SimulationPlan) -> Candidate:
    """Return the setting of the recording."""
    return Candidate(
        rule=base.rule,
        unfinished=base.buffer.get("unfinished", CARRY),
        max_staleness=base.max_staleness,
        slots=base.slots,
    )


def candidates(base: SimulationPlan, fit: Fit, space: Space, sandboxes: int | None = None) -> tuple[Candidate, ...]:
    """Return all candidates that can be simulated, the recorded one first. Raises ConfigError for an impossible rule,
    bound or number of slots in `space`."""
    # Half, the same and, if the sandboxes have room, twice the recorded slots.
    most = base.slots if sandboxes is None else max(base.slots, min(2 * base.slots, sandboxes))
    slots = space.slots or tuple(sorted({max(1, base.slots // 2), base.slots, most}))
    bound = max(1, base.max_staleness)
    bounds = space.bounds or tuple(sorted({max(1, bound // 2), bound, 2 * bound}))
    rules = [(rule, unfinished, 0) for rule in space.rules for unfinished in (CARRY, ABORT)]
    asked = [
        Candidate(rule=rule, unfinished=unfinished, max_staleness=bound, slots=places, over_issue=more)
        for (rule, unfinished, more), bound, places in product(rules or _rules(base.group_size, fit), bounds, slots)
        if rule != "all" or unfinished == CARRY
    ]
    recorded = recorded_candidate(base)
    recorded.plan(base, steps=1).buffer_config()
    found = [recorded]
    for candidate in dict.fromkeys(asked):
        try:
            candidate.plan(base, steps=1).buffer_config()
        except ConfigError:
            # Only rules of the user must be possible, not those of the tuner.
            if space.rules:
                raise
            continue
        if candidate != recorded:
            found.append(candidate)
    return tuple(found)


def _rules(group_size: int, fit: Fit) -> list[tuple[str, str, int]]:
    """Return rules to try, as (rule, handling of unfinished rollouts, over-issue)."""
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
    """Round to two significant digits, without an exponent."""
    return f"{float(f'{max(seconds, 0.01):.2g}'):.12g}"


def describe(sequence: Sequence[Candidate]) -> str:
    """Return a summary, e.g. `63 settings: 10 rules, bounds 2 4 8, slots 32 64`."""
    rules = {(candidate.rule, candidate.unfinished, candidate.over_issue) for candidate in sequence}
    bounds = sorted({candidate.max_staleness for candidate in sequence})
    slots = sorted({candidate.slots for candidate in sequence})
    return (
        f"{len(sequence)} settings: {len(rules)} rules, bounds {' '.join(map(str, bounds))}, "
        f"slots {' '.join(map(str, slots))}"
    )
