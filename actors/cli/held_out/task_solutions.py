"""Known solutions of tasks, read from a folder.

Invariants:
- Solutions never become part of a task: they are read only to check it.
- A solution is found by the task's id or by the name of its folder, and by nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.buffer.tasks.datasets.harbor import read_solution
from headrace.buffer.tasks.task import EvaluatorKind, Task


class SolutionsRefused(ValueError):
    """The folder of solutions cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A shell script for the agent's sandbox, a patch for the repository of a task, or the files of Harbor's folder
    `solution`, with the environment variables of its `solve.sh`."""

    text: str = ""
    is_patch: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Solutions:
    """Solutions in a folder: `ID.sh`, `ID.patch` (`/` in an id is `__`), or task folders of Harbor with
    `solution/solve.sh`. Without a folder there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._by_id: dict[str, Path] = {}
        if folder is None:
            return
        if not folder.is_dir():
            raise SolutionsRefused(f"{folder} is not a folder")
        for path in (folder / "task.toml", *sorted(folder.glob("*/task.toml")), *sorted(folder.glob("*/*/task.toml"))):
            if not path.is_file():
                continue
            try:
                section = tomllib.loads(path.read_text(encoding="utf-8")).get("task")
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise SolutionsRefused(f"{path}: not valid TOML: {error}") from error
            name = section.get("name") if isinstance(section, dict) else None
            self._by_id[str(name or path.parent.resolve().name)] = path.parent

    def of(self, task: Task) -> Solution | None:
        """Return the solution of a task, or None. Raises RowRefused, OSError for one that cannot be read."""
        if task.id in self._by_id:
            found = read_solution(self._by_id[task.id])
            return None if found is None else Solution(files=found[0], environment=found[1])
        if self._folder is None:
            return None
        name = task.id.replace("/", "__")
        is_repository = task.evaluator.kind is EvaluatorKind.REPOSITORY
        for path, is_patch in ((self._folder / f"{name}.patch", True), (self._folder / f"{name}.sh", False)):
            if path.is_file() and (is_repository or not is_patch):
                # Data sets strip the last line end of a patch, and git needs it.
                text = path.read_text(encoding="utf-8")
                return Solution(text=text.rstrip("\n") + "\n" if is_patch else text, is_patch=is_patch)
        return None
