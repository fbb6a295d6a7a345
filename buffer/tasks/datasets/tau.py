"""The converter of tau-bench's and tau2-bench's retail tasks.

Two forms: tau-bench's JSONL rows (`{"index", "metadata": {user_id, instruction, actions, outputs}}`), and tau2-bench's
`tasks.json`, a JSON list beside `split_tasks.json`. Invariants:
- A row becomes a task that the final database and the told outputs grade completely, or a refusal with its number and
  the reason.
- The customer's instruction, the reference solution and the outputs are in the task's secret alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.buffer.tasks.datasets.recognition import converted
from headrace.buffer.tasks.datasets.rows import Item, Row, RowRefused, SourceRefused, read_rows
from headrace.buffer.tasks.evaluators import EnvironmentEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskOrigin
from headrace.buffer.tasks.task import Task, TaskId

KIND: Final = "retail"
INSTRUCTION: Final = "Help the customer of the retail shop, according to the policy."
"""Instruction of all tasks; the customer says what is wanted."""
FAMILY: Final = f"tau/{KIND}"
IDLE_FAMILY: Final = f"tau/{KIND}-without-writes"
"""Family of tasks whose reference solution writes nothing: doing nothing and telling the outputs solves them."""
WRITES: Final = frozenset(
    {
        "cancel_pending_order",
        "exchange_delivered_order_items",
        "modify_pending_order_address",
        "modify_pending_order_items",
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
    }
)
READS: Final = frozenset(
    {
        "calculate",
        "find_user_id_by_email",
        "find_user_id_by_name_zip",
        "get_item_details",
        "get_order_details",
        "get_product_details",
        "get_user_details",
        "list_all_product_types",
        "think",
        "transfer_to_human_agents",
    }
)
"""Tools that change nothing; `get_item_details` is one of tau2-bench alone."""
_EVALUATOR: Final = EnvironmentEvaluator()
_GRADED: Final = frozenset({"DB", "COMMUNICATE", "NL_ASSERTION", "ACTION"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TauSettings:
    """Settings of the conversion. `split` selects a list of `split_tasks.json` (tau2-bench); without it, all tasks are
    converted. `ignore_assertions` accepts tau2-bench's tasks whose assertions in natural language are graded by the
    database alone."""

    split: str = ""
    ignore_assertions: bool = False


class _Model(BaseModel):
    # Publishers add fields of their own; only those that are read must have the right type.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Action(_Model):
    name: str
    kwargs: dict[str, Any]


class _Metadata(_Model):
    user_id: str
    instruction: str
    actions: list[_Action]
    outputs: list[str] = []


class _Row(_Model):
    index: int
    metadata: _Metadata


class _Tau2Action(_Model):
    name: str
    arguments: dict[str, Any]


class _Criteria(_Model):
    actions: list[_Tau2Action] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    env_assertions: list[Any] | None = None
    reward_basis: list[str] = ["DB", "COMMUNICATE"]


class _Scenario(_Model):
    persona: str | None = None
    instructions: dict[str, str | None]


class _Tau2Task(_Model):
    id: str
    user_scenario: _Scenario
    initial_state: dict[str, Any] | None = None
    evaluation_criteria: _Criteria | None = None


ModelT = TypeVar("ModelT", bound=_Model)


def read_retail(source: Path, settings: TauSettings) -> Iterator[Item]:
    """Yield the tasks of a data file, and the refused rows. Raises OSError, SourceRefused, also for a split that cannot
    be used."""
    rows = read_rows(source)
    if settings.split:
        rows = _of_split(rows, source, settings.split)
    name = source.stem.removeprefix("tasks_")

    def to_task(_: int, row: object) -> Task:
        is_tau = isinstance(row, dict) and "metadata" in row
        return task_of(row, name=name) if is_tau else tau2_task_of(row, settings)

    return converted("tau", rows, to_task)


def task_of(row: object, *, name: str) -> Task:
    """Convert a row of tau-bench; `name` is that of its split. Raises RowRefused."""
    parsed = _validated(_Row, row)
    given = parsed.metadata
    return _task(
        f"retail-{name}-{parsed.index}",
        user_id=given.user_id,
        instruction=given.instruction,
        actions=[(action.name, action.kwargs) for action in given.actions],
        outputs=given.outputs,
        origin=TaskOrigin(source="sierra-research/tau-bench", split=name, licence="MIT"),
    )


def tau2_task_of(row: object, settings: TauSettings) -> Task:
    """Convert a task of tau2-bench. Raises RowRefused."""
    task = _validated(_Tau2Task, row)
    criteria = task.evaluation_criteria
    if criteria is None or criteria.actions is None:
        raise RowRefused("evaluation_criteria.actions: is missing, so there is no expected database")
    if task.initial_state:
        raise RowRefused("initial_state: an episode always starts with the database as it is")
    if criteria.env_assertions:
        raise RowRefused("env_assertions: cannot be graded by the database and outputs")
    if unknown := sorted(set(criteria.reward_basis) - _GRADED):
        raise RowRefused(f"reward_basis: {unknown[0]} cannot be graded by the database and outputs")
    # Where there are both, the outputs state what the assertions describe.
    if criteria.nl_assertions and not criteria.communicate_info and not settings.ignore_assertions:
        raise RowRefused("nl_assertions: cannot be graded by the database and outputs (ignore_assertions accepts them)")
    texts = task.user_scenario.instructions
    if texts.get("domain") != KIND:
        raise RowRefused(f"user_scenario.instructions.domain: must be {KIND}")
    parts = ("known_info", "reason_for_call", "unknown_info", "task_instructions")
    instruction = " ".join(text.strip() for part in parts if (text := texts.get(part)) and text.strip(" ."))
    actions = [(action.name, action.arguments) for action in criteria.actions]
    users = [user_id for _, kwargs in actions if isinstance(user_id := kwargs.get("user_id"), str)]
    return _task(
        f"retail-tau2-{task.id}",
        user_id=users[0] if users else "",
        instruction=f"{instruction} {task.user_scenario.persona or ''}".strip(),
        actions=actions,
        outputs=criteria.communicate_info or [],
        origin=TaskOrigin(source="sierra-research/tau2-bench", split=settings.split, licence="MIT"),
    )


def _task(
    task_id: str,
    *,
    user_id: str,
    instruction: str,
    actions: list[tuple[str, dict[str, Any]]],
    outputs: list[str],
    origin: TaskOrigin,
) -> Task:
    if not instruction.strip():
        raise RowRefused("instruction: is empty")
    for name, _ in actions:
        if name not in WRITES | READS:
            raise RowRefused(f"actions: {name} is not a tool of the retail shop")
    secret = {
        "user_id": user_id,
        "instruction": instruction,
        "actions": [{"name": name, "kwargs": kwargs} for name, kwargs in actions],
        "outputs": outputs,
    }
    return Task(
        id=TaskId(task_id),
        family=FAMILY if any(name in WRITES for name, _ in actions) else IDLE_FAMILY,
        instruction=INSTRUCTION,
        evaluator=_EVALUATOR,
        environment=EnvironmentSpec(kind=KIND, secret=secret),
        origin=origin,
    )


def _validated(model: type[ModelT], row: object) -> ModelT:
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RowRefused(f"{'.'.join(map(str, first['loc'])) or 'the row'}: {first['msg']}") from error


def _of_split(rows: Iterator[Row], source: Path, split: str) -> Iterator[Row]:
    """Yield the rows of a split, in its order. Raises SourceRefused, OSError."""
    by_id = {row["id"]: row for _, row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)}
    if not by_id:
        raise SourceRefused("split: belongs to tau2-bench's tasks.json; tau-bench has one file for each split")
    path = source.parent / "split_tasks.json"
    splits = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(splits, dict) or split not in splits:
        raise SourceRefused(f"split: {split!r} is not in {path.name}; it has {', '.join(splits)}")
    for number, name in enumerate(splits[split], start=1):
        yield number, by_id.get(name, RowRefused(f"{path.name} names the task {name!r}, which is missing"))
