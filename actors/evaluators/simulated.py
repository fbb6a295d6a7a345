"""Scoring without a look: for virtual time and replays.

Invariant: the reward is a draw from the attempt's name and its task alone, the same in every run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.actors.evaluators.verdict import Verdict
from headrace.actors.simulation.tasks import is_solved
from headrace.buffer.tasks import SimulatedVerdict
from headrace.buffer.types import Cause

if TYPE_CHECKING:
    from headrace.actors.evaluators.verdict import EvaluationRequest


async def simulated_verdict(request: EvaluationRequest) -> Verdict:
    """Takes its time. ValueError when the task says nothing that could be simulated."""
    settings = SimulatedVerdict.parse(request.task.evaluator.expected)
    await asyncio.sleep(settings.seconds)
    solved = is_solved(request.task, settings.success, request.key)
    return Verdict(reward=float(solved), cause=Cause.SOLVED if solved else Cause.FAILED)
