"""When a group is sealed: small rules joined with `|` and `&`.

Invariants:
- A rule sees a `GroupView` and nothing else; it has no memory and no clock.
- `every_member()` is the rule in force. Rules that seal a group with members still running need carried members, which
  the buffer does not have yet; it refuses to seal such a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Members by what became of them; `running` are pending or in flight."""

    finished: int
    running: int
    poison: int

    @property
    def size(self) -> int:
        return self.finished + self.running + self.poison


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """A predicate on groups: `first | second` accepts when either does, `first & second` when both do."""

    accepts: Callable[[GroupView], bool]

    def __call__(self, group: GroupView) -> bool:
        return self.accepts(group)

    def __or__(self, other: AcceptanceRule) -> AcceptanceRule:
        return AcceptanceRule(lambda group: self(group) or other(group))

    def __and__(self, other: AcceptanceRule) -> AcceptanceRule:
        return AcceptanceRule(lambda group: self(group) and other(group))


def every_member() -> AcceptanceRule:
    """The rule `all`: every member has finished or is poison."""
    return AcceptanceRule(lambda group: group.running == 0)
