"""The registry of converters from data sets to headrace tasks, by the name of the data format.

Invariant: each row becomes a task, or a refusal with the reason; `load_tasks` can read the written file.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.buffer.datasets import tau
from headrace.buffer.datasets.harbor import HarborSettings, read_folders
from headrace.buffer.datasets.swe import Refusal, SweEnvironment, read_rows
from headrace.buffer.primitives.registry import Registry
from headrace.buffer.tasks import Task, load_tasks, write_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Converter: TypeAlias = Callable[[Path, Mapping[str, Any]], tuple[tuple[Task, ...], tuple[Refusal, ...]]]

TASKS, REFUSALS = "tasks.jsonl", "refused.jsonl"


class SettingsRefused(ValueError):
    """A converter does not accept these settings; the message names the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion: the path of the task file, the number of tasks in it, and the refused rows."""

    tasks: Path
    count: int
    refusals: tuple[Refusal, ...]


Settings = TypeVar("Settings")


def _parsed(settings: Mapping[str, Any], kind: type[Settings]) -> Settings:
    """Return settings as an instance of their dataclass; objects and lists may be given as JSON text. Raises
    SettingsRefused."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(settings.keys() - set(known)):
        raise SettingsRefused(f"{unknown[0]}: unknown setting; the settings are {', '.join(known)}")
    values = dict(settings)
    for name, value in settings.items():
        if isinstance(value, str) and value.startswith(("{", "[")):
            with suppress(ValueError):
                values[name] = json.loads(value)
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SettingsRefused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _software_engineering(source: Path, settings: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    return read_rows(source, _parsed(settings, SweEnvironment))


def _tau(source: Path, settings: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    try:
        return tau.read_rows(source, _parsed(settings, tau.TauSettings))
    except ValueError as error:
        raise SettingsRefused(str(error)) from error


def _harbor(source: Path, settings: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    return read_folders(source, _parsed(settings, HarborSettings))


def _function(found: object) -> Converter:
    if not callable(found):
        raise TypeError("it must be a function that takes a path and settings")
    converter: Converter = found
    return converter


CONVERTERS: Final[Registry[Converter]] = Registry(
    kind="form of data",
    group="headrace.converters",
    own={"swe": _software_engineering, "tau": _tau, "harbor": _harbor},
    accept=_function,
)


def convert(source: Path, folder: Path, *, form: str, settings: Mapping[str, Any]) -> Converted:
    """Convert a data file or folder, and write the tasks and the refused rows to a folder. Raises PartRefused, OSError,
    SettingsRefused, and TaskFileError for tasks that cannot be read back."""
    tasks, refusals = CONVERTERS.find(form)(source, settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / TASKS, tasks)
    (folder / REFUSALS).write_text("".join(json.dumps(asdict(refusal)) + "\n" for refusal in refusals))
    return Converted(tasks=folder / TASKS, count=len(load_tasks(folder / TASKS)) if tasks else 0, refusals=refusals)
