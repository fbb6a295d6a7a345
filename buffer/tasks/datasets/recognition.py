"""Recognition of the form of a data set by its first rows.

Invariant: a form is recognised by keys that only its rows have; an unknown row has no form, and is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from headrace.buffer.tasks.datasets.archives import is_archive
from headrace.buffer.tasks.datasets.rows import Item, Row, RowRefused, SourceRefused, read_rows
from headrace.buffer.tasks.task import Task

FIRST_ROWS: Final = 20
ALIKE: Final = {"tau2": "tau", "harbor": "endless"}
"""Forms that one converter reads."""
FOREIGN: Final = {
    "corpus": "a passage of a corpus, which is no task: set services.retriever.corpus to the file",
    "headrace": "a task of headrace already: set tasks.train or tasks.heldout to the file",
}
"""What rows are that no converter reads."""


def form_of_row(row: object) -> str | None:
    """Return the form that a row looks like, a key of FOREIGN, or None."""
    if not isinstance(row, dict):
        return None
    keys = {key for key, value in row.items() if value is not None}
    given = row.get("metadata")
    metadata: dict[str, object] = given if isinstance(given, dict) else {}
    swe = ("swepro", "eval_cmd", "remote_env_info", "FAIL_TO_PASS", "f2p_script")
    looks = {
        "headrace": {"evaluator", "family", "instruction"} <= keys,
        "openclaw": "instance" in metadata,
        "swe": any(key in keys or key in metadata for key in swe),
        "tau": {"user_id", "actions"} <= metadata.keys(),
        "tau2": {"user_scenario", "evaluation_criteria"} <= keys,
        "search-r1": ("question" in keys and bool(keys & {"answer", "expected_answer", "golden_answers"}))
        or {"prompt", "reward_model"} <= keys,
        "endless": bool({"task_binary"} & keys)
        or {"task_id", "instruction"} <= keys
        or "endless" in (row.get("data_source"), row.get("env_class")),
        "corpus": {"id", "contents"} <= keys,
    }
    return next((form for form, applies in looks.items() if applies), None)


def recognised(source: Path) -> str:
    """Return the form of a file or folder. Raises SourceRefused, OSError."""
    patterns = ("task.toml", "*/task.toml", "*/*/task.toml")
    if source.is_dir() and not any(found for pattern in patterns for found in source.glob(pattern)):
        raise SourceRefused(f"{source}: is a folder without task folders (task.toml); name a data file")
    if source.is_dir() or is_archive(source):
        return "harbor"
    rows = list(islice(read_rows(source), FIRST_ROWS))
    form = next((form for _, row in rows if (form := form_of_row(row)) is not None), None)
    if form in FOREIGN:
        raise SourceRefused(f"{source}: each row is {FOREIGN[form]}")
    if form is not None:
        return form
    if not rows:
        raise SourceRefused(f"{source}: has no rows")
    number, first = rows[0]
    is_object = isinstance(first, dict)
    shown = f"has the keys {', '.join(map(str, first))[:200]}" if is_object else "is no object"  # type: ignore[call-overload]
    reason = str(first) if isinstance(first, RowRefused) else shown
    raise SourceRefused(f"{source}: the first rows are of no known form (row {number} {reason}); name it with --form")


def converted(form: str, rows: Iterator[Row], to_task: Callable[[int, object], Task]) -> Iterator[Item]:
    """Yield each row's task, or the reason why it has none, which for a row of another form is that form. `to_task`
    gets number and row, and raises ValueError."""
    for number, row in rows:
        item: Task | RowRefused
        try:
            if isinstance(row, RowRefused):
                raise row
            looks = form_of_row(row)
            if looks in FOREIGN:
                raise RowRefused(f"is {FOREIGN[looks]}")
            if looks is not None and ALIKE.get(looks, looks) != ALIKE.get(form, form):
                raise RowRefused(f"looks like the form {looks}, not {form}; use --form {looks}")
            item = to_task(number, row)
        except ValueError as error:
            item = RowRefused(str(error))
        yield number, item
