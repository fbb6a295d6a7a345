"""The converter of questions with known answers, in the forms of Search-R1, NQ-open and NeMo-Gym's HotpotQA.

Rows: `{data_source, prompt: [{role, content}], reward_model: {ground_truth: {target}}, extra_info: {split, index}}`,
`{question, answer: [text]}`, `{question, expected_answer, id}`. Invariant: a row becomes a task that its targets grade
completely, or a refusal with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.buffer.tasks.datasets.recognition import converted
from headrace.buffer.tasks.datasets.rows import Item, RowRefused, read_rows
from headrace.buffer.tasks.evaluators import AnswerEvaluator, AnswerSpec
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskMessage, TaskOrigin
from headrace.buffer.tasks.task import Task, TaskId

KIND: Final = "search"
_ROLES: Final = ("system", "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings that rows do not contain: the scores of the format (guide 'Evaluation'), and whether the opening
    messages of rows are kept. Without them, the question is the instruction."""

    structure: float = 0.0
    retrieval: float = 0.0
    final: float = 0.0
    messages: bool = True


def read_questions(source: Path, settings: SearchSettings) -> Iterator[Item]:
    """Yield the tasks of a data file, and the refused rows. Raises OSError, SourceRefused."""
    return converted(
        "search-r1", read_rows(source), lambda number, row: task_of(row, settings, name=source.stem, number=number)
    )


def task_of(row: object, settings: SearchSettings, *, name: str, number: int) -> Task:
    """Convert a row; `name` and `number` make the id of a row that has none. Raises RowRefused."""
    if not isinstance(row, dict):
        raise RowRefused("the row: must be an object")
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    source = row.get("data_source")
    source = source if isinstance(source, str) and source else name
    split = extra.get("split") if isinstance(extra.get("split"), str) else row.get("split")
    split = split if isinstance(split, str) else ""
    messages = opening_messages(row["prompt"]) if row.get("prompt") is not None else ()
    question = row.get("question")
    if question is None and messages:
        question = messages[-1].content
    if not isinstance(question, str) or not question.strip():
        raise RowRefused("question: must be a text that is not empty")
    index = next((found for found in (extra.get("index"), row.get("id")) if found is not None), number)
    if not isinstance(index, str | int):
        raise RowRefused("extra_info.index: must be a number or a text")
    answer = AnswerSpec(
        targets=targets_of(row), structure=settings.structure, retrieval=settings.retrieval, final=settings.final
    )
    return Task(
        id=TaskId("-".join(part for part in (source, split, str(index)) if part)),
        family=f"search/{source}",
        instruction=question,
        messages=messages if settings.messages else (),
        evaluator=AnswerEvaluator(answer=answer),
        environment=EnvironmentSpec(kind=KIND),
        origin=TaskOrigin(source=source, split=split),
    )


def opening_messages(prompt: object) -> tuple[TaskMessage, ...]:
    """Return the opening messages of a row. Raises RowRefused."""
    if not isinstance(prompt, list) or not prompt:
        raise RowRefused("prompt: must be a list of messages")
    found = []
    for message in prompt:
        match message:
            case {"role": ("system" | "user") as role, "content": str(content)}:
                found.append(TaskMessage(role=role, content=content))
            case {"role": role} if role not in _ROLES:
                raise RowRefused(f"prompt: the role {str(role)[:40]!r} cannot open a conversation")
            case _:
                raise RowRefused("prompt: a message needs role and content, both texts")
    if found[-1].role != "user":
        raise RowRefused("prompt: the last message must be the user's")
    return tuple(found)


def targets_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the answers that count as correct. Raises RowRefused."""
    if row.get("reward_model") is not None:
        key = "reward_model.ground_truth"
        model = row["reward_model"]
        given = model.get("ground_truth") if isinstance(model, dict) else None
        if isinstance(given, dict):
            key, given = f"{key}.target", given.get("target")
    else:
        key = next(
            (key for key in ("answer", "expected_answer", "golden_answers") if row.get(key) is not None), "answer"
        )
        given = row.get(key)
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(target, str) for target in given):
        raise RowRefused(f"{key}: must be a text or a list of texts")
    if not (targets := tuple(target for target in given if target.strip())):
        raise RowRefused(f"{key}: has no answer")
    return targets
