"""Recordings for the tuner: durations of attempts, and the settings of their run.

Invariants:
- An attempt that did not end by itself (in flight at the end of the recording, cancelled by a rule or the staleness
  bound, failed by infrastructure) took at least its observed time: it is included as unfinished.
- An attempt whose agent has used up its time counts as finished: with the same deadline it would take as long again.
- A file is read completely, or refused with the line and the reason.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.errors import ConfigError
from headrace.buffer.trajectories.types import SOLVED_REWARD

LEAST_FINISHED: Final = 24
"""Minimum number of finished attempts for a fit."""
COLUMNS: Final = ("seconds", "task", "reward", "finished", "solved")
_WRITE: Final = (
    'write {"task": "t1", "seconds": 61.5, "reward": 1, "finished": true} on each line, or a CSV with these columns'
)
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDuration:
    """Duration of one attempt, from the start of the agent. An unfinished one took longer than `seconds`. `solved` is
    None if there is no verdict."""

    task: str
    seconds: float
    finished: bool = True
    solved: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Observed durations and settings. `settings` are keys of a `SimulationPlan`; `step_s` is the mean step time of the
    run, None without a run; `failure` is the share of attempts that ended with outcome infra."""

    source: str
    observations: tuple[AttemptDuration, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cap_s: float = math.inf
    failure: float = 0.0
    step_s: float | None = None
    workers: int = 1
    capped: bool = False
    """True if `buffer.max_in_flight` was set, so that it must change with the slots."""
    sandboxes: int | None = None
    """Number of rollouts that fit in the sandbox pool of the run."""

    @property
    def finished(self) -> tuple[AttemptDuration, ...]:
        return tuple(observation for observation in self.observations if observation.finished)


def refuse_thin(recording: Recording) -> None:
    """Check that a recording has enough finished attempts. Raises ConfigError."""
    ended, all_of_them = len(recording.finished), len(recording.observations)
    if ended < LEAST_FINISHED:
        raise ConfigError(
            f"{recording.source}: {ended} of {all_of_them} attempts finished, but a fit needs {LEAST_FINISHED}; "
            "continue the run, or choose a longer one"
        )


def read_traces(path: Path) -> Recording:
    """Read a JSONL or CSV file of durations. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a run directory or a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; {_WRITE}") from error
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    observations = []
    for number, row in rows:
        seconds = _number(path, number, "seconds", row.get("seconds"))
        if seconds is None or seconds < 0:
            given = row.get("seconds")
            raise ConfigError(f"{path}:{number}: seconds must be a number of at least 0 (given: {given!r})")
        solved = _boolean(path, number, "solved", row.get("solved"))
        reward = _number(path, number, "reward", row.get("reward"))
        if solved is None and reward is not None:
            solved = reward >= SOLVED_REWARD
        finished = _boolean(path, number, "finished", row.get("finished")) is not False
        # Without names every attempt is a separate task, since nothing is known about common tasks.
        task = f"line {number}" if row.get("task") is None else str(row["task"])
        observations.append(AttemptDuration(task=task, seconds=seconds, finished=finished, solved=solved))
    return Recording(source=str(path), observations=tuple(observations))


def _json_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not valid JSON ({error}); {_WRITE}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object; {_WRITE}")
        _check_columns(f"{path}:{number}", row)
        rows.append((number, row))
    return rows


def _csv_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    _check_columns(str(path), reader.fieldnames or ())
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ConfigError(f"{path}:{reader.line_num}: the number of fields differs from that of the first line")
        rows.append((reader.line_num, {key: value or None for key, value in row.items()}))
    return rows


def _check_columns(where: str, columns: Mapping[str, Any] | Sequence[str]) -> None:
    unknown = sorted(set(columns) - set(COLUMNS))
    if "seconds" not in columns:
        named = ", ".join(sorted(columns)[:5])
        raise ConfigError(f"{where}: missing column seconds{f' (columns: {named})' if named else ''}; {_WRITE}")
    if unknown:
        raise ConfigError(f"{where}: unknown column {unknown[0]}; known: {', '.join(COLUMNS)}")


def _number(path: Path, number: int, column: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ConfigError(f"{path}:{number}: {column} is not a number (given: {value!r})")
    return parsed


def _boolean(path: Path, number: int, column: str, value: Any) -> bool | None:
    if value is None:
        return None
    known = _BOOLEANS.get(str(value).lower())
    if known is None:
        raise ConfigError(f"{path}:{number}: {column} is neither true nor false (given: {value!r})")
    return known
