"""A judge of steps (process reward), which votes on each step of a loop agent while the agent goes on.

Invariants:
- A vote belongs to the turn that it judged: turns that are malformed, skipped or without votes shift nothing.
- A vote that is lost, late or unusable is missing; it never counts as 0. A step without votes has no score.
- The judge sees the problem, the step and the steps before it: neither later steps nor the outcome.
- The time of the judge is not the agent's: the agent never waits for a vote before its end.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import cache
from inspect import isawaitable
from typing import Final, Self, TypeAlias

from pydantic import Field, model_validator

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.by_service.judge import vote_seed
from headrace.actors.evaluation.graders.rewards import Judgement
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.service import Services
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.primitives.sections import Section
from headrace.buffer.trajectories.step_scores import MAX_SCORE, Credit

logger = logging.getLogger(__name__)

ARTIFACT: Final = "judge"
"""Name of the artifact with the votes and scores of all steps, as JSON."""
INSTRUCTIONS: Final = """\
You judge one step of an agent that works on a problem in a shell. Decide whether the step brings the agent closer to \
a solution. An informative look counts as progress; repetition, errors that could have been avoided and irrelevant \
commands do not. Judge only this step: you are not told how the work ended. Reason briefly, and end with \\boxed{+1} \
if the step helps and \\boxed{-1} if it does not."""
MAX_TOKENS: Final = 4096
"""Maximum number of tokens of one vote."""
GRACE_S: Final = 30.0
"""Longest wait for late votes after the agent's end; it ends with the agent's deadline."""
_BOXED: Final = re.compile(r"\\boxed\{\s*(\+?1|-1)\s*\}")


class JudgeConfig(Section):
    """Settings of the judge of steps; without `service` and `rule` there is none."""

    service: str = ""
    """Name of the service (`[services.NAME]`) with the model that votes."""
    rule: str = ""
    """Function that votes in place of a model, as package.module:function; it takes a step and the vote's number, and
    returns a text with a vote."""
    votes: int = Field(default=3, ge=1)
    """Number of votes on each step."""
    credit: Credit = Credit.REWARD
    """Use of the scores: `reward` adds their mean to the reward of the rollout; `steps` gives each turn with a score an
    advantage of its own, from outcome + coefficient x score, normalised over the rollouts of its group."""
    coefficient: float = Field(default=1.0, ge=-MAX_SCORE, le=MAX_SCORE, allow_inf_nan=False)
    """Weight of the scores beside the outcome's reward."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the votes."""

    @model_validator(mode="after")
    def _has_one_voter(self) -> Self:
        if self.service and self.rule:
            raise ValueError("service and rule exclude each other; remove one")
        if self.credit is Credit.STEPS and not self.is_set:
            raise ValueError("credit is steps, but no scores exist without a judge; set service or rule")
        return self

    @property
    def is_set(self) -> bool:
        """Whether there is a judge."""
        return bool(self.service or self.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the policy: its answer and what came of it. `turn` is the number of the answer, from 1, and `id` its id
    in the gateway's report of the session."""

    turn: int
    id: str = ""
    answer: str
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToJudge:
    """What the judge sees of one step; the texts are already cut."""

    problem: str
    history: tuple[Step, ...]
    step: Step

    def messages(self) -> list[ChatMessage]:
        """Return the conversation for a model."""
        steps = [
            f"## Step {step.turn}\n{step.answer}\n\nIts output:\n{step.observation}"
            for step in (*self.history, self.step)
        ]
        earlier = "\n\n".join(steps[:-1]) or "(none)"
        text = f"# Problem\n{self.problem}\n\n# Earlier steps\n{earlier}\n\n# The step to judge\n{steps[-1]}"
        return [ChatMessage(role="system", content=INSTRUCTIONS), ChatMessage(role="user", content=text)]


Rule: TypeAlias = Callable[[StepToJudge, int], "str | Awaitable[str]"]


def _function(found: object) -> Rule:
    if not callable(found):
        raise TypeError("it is not callable; define `def rule(step, vote)`")
    rule: Rule = found
    return rule


RULES: Final[Registry[Rule]] = Registry(kind="judge", group="headrace.judges", own={}, accept=_function)
_rule = cache(RULES.find)


def check_judge(config: JudgeConfig) -> None:
    """Raise ConfigError if the judge's function does not exist."""
    if config.rule:
        try:
            RULES.find(config.rule)
        except PartRefused as error:
            raise ConfigError(f"agent.loop.judge.rule: {error}") from error


def vote_in(text: str) -> int | None:
    r"""Return the first `\boxed{}` that is exactly +1 (or 1) or -1, or None."""
    found = _BOXED.search(text)
    return None if found is None else int(found[1])


@dataclass(slots=True, kw_only=True)
class Judge:
    """The judge of one episode."""

    config: JudgeConfig
    services: Services
    task: str
    """Id of the task, which decides the seeds of votes together with the turn."""
    problem: str
    history_steps: int = 8
    """Number of earlier steps that the judge is shown."""
    problem_characters: int = 8000
    """Maximum number of characters of the problem that the judge is shown."""
    output_characters: int = 4000
    """Maximum number of characters of the step's observation."""
    history_characters: int = 1000
    """Maximum number of characters of each earlier observation."""
    _steps: list[Step] = field(default_factory=list)
    _votes: dict[int, list[asyncio.Task[int | None]]] = field(default_factory=dict)

    def see(self, step: Step, *, judged: bool = True) -> None:
        """Start the votes on a step, if it is judged; later steps have it in their history in any case."""
        if judged:
            recent = self._steps[len(self._steps) - min(len(self._steps), self.history_steps) :]
            view = StepToJudge(
                problem=self.problem[: self.problem_characters],
                history=tuple(_cut(one, self.history_characters) for one in recent),
                step=_cut(step, self.output_characters),
            )
            # In an empty context, since the time in services of this one is the agent's.
            self._votes[step.turn] = [
                asyncio.get_running_loop().create_task(self._vote(view, vote), context=Context())
                for vote in range(self.config.votes)
            ]
        self._steps.append(step)

    async def _vote(self, view: StepToJudge, vote: int) -> int | None:
        config = self.config
        try:
            if config.rule:
                # In a thread, since a rule of another package may block.
                said = await asyncio.to_thread(_rule(config.rule), view, vote)
                text = await said if isawaitable(said) else said
            else:
                seed = vote_seed(f"{self.task}/{view.step.turn}", vote)
                text = await self.services.model(config.service).complete(
                    view.messages(), max_tokens=MAX_TOKENS, temperature=config.temperature, seed=seed
                )
            return vote_in(text)
        except Exception as error:  # noqa: BLE001 - a rule of another package may raise anything
            logger.warning("a vote on turn %d of task %s is lost: %s", view.step.turn, self.task, error)
            return None

    async def finish(self, left_s: float) -> Judgement:
        """Return the votes; those that take longer than `left_s` or GRACE_S from now are missing."""
        every = [vote for votes in self._votes.values() for vote in votes]
        if every:
            await asyncio.wait(every, timeout=max(0.0, min(GRACE_S, left_s)))
        # Read before late votes are cancelled.
        votes = {
            turn: tuple(one.result() if one.done() else None for one in ones) for turn, ones in self._votes.items()
        }
        self.drop()
        return Judgement(
            votes=votes,
            ids={step.turn: step.id for step in self._steps if step.turn in votes},
            credit=self.config.credit,
            coefficient=self.config.coefficient,
        )

    def drop(self) -> None:
        """Cancel all votes that are not there yet."""
        for votes in self._votes.values():
            for vote in votes:
                vote.cancel()


def _cut(step: Step, characters: int) -> Step:
    return Step(turn=step.turn, id=step.id, answer=step.answer, observation=step.observation[:characters])


def judged_problem(messages: Sequence[ChatMessage]) -> str:
    """Return the problem as the policy's opening messages state it."""
    return "\n\n".join(message.content for message in messages if message.role == "user")
