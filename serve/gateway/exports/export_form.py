"""The forms in which a session is exported."""

from __future__ import annotations

from enum import StrEnum


class ExportForm(StrEnum):
    """Form of an exported session."""

    ROWS = "rows"
    """The report of a finish, with the tree and every turn's ids."""
    ATIF = "atif"
    """A trajectory in Harbor's ATIF 1.8."""
    ROLLOUT_DETAILS = "rollout-details"
    """A list of Harbor's RolloutDetail."""
