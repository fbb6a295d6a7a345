"""The judge of steps: votes stay on their turns, and lost ones are missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from headrace.actors.agents.loop.judge import Judge, JudgeConfig, Step, check_judge, vote_in
from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.rewards import Judgement, with_judgement
from headrace.actors.evaluation.graders.verdict import broken, failed, solved
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.figures import service_time
from headrace.actors.services.service import NO_SERVICES, Services
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, TokenSpan
from headrace.serve.gateway.capture.rows import Lineage
from support.scripted_service import ScriptedService, completion, text
from support.scripted_service import json as answer_with


def judge(
    rule: str = "", services: Services = NO_SERVICES, shown: Mapping[str, int] | None = None, **settings: object
) -> Judge:
    voter = {"rule": f"support.judging_rules:{rule}"} if rule else {"service": "judge"}
    config = JudgeConfig.model_validate({**voter, **settings})
    return Judge(config=config, services=services, task="one", problem="Begin.", **(shown or {}))


def step(turn: int) -> Step:
    return Step(turn=turn, answer=f"command {turn}", observation=f"output {turn}")


@pytest.mark.parametrize(
    ("said", "vote"),
    [
        (r"so \boxed{+1}", 1),
        (r"\boxed{1}", 1),
        (r"\boxed{ -1 } and \boxed{1}", -1),
        (r"\boxed{0} then \boxed{-1}", -1),
        (r"\boxed{0.5}", None),
        (r"\boxed{11}", None),
        ("+1", None),
        ("", None),
    ],
)
def test_the_first_strict_box_is_the_vote(said: str, vote: int | None) -> None:
    assert vote_in(said) == vote


async def test_f22_a_malformed_turn_between_judged_turns_shifts_no_score() -> None:
    one = judge("likes_even_turns")
    for turn in (1, 4, 6):  # 2, 3 and 5 had no action.
        one.see(step(turn))
    one.see(step(7), judged=False)
    judgement = await one.finish(10)
    assert judgement.scores == {1: -1.0, 4: 1.0, 6: 1.0}
    assert judgement.mean == pytest.approx(1 / 3)
    steps = json.loads(judgement.artifact())["steps"]
    assert [(one["turn"], one["score"]) for one in steps] == [(1, -1.0), (4, 1.0), (6, 1.0)]


async def test_lost_votes_are_missing_and_never_zero() -> None:
    """F22: a vote that cannot be read or fails does not count."""
    one = judge("loses_some")
    one.see(step(1))
    judgement = await one.finish(10)
    assert judgement.votes == {1: (None, -1, None)}
    assert judgement.mean == -1.0
    nothing = Judgement(votes={1: (None, None)}, coefficient=1.0)
    assert (nothing.scores, nothing.mean) == ({}, None)


async def test_late_votes_are_given_up_after_the_grace() -> None:
    one = judge("hangs_on_the_first", votes=2)
    one.see(step(1))
    one.see(step(2))
    judgement = await one.finish(0.2)
    assert judgement.votes == {1: (None, None), 2: (1, 1)}
    assert judgement.mean == 1.0
    await asyncio.gather(*(vote for votes in one._votes.values() for vote in votes), return_exceptions=True)
    assert all(vote.done() for votes in one._votes.values() for vote in votes)


async def test_the_judge_sees_the_steps_before_and_nothing_later() -> None:
    shown = {"history_steps": 2, "history_characters": 1, "problem_characters": 3}
    one = judge("sees_only_the_past", shown=shown, votes=1)
    for turn in range(1, 6):
        one.see(step(turn))
    assert (await one.finish(10)).scores == dict.fromkeys(range(1, 6), 1.0)


async def test_a_model_votes_with_seeds_of_its_own_outside_the_agents_time() -> None:
    service = ScriptedService(answer_with(completion(r"good: \boxed{+1}")))
    async with service.served() as url:
        config = {"judge": ServiceConfig.model_validate({"kind": "model", "url": url, "model": "m"})}
        async with ServiceClients(config) as clients:
            with service_time() as measured:
                one = judge(services=clients, votes=3)
                one.see(step(1))
                one.see(step(2))
                judgement = await one.finish(10)
    assert judgement.votes == {1: (1, 1, 1), 2: (1, 1, 1)}
    assert measured.seconds == {}
    assert len({request["seed"] for request in service.requests}) == 6
    first = next(request for request in service.requests if "Step 2" not in str(request))
    assert "output 1" in str(first["messages"])


async def test_a_judge_that_is_down_leaves_the_outcome_alone() -> None:
    service = ScriptedService(text("", status=400))
    async with service.served() as url:
        config = {"judge": ServiceConfig.model_validate({"kind": "model", "url": url, "model": "m"})}
        async with ServiceClients(config) as clients:
            one = judge(services=clients)
            one.see(step(1))
            judgement = await one.finish(10)
    assert judgement.mean is None
    assert with_judgement(solved(), judgement).reward == 1.0


def test_the_score_is_added_to_the_outcome_but_decides_nothing() -> None:
    judgement = Judgement(votes={1: (1, 1, -1), 3: (None, -1, None)}, coefficient=0.5)
    verdict = with_judgement(failed("no"), judgement)
    assert verdict.reward == pytest.approx(0.5 * (1 / 3 - 1) / 2)
    assert not verdict.solved
    assert verdict.parts["outcome"] == (0.0, 1.0)
    assert verdict.detail.endswith("over 2 steps")
    assert with_judgement(broken("x"), judgement).reward is None
    assert with_judgement(solved(), None) == solved()


def test_an_unknown_rule_and_two_voters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.loop\.judge\.rule: judge 'support\.judging_rules:absent'"):
        check_judge(JudgeConfig(rule="support.judging_rules:absent"))
    with pytest.raises(ValueError, match="exclude each other"):
        JudgeConfig(rule="a:b", service="c")


def test_with_credit_of_steps_the_reward_is_the_outcome() -> None:
    judgement = Judgement(votes={1: (1, 1)}, coefficient=1.0, credit=Credit.STEPS)
    assert with_judgement(solved(), judgement) == solved()


def test_the_scores_of_steps_name_the_tokens_of_their_turns() -> None:
    """F22: a turn belongs to its step by its id, in whichever row it is trained; a lost vote is no score."""
    judgement = Judgement(
        votes={1: (1,), 3: (-1, 1), 4: (None,)}, coefficient=0.5, credit=Credit.STEPS, ids={1: "t1", 3: "t4", 4: "t5"}
    )
    lineages = (
        Lineage(name="0", truncated=False, turns=(("t1", 5, 9), ("t2", 12, 14))),
        Lineage(name="1", truncated=False, turns=(("t4", 3, 8), ("t5", 9, 12))),
    )
    scores = judgement.of_tokens(1.0, lineages)
    assert scores.steps == (ScoredStep(1, 1.0, (TokenSpan(0, 5, 9),)), ScoredStep(3, 0.0, (TokenSpan(1, 3, 8),)))
    assert (scores.reward, scores.values) == (1.0, {1: 1.5, 3: 1.0})


def test_credit_of_steps_without_a_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="credit is steps, but no scores exist without a judge; set service or rule"):
        JudgeConfig(credit=Credit.STEPS)
