"""What was recorded: durations of attempts, and what a run says of everything else.

Invariants:
- An attempt that did not end by itself (in flight at the end of the record, cancelled by a rule or the staleness bound,
  dead of infrastructure) took at least as long as it was seen: it is kept, as unfinished.
- An attempt whose agent used up its time counts as finished: under the same clock it takes that long again.
- A file is read whole or refused with the line and what is wrong.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.actors.errors import ConfigError
from headrace.buffer.types import SOLVED_REWARD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LEAST_FINISHED: Final = 24
"""Attempts that ended, below which nothing is fitted."""
COLUMNS: Final = ("seconds", "task", "reward", "finished", "solved")
_WRITE: Final = 'write {"task": "t1", "seconds": 61.5, "reward": 1, "finished": true} on each line, or such a CSV'
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One attempt's work, from the agent's start. Unfinished: it took longer than `seconds`. `solved` is None where
    nothing was decided."""

    task: str
    seconds: float
    finished: bool = True
    solved: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Durations, and what is known of the rest. `settings` are keys of a `SimulationPlan`; `step_s` is the mean time of
    a step of the run, None where there was none; `failure` the share of attempts that died of infrastructure."""

    source: str
    observations: tuple[Observation, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cap_s: float = math.inf
    failure: float = 0.0
    step_s: float | None = None
    workers: int = 1
    capped: bool = False
    """Whether `buffer.max_in_flight` was set, which must follow the slots."""
    sandboxes: int | None = None
    """Rollouts that the run's sandbox pool has room for."""

    @property
    def finished(self) -> tuple[Observation, ...]:
        return tuple(observation for observation in self.observations if observation.finished)


def refuse_thin(recording: Recording) -> None:
    """Raises ConfigError for a record from which nothing can be fitted."""
    ended, all_of_them = len(recording.finished), len(recording.observations)
    if ended < LEAST_FINISHED:
        raise ConfigError(
            f"{recording.source}: {ended} of {all_of_them} attempts ended, at least {LEAST_FINISHED} are needed; "
            "let the run go on, or name a longer one"
        )


def read_traces(path: Path) -> Recording:
    """A JSONL or CSV file of durations. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a run directory or a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text; {_WRITE}") from error
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    observations = tuple(_observation(path, number, row) for number, row in rows)
    return Recording(source=str(path), observations=observations)


def _json_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: no JSON ({error}); {_WRITE}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: no object; {_WRITE}")
        _check_columns(f"{path}:{number}", row)
        rows.append((number, row))
    return rows


def _csv_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    _check_columns(str(path), reader.fieldnames or ())
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ConfigError(f"{path}:{reader.line_num}: another number of fields than the first line has")
        rows.append((reader.line_num, {key: value or None for key, value in row.items()}))
    return rows


def _check_columns(where: str, columns: Mapping[str, Any] | Sequence[str]) -> None:
    unknown = sorted(set(columns) - set(COLUMNS))
    if "seconds" not in columns:
        named = ", ".join(sorted(columns)[:5])
        raise ConfigError(f"{where}: no column seconds{f' (columns: {named})' if named else ''}; {_WRITE}")
    if unknown:
        raise ConfigError(f"{where}: unknown column {unknown[0]}; known: {', '.join(COLUMNS)}")


def _observation(path: Path, number: int, row: Mapping[str, Any]) -> Observation:
    seconds = _number(path, number, "seconds", row.get("seconds"))
    if seconds is None or seconds < 0:
        raise ConfigError(f"{path}:{number}: seconds is no number from 0 on (given: {row.get('seconds')!r})")
    task = row.get("task")
    return Observation(
        # Without a name each attempt is a task of its own: nothing is known of what tasks have in common.
        task=f"line {number}" if task is None else str(task),
        seconds=seconds,
        finished=_boolean(path, number, "finished", row.get("finished")) is not False,
        solved=_solved(path, number, row),
    )


def _solved(path: Path, number: int, row: Mapping[str, Any]) -> bool | None:
    """The column `solved`; without it a reward tells."""
    solved = _boolean(path, number, "solved", row.get("solved"))
    reward = _number(path, number, "reward", row.get("reward"))
    return solved if solved is not None or reward is None else reward >= SOLVED_REWARD


def _number(path: Path, number: int, column: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ConfigError(f"{path}:{number}: {column} is no number (given: {value!r})")
    return parsed


def _boolean(path: Path, number: int, column: str, value: Any) -> bool | None:
    if value is None:
        return None
    known = _BOOLEANS.get(str(value).lower())
    if known is None:
        raise ConfigError(f"{path}:{number}: {column} is neither true nor false (given: {value!r})")
    return known
