"""The registry of converters from data sets to headrace tasks, by the name of the data format.

Invariant: each row becomes a task, or a refusal with the reason; `load_tasks` can read the written file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.buffer.datasets import tau
from headrace.buffer.datasets.swe import Refusal, SweEnvironment, read_rows
from headrace.buffer.primitives.registry import Registry
from headrace.buffer.tasks import Task, load_tasks, write_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Converter: TypeAlias = Callable[[Path, Mapping[str, Any]], tuple[tuple[Task, ...], tuple[Refusal, ...]]]

SettingsT = TypeVar("SettingsT", SweEnvironment, tau.TauSettings)
TASKS, REFUSALS = "tasks.jsonl", "refused.jsonl"


class SettingsRefused(ValueError):
    """A converter does not accept these settings; the message names the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion: the path of the task file, the number of tasks in it, and the refused rows."""

    tasks: Path
    count: int
    refusals: tuple[Refusal, ...]


def _settings(kind: type[SettingsT], settings: Mapping[str, Any]) -> SettingsT:
    """Return the settings of a converter, which are a dataclass. Raises SettingsRefused."""
    known = [field.name for field in fields(kind)]
    if unknown := sorted(settings.keys() - set(known)):
        raise SettingsRefused(f"{unknown[0]}: unknown setting; the settings are {', '.join(known)}")
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SettingsRefused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _software_engineering(source: Path, settings: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    return read_rows(source, _settings(SweEnvironment, settings))


def _tau(source: Path, settings: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    try:
        return tau.read_rows(source, _settings(tau.TauSettings, settings))
    except ValueError as error:
        raise SettingsRefused(str(error)) from error


def _function(found: object) -> Converter:
    if not callable(found):
        raise TypeError("it must be a function that takes a path and settings")
    converter: Converter = found
    return converter


CONVERTERS: Final[Registry[Converter]] = Registry(
    kind="form of data", group="headrace.converters", own={"swe": _software_engineering, "tau": _tau}, accept=_function
)


def convert(source: Path, folder: Path, *, form: str, settings: Mapping[str, Any]) -> Converted:
    """Convert a data file, and write the tasks and the refused rows to a folder. Raises PartRefused, OSError,
    SettingsRefused, and TaskFileError for tasks that cannot be read back."""
    tasks, refusals = CONVERTERS.find(form)(source, settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / TASKS, tasks)
    (folder / REFUSALS).write_text("".join(json.dumps(asdict(refusal)) + "\n" for refusal in refusals))
    return Converted(tasks=folder / TASKS, count=len(load_tasks(folder / TASKS)) if tasks else 0, refusals=refusals)
