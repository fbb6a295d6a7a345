"""Scoring of a final answer in tags, as in Search-R1 (PeterGriffinJin/Search-R1, verl/utils/reward_score).

Invariants:
- Only the policy's own text counts: tags in passages, observations and prompts are ignored.
- Two answers are equal if they are after normalisation: lower case, no punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Final

from headrace.actors.evaluation.graders.verdict import Author, EpisodeRecord, SpokenPart, Verdict, broken
from headrace.buffer.tasks.evaluators import AnswerSpec
from headrace.buffer.trajectories.types import Cause

_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_THINK: Final = r"\s*<think>(?:(?!</?think>).)*</think>\s*"
_SEARCH_TURN: Final = re.compile(rf"{_THINK}<search>(?:(?!</?search>).)*</search>\s*", re.DOTALL)


def normalized(text: str) -> str:
    """Return an answer in the form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_answer(spec: AnswerSpec, episode: EpisodeRecord | None) -> Verdict:
    """Return the verdict on the last answer of an episode. Agents without a record cannot be scored."""
    if episode is None:
        return broken("the evaluator `answer` needs the record of a loop agent; set agent.kind to loop")
    targets = {normalized(target) for target in spec.targets}
    answer = last_answer(spec.tag, episode.parts)
    is_correct = answer is not None and normalized(answer) in targets
    is_structured = has_structure(spec.tag, episode.parts)
    if is_correct:
        reward = 1.0 if is_structured else 1.0 - spec.structure
    elif is_structured:
        passages = [f" {normalized(part.text)} " for part in episode.parts if part.source is Author.ENVIRONMENT]
        is_retrieved = any(f" {target} " in passage for target in targets for passage in passages)
        reward = spec.structure + (spec.retrieval if is_retrieved else 0.0)
    else:
        reward = 0.0 if answer is None else spec.final
    detail = "no answer" if answer is None else f"answered {answer[:100]!r}"
    cause = Cause.SOLVED if is_correct else Cause.FAILED
    return Verdict(reward=reward, solved=is_correct, cause=cause, detail=detail)


def last_answer(tag: str, parts: Sequence[SpokenPart]) -> str | None:
    """Return the text of the last `<tag>...</tag>` in one of the policy's answers, or None."""
    pattern = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL)
    found = [text for part in parts if part.source is Author.POLICY for text in pattern.findall(part.text)]
    return found[-1].strip() if found else None


def has_structure(tag: str, parts: Sequence[SpokenPart]) -> bool:
    """Return whether the policy thought and searched in every answer but the last, which thinks and answers."""
    said = [part.text for part in parts if part.source is Author.POLICY]
    answering = re.compile(rf"{_THINK}<{tag}>(?:(?!</?{tag}>).)*</{tag}>\s*", re.DOTALL)
    return (
        bool(said) and bool(answering.fullmatch(said[-1])) and all(_SEARCH_TURN.fullmatch(text) for text in said[:-1])
    )
