"""The alarm for a parser that does not fit its model: many turns write calls, and none of them is read."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

BATCH_TURNS: Final = 32
"""Turns with call markup that are looked at together."""


class ParserAlarm:
    """`raised`: no turn of the last whole batch with call markup gave a call. Said in the log each time it begins."""

    def __init__(self) -> None:
        self.raised = False
        self._turns = 0
        self._read = 0

    def saw(self, *, calls: int, lost_calls: int) -> None:
        """A turn: calls that were read, and call markup that gave none."""
        if not calls and not lost_calls:
            return
        self._turns += 1
        self._read += calls
        if self._turns == BATCH_TURNS:
            self._judge()

    def _judge(self) -> None:
        raised, self._turns, self._read = self._read == 0, 0, 0
        if raised and not self.raised:
            logger.error("%d turns wrote calls and none was read: gateway.parser does not fit the model", BATCH_TURNS)
        self.raised = raised
