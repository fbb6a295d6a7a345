"""Scoring without a look: for virtual time and replays.

Invariant: the reward is a draw from the attempt's name and its task alone, the same in every run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.actors.evaluation.verdict import failed, solved
from headrace.actors.simulated.tasks import is_solved
from headrace.buffer.tasks import SimulatedVerdict

if TYPE_CHECKING:
    from headrace.actors.evaluation.verdict import EvaluationRequest, Verdict


async def simulated_verdict(request: EvaluationRequest) -> Verdict:
    """Takes its time. ValueError when the task says nothing that could be simulated."""
    settings = SimulatedVerdict.parse(request.task.evaluator.expected)
    await asyncio.sleep(settings.seconds)
    return solved() if is_solved(request.task, settings.success, request.key) else failed("")
