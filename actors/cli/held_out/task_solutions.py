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
from typing import Final

from headrace.actors.evaluation.graders.history import GIT
from headrace.buffer.tasks.datasets.harbor import read_solution
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.tasks.unified_diff import with_last_line_end


class SolutionsRefused(ValueError):
    """The folder of solutions cannot be used; the message says why."""


SOLUTION: Final = "/tmp/headrace-solution"
HARBOR_FOLDER: Final = "/solution"
"""Where Harbor puts the folder of a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Files in the agent's sandbox (by path), and the shell command that solves the task with them."""

    files: Mapping[str, bytes]
    command: str
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
            if found is None:
                return None
            files = {f"{HARBOR_FOLDER}/{name}": content for name, content in found[0].items()}
            return Solution(files=files, command=f"bash {HARBOR_FOLDER}/solve.sh", environment=found[1])
        if self._folder is None:
            return None
        name = task.id.replace("/", "__")
        is_repository = isinstance(task.evaluator, RepositoryEvaluator)
        for path, is_patch in ((self._folder / f"{name}.patch", True), (self._folder / f"{name}.sh", False)):
            if path.is_file() and (is_repository or not is_patch):
                text = path.read_text(encoding="utf-8")
                if is_patch:
                    text = with_last_line_end(text)
                command = f"{GIT} apply {SOLUTION}" if is_patch else f"bash {SOLUTION}"
                return Solution(files={SOLUTION: text.encode()}, command=command)
        return None
