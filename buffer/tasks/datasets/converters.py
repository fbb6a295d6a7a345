"""The registry of converters from data sets to headrace tasks, by the name of the data format.

Invariants:
- Each row becomes a task, or a refusal with the reason; `load_tasks` can read the written file.
- Rows are converted one at a time, and the output appears complete or not at all.
- A licence is reported only by the name of a file that covers the data by its own name; it is never guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.buffer.errors import TaskFileError
from headrace.buffer.primitives.registry import Registry
from headrace.buffer.tasks.datasets import harbor, search, swe, tau
from headrace.buffer.tasks.datasets.recognition import recognised
from headrace.buffer.tasks.datasets.rows import Item, Refusal, RowRefused, SourceRefused
from headrace.buffer.tasks.parts import TaskOrigin
from headrace.buffer.tasks.task import Task, parse_task, task_line

Converter: TypeAlias = Callable[
    [Path, Mapping[str, Any]], tuple[tuple[Task, ...], tuple[Refusal, ...]] | Iterator[Item]
]

TASKS, REFUSALS, REPORT = "tasks.jsonl", "refused.jsonl", "report.json"
AUTO: Final = "auto"
MAX_REASONS: Final = 100
_DETAILS: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
_PLAIN: Final = ("LICENSE", "LICENCE", "COPYING")
_ENDINGS: Final = ("", "txt", "md")
_MARKS: Final = (".README", ".LICENSE")


class SettingsRefused(ValueError):
    """A converter does not accept these settings; the message names the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion: the path of the task file, the number of tasks in it, and why rows were refused.
    `reasons` counts refusals by their reason without its details."""

    tasks: Path
    form: str
    count: int
    sha256: str
    licence: str
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        """Number of refused rows."""
        return sum(self.reasons.values())

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The refused rows, read from their file."""
        with (self.tasks.parent / REFUSALS).open(encoding="utf-8") as file:
            return tuple(Refusal(**json.loads(line)) for line in file)

    def to_json(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "read": self.count + self.refused,
            "converted": self.count,
            "refused": self.refused,
            "reasons": dict(self.reasons),
            "source_sha256": self.sha256,
            "licence": self.licence,
        }


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


def _reading(read: Callable[[Path, Settings], Iterator[Item]], kind: type[Settings]) -> Converter:
    return lambda source, settings: read(source, _parsed(settings, kind))


_tau: Final = _reading(tau.read_retail, tau.TauSettings)


def _function(found: object) -> Converter:
    if not callable(found):
        raise TypeError("it must be a function that takes a path and settings")
    converter: Converter = found
    return converter


CONVERTERS: Final[Registry[Converter]] = Registry(
    kind="form of data",
    group="headrace.converters",
    own={
        "swe": _reading(swe.read_repositories, swe.SweEnvironment),
        "openclaw": _reading(swe.read_openclaw, swe.SweEnvironment),
        "tau": _tau,
        "tau2": _tau,
        "harbor": _reading(harbor.read_folders, harbor.HarborSettings),
        "endless": _reading(harbor.read_endless, harbor.HarborSettings),
        "search-r1": _reading(search.read_questions, search.SearchSettings),
    },
    accept=_function,
)


def form_of(source: Path, form: str) -> str:
    """Return the form to convert with: the named one, or the recognised one for `auto`. Raises SettingsRefused,
    OSError."""
    try:
        return recognised(source) if form == AUTO else form
    except SourceRefused as error:
        raise SettingsRefused(str(error)) from error


def convert(source: Path, folder: Path, *, form: str, settings: Mapping[str, Any], licence: str = "") -> Converted:
    """Convert a data file or folder, and write the tasks, the refused rows and a report to a folder. Tasks without an
    origin get the source's name, and those without a licence the given one. Raises PartRefused, OSError,
    SettingsRefused."""
    form = form_of(source, form)
    converter = CONVERTERS.find(form)
    source.stat()
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f".{name}.part" for name in (TASKS, REFUSALS)}
    reasons: Counter[str] = Counter()
    ids: dict[str, int] = {}
    try:
        with parts[TASKS].open("w", encoding="utf-8") as tasks, parts[REFUSALS].open("w", encoding="utf-8") as refused:
            for number, item in _items(converter(source, settings)):
                try:
                    if isinstance(item, RowRefused):
                        raise item
                    origin = item.origin or TaskOrigin(source=source.name)
                    task = replace(item, origin=replace(origin, licence=origin.licence or licence))
                    line = task_line(task, folder)
                    parse_task(line, folder, where="the task")
                    if task.id in ids:
                        raise RowRefused(f"id: {task.id!r} is a duplicate of row {ids[task.id]}")
                    line.encode()
                except (ValueError, TaskFileError) as error:
                    refused.write(json.dumps(asdict(Refusal(line=number, reason=str(error)))) + "\n")
                    reason = _DETAILS.sub("...", str(error))
                    reasons[reason if reason in reasons or len(reasons) < MAX_REASONS else "other reasons"] += 1
                    continue
                ids[task.id] = number
                tasks.write(line)
        for name, part in parts.items():
            part.replace(folder / name)
    except SourceRefused as error:
        raise SettingsRefused(str(error)) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    done = Converted(
        tasks=folder / TASKS,
        form=form,
        count=len(ids),
        sha256=source_digest(source),
        licence=licence or licence_of(source),
        reasons=dict(reasons.most_common()),
    )
    (folder / REPORT).write_text(json.dumps({"source": source.name, **done.to_json()}, indent=2) + "\n")
    return done


def _items(found: tuple[tuple[Task, ...], tuple[Refusal, ...]] | Iterator[Item]) -> Iterator[Item]:
    """Yield what a converter returned: an iterator, or tuples of tasks and refusals from another package."""
    if not isinstance(found, tuple):
        yield from found
        return
    tasks, refusals = found
    yield from enumerate(tasks, start=1)
    yield from ((refusal.line, RowRefused(refusal.reason)) for refusal in refusals)


def source_digest(source: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all regular files in a folder; hexadecimal. Raises
    OSError."""
    if not source.is_dir():
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink():
            whole.update(f"{path.relative_to(source).as_posix()}\0{source_digest(path)}\n".encode())
    return whole.hexdigest()


def licence_of(source: Path) -> str:
    """Return the name of the file that states the licence: a README or licence of the source's own name, or a licence
    for the whole folder. Otherwise "unknown", with the licence files near the source, which may be of other data."""
    folder = (source if source.is_dir() else source.parent).resolve()
    near = sorted(path.name for path in folder.iterdir() if path.is_file())
    own = (name for name in near for mark in _MARKS if mark in name and source.name.startswith(name.partition(mark)[0]))
    plain = (name for name in near if name.partition(".")[0] in _PLAIN and name.partition(".")[2] in _ENDINGS)
    if (found := next(iter((*own, *plain)), None)) is not None:
        return f"see {found}"
    for place, where in ((folder, "beside"), (folder.parent, "above")):
        if others := sorted(path.name for path in place.iterdir() if path.name.startswith(_PLAIN)):
            return f"unknown; {where} the data: {', '.join(others)}"
    return "unknown"
