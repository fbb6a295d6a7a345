"""Rules of judges."""

from __future__ import annotations

import asyncio

from headrace.actors.agents.loop.judge import StepToJudge


def likes_even_turns(step: StepToJudge, vote: int) -> str:
    """Vote +1 on even turns and -1 on odd ones."""
    return rf"Turn {step.step.turn}: \boxed{{{1 if step.step.turn % 2 == 0 else -1}}}"


def loses_some(step: StepToJudge, vote: int) -> str:
    """Only the second vote is usable: the first raises, the third is no vote."""
    if vote == 0:
        raise LookupError("no opinion")
    return r"\boxed{-1}" if vote == 1 else r"\boxed{0}"


async def hangs_on_the_first(step: StepToJudge, vote: int) -> str:
    """Never vote on the first turn."""
    if step.step.turn == 1:
        await asyncio.Event().wait()
    return r"\boxed{+1}"


async def sees_only_the_past(step: StepToJudge, vote: int) -> str:
    """Vote +1 if the view is right: the problem, and the two steps before this one, cut to one character."""
    turn = step.step.turn
    turns = [one.turn for one in step.history]
    cut = all(len(one.observation) == 1 for one in step.history)
    return (
        r"\boxed{1}"
        if step.problem == "Beg" and cut and turns == list(range(max(1, turn - 2), turn))
        else r"\boxed{-1}"
    )
