"""The alarm for a parser that does not fit its model: many turns have call markup, and no call can be parsed."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

BATCH_TURNS: Final = 32
"""Number of turns with call markup that are judged together."""


class ParserAlarm:
    """Alarm over batches of turns. `raised`: no call was parsed in the last full batch of turns with call markup. The
    start of each alarm is logged."""

    def __init__(self) -> None:
        self.raised = False
        self._turns = 0
        self._read = 0

    def saw(self, *, calls: int, lost_calls: int) -> None:
        """Count a turn with `calls` parsed calls and `lost_calls` pieces of markup that could not be parsed."""
        if not calls and not lost_calls:
            return
        self._turns += 1
        self._read += calls
        if self._turns < BATCH_TURNS:
            return
        raised, self._turns, self._read = self._read == 0, 0, 0
        if raised and not self.raised:
            logger.error(
                "%d turns had call markup and no call could be parsed: set gateway.parser to the model's parser",
                BATCH_TURNS,
            )
        self.raised = raised
