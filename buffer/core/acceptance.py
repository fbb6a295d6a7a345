"""Acceptance rules, which decide when a group is sealed, joined with `|` and `&`.

Invariants:
- A rule maps a `GroupView` to the time from which it accepts if no further member finishes; it has no memory and no
  clock.
- Rules are monotone: a member that finishes earlier never makes the group wait longer.
- Timers run only while the store is open. When the store is reopened, they restart for groups that are still open, so
  that a stop neither seals a group nor leaves out a member.
- A group is always sealed by `effective_since`: either no member is running, or enough members have finished and the
  rule accepts.

A rule is written as a string: `all`, `count(6)`, `fraction(0.75) & grace(120)`, `all | expiring(1)`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ALWAYS: Final = -math.inf
NEVER: Final = math.inf
LONGEST_TEXT: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Input of a rule. `size` is the number of members, `running` counts those without a result yet. `opened_at_s` is
    when the group's first attempt was issued, or when the store was last reopened after that. `updates_left` is the
    number of optimizer updates for which the oldest finished member may still wait; None: not known."""

    size: int
    finished: int
    running: int
    opened_at_s: float
    last_finished_at_s: float
    updates_left: int | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """Rule by which a group is sealed. `first | second` accepts when either does, `first & second` when both do.
    `since` returns the time from which the rule accepts, `ALWAYS` or `NEVER`; `expires` means that this also depends
    on policy versions."""

    text: str
    since: Callable[[GroupView], float]
    expires: bool = False

    def __call__(self, group: GroupView, now: float) -> bool:
        return self.since(group) <= now

    def __or__(self, other: AcceptanceRule) -> AcceptanceRule:
        return AcceptanceRule(
            f"({self.text} | {other.text})",
            lambda group: min(self.since(group), other.since(group)),
            self.expires or other.expires,
        )

    def __and__(self, other: AcceptanceRule) -> AcceptanceRule:
        return AcceptanceRule(
            f"({self.text} & {other.text})",
            lambda group: max(self.since(group), other.since(group)),
            self.expires or other.expires,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLimits:
    """Limits on the arguments of rules."""

    group_size: int
    max_staleness: int


def every_member() -> AcceptanceRule:
    """Return the rule `all`, which is met once no member is running."""
    return AcceptanceRule("all", lambda group: NEVER if group.running else ALWAYS)


def count(members: int) -> AcceptanceRule:
    """Return the rule that is met once this many members have finished."""
    return AcceptanceRule(f"count({members})", lambda group: ALWAYS if group.finished >= members else NEVER)


def fraction(share: float) -> AcceptanceRule:
    """Return the rule that is met once this share of the group's size, rounded up, has finished."""
    return AcceptanceRule(
        f"fraction({share})",
        # 0.28 * 25 is 7.000000000000001.
        lambda group: ALWAYS if group.finished >= math.ceil(share * group.size - 1e-9) else NEVER,
    )


def deadline(seconds: float) -> AcceptanceRule:
    """Return the rule that is met this many seconds after the group's first attempt was issued or the store was last
    opened."""
    return AcceptanceRule(f"deadline({seconds})", lambda group: group.opened_at_s + seconds)


def grace(seconds: float) -> AcceptanceRule:
    """Return the rule that is met once a member has finished and, for this many seconds since, no other member has
    finished and the store has not been reopened."""

    def since(group: GroupView) -> float:
        return max(group.last_finished_at_s, group.opened_at_s) + seconds if group.finished else NEVER

    return AcceptanceRule(f"grace({seconds})", since)


def expiring(updates: int) -> AcceptanceRule:
    """Return the rule that is met while the oldest finished member may wait for at most this many more optimizer
    updates."""

    def since(group: GroupView) -> float:
        return ALWAYS if group.updates_left is not None and group.updates_left <= updates else NEVER

    return AcceptanceRule(f"expiring({updates})", since, expires=True)


def effective_since(rule: AcceptanceRule, group: GroupView, min_members: int) -> float:
    """Return the time from which a group is sealed (or dropped) if no further member finishes."""
    if not group.running:
        return ALWAYS
    return rule.since(group) if group.finished >= min_members else NEVER


def parse_rule(text: str, limits: RuleLimits | None = None) -> AcceptanceRule:
    """Parse a rule. Raises ValueError when the text is not a rule, or is a rule that can never be met within
    `limits`."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the rule has {len(text)} characters: use at most {LONGEST_TEXT}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"rule {text!r} is not valid ({error.msg}): {_EXPECTED}") from None
    return _build(tree, limits)


def _build(node: ast.expr, limits: RuleLimits | None) -> AcceptanceRule:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _build(left, limits) | _build(right, limits)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _build(left, limits) & _build(right, limits)
        case ast.Name(id="all") | ast.Call(func=ast.Name(id="all"), args=[], keywords=[]):
            return every_member()
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int() | float() as value)], keywords=[]) if (
            name in _LEAVES and not isinstance(value, bool)
        ):
            return _LEAVES[name](value, limits)
    raise ValueError(f"{ast.unparse(node)!r} is not a rule: {_EXPECTED}")


def _count(value: float, limits: RuleLimits | None) -> AcceptanceRule:
    if value % 1 or value < 1:
        raise ValueError(f"count({value}) needs a whole number of members, at least 1")
    if limits and value > limits.group_size:
        raise ValueError(
            f"count({value}) can never be met with group_size = {limits.group_size}: lower it, or raise group_size"
        )
    return count(int(value))


def _fraction(value: float, limits: RuleLimits | None) -> AcceptanceRule:
    if not 0 < value <= 1:
        raise ValueError(f"fraction({value}) needs a share: give a number above 0 and at most 1")
    return fraction(value)


def _seconds(rule: Callable[[float], AcceptanceRule]) -> Callable[[float, RuleLimits | None], AcceptanceRule]:
    def build(value: float, limits: RuleLimits | None) -> AcceptanceRule:
        if not 0 < value < math.inf:
            raise ValueError(f"{rule(value).text} needs a waiting time: give a number of seconds above 0")
        return rule(value)

    return build


def _expiring(value: float, limits: RuleLimits | None) -> AcceptanceRule:
    if value % 1 or value < 0:
        raise ValueError(f"expiring({value}) needs a whole number of optimizer updates: give 0 or more")
    if limits and value >= limits.max_staleness:
        raise ValueError(
            f"expiring({value}) always holds with max_staleness = {limits.max_staleness}: lower it, or raise "
            "max_staleness"
        )
    return expiring(int(value))


_LEAVES: Final[dict[str, Callable[[float, RuleLimits | None], AcceptanceRule]]] = {
    "count": _count,
    "at_least": _count,
    "fraction": _fraction,
    "deadline": _seconds(deadline),
    "grace": _seconds(grace),
    "expiring": _expiring,
}
_EXPECTED: Final = (
    "join all, count(members), at_least(members), fraction(share), deadline(seconds), grace(seconds) and "
    "expiring(updates) with | and &"
)
