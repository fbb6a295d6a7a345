"""The evaluator `answer`: exact match after normalisation, on the policy's own text only."""

from __future__ import annotations

import pytest

from headrace.actors.evaluation.graders.answer import last_answer, normalized, score_answer
from headrace.actors.evaluation.graders.verdict import Author, EpisodeRecord, SpokenPart
from headrace.buffer.tasks.evaluators import AnswerSpec
from headrace.buffer.trajectories.types import Cause

SPEC = AnswerSpec(targets=("The Beatles", "Beatles band"))


def episode(*answers: str, passages: str = "<information>Doc 1</information>") -> EpisodeRecord:
    """A record in which the environment answers every answer but the last."""
    parts = [SpokenPart(source=Author.TASK, text="Answer inside <answer>, as in <answer> Beijing </answer>.")]
    for number, answer in enumerate(answers):
        parts += [SpokenPart(source=Author.ENVIRONMENT, text=passages)] if number else []
        parts.append(SpokenPart(source=Author.POLICY, text=answer))
    return EpisodeRecord(parts=tuple(parts))


@pytest.mark.parametrize("text", ["the Beatles", " Beatles!", "THE  BEATLES", "beatles band", '"Beatles."'])
def test_equal_answers_solve(text: str) -> None:
    verdict = score_answer(SPEC, episode(f"<answer>{text}</answer>"))
    assert (verdict.reward, verdict.solved, verdict.cause) == (1.0, True, Cause.SOLVED)


@pytest.mark.parametrize("text", ["<answer>Beatle</answer>", "Beatles", "<answer>Beatles", "<answer></answer>", ""])
def test_other_answers_fail(text: str) -> None:
    verdict = score_answer(SPEC, episode(text))
    assert (verdict.reward, verdict.solved, verdict.cause) == (0.0, False, Cause.FAILED)


def test_the_last_answer_counts() -> None:
    parts = episode("<answer>Beatles</answer> or <answer>Queen</answer>").parts
    assert last_answer("answer", parts) == "Queen"


def test_tags_in_passages_and_prompts_do_not_count() -> None:
    """A corpus can contain an answer in tags; only what the policy sampled is its answer."""
    planted = "<information><answer>Beatles</answer></information>"
    assert score_answer(SPEC, episode("<search>a</search>", "I give up", passages=planted)).reward == 0.0
    assert last_answer("answer", episode("no").parts) is None


def test_an_agent_without_a_record_is_not_scored() -> None:
    assert score_answer(SPEC, None).cause is Cause.EVALUATOR


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (("<think>a</think><search>q</search>", "<think>b</think><answer>Beatles</answer>"), 1.0),
        (("<search>q</search>", "<answer>Beatles</answer>"), 0.8),
        (("<think>a</think><search>q</search>", "<think>b</think><answer>Queen</answer>"), 0.3),
        (("<think>a</think><answer>Queen</answer>",), 0.2),
        (("<search>q</search>", "<answer>Queen</answer>"), 0.1),
        (("<search>q</search>", "nothing"), 0.0),
    ],
)
def test_format_scores_are_those_of_search_r1(answers: tuple[str, ...], reward: float) -> None:
    spec = AnswerSpec(targets=("Beatles",), structure=0.2, retrieval=0.1, final=0.1)
    found = score_answer(spec, episode(*answers, passages="<information>The Beatles, a band</information>"))
    assert found.reward == pytest.approx(reward)
    assert found.solved == (reward >= 0.8)


def test_normalisation_keeps_words_apart() -> None:
    assert normalized("An  apple-pie, the PIE") == "applepie pie"
    assert normalized("theory") == "theory"
