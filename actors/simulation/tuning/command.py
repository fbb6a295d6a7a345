"""The command `headrace tune`, which reads and fits a recording, searches settings and writes the result.

Invariant: everything, including whether the output can be written, is checked before the search, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import ValidationError

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import explain
from headrace.actors.simulation.tuning.candidates import Candidate, Space, candidates
from headrace.actors.simulation.tuning.duration_fit import Fit, fit
from headrace.actors.simulation.tuning.picture import page, pareto_png
from headrace.actors.simulation.tuning.recorded_run import read_run
from headrace.actors.simulation.tuning.records import Recording, read_traces
from headrace.actors.simulation.tuning.result import TuningResult
from headrace.actors.simulation.tuning.search import Effort, search
from headrace.actors.simulation.tuning.selection import WITHIN
from headrace.actors.simulation.virtual.plan import Mode, SimulationPlan, apply_setting
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.verdicts import explain as explain_slow

TURNS: Final = 2
"""Number of turns in a simulated rollout. Versions change between turns; the duration does not depend on their
number."""
PAGE: Final = "the guide 'Tuning on recorded runs'"
PICTURE, HTML, JSON, TOML = "tuning.png", "tuning.html", "tuning.json", "tuning.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Options of the command line. `overrides` set keys of the plan that are missing or wrong in the recording."""

    source: Path
    out: Path | None = None
    steps: int = 48
    seed: int = 0
    within: float = WITHIN
    space: Space = field(default_factory=Space)
    overrides: Sequence[str] = ()
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A validated search."""

    request: TuneRequest
    recording: Recording
    fit: Fit
    base: SimulationPlan
    candidates: tuple[Candidate, ...]
    outside_agent: float | None = None
    """Share of the time that slow rollouts took above typical and spent outside the agent; None if unknown."""


def prepare_tuning(request: TuneRequest) -> Prepared:
    """Read and fit the recording. Raises ConfigError, RunMissing, LedgerRefused."""
    source = request.source
    if not source.exists():
        raise ConfigError(f"{source}: no such run or file")
    recording = read_run(source) if source.is_dir() else read_traces(source)
    fitted = fit(recording)
    document: dict[str, Any] = {
        **recording.settings,
        "mode": Mode.ASYNC,
        "durations": fitted.durations.model_dump(),
        "chances": fitted.chances,
        "failure": round(min(0.9, recording.failure), 4),
        "turns": TURNS,
        "seed": request.seed,
    }
    # A bound of 0 would be mode sync, which has no rule to tune.
    document["max_staleness"] = max(1, document.get("max_staleness", 4))
    for override in request.overrides:
        apply_setting(document, override)
    if "learner_s" not in document:
        raise ConfigError(
            f"{recording.source}: it does not record how long a learner step takes; add --set learner_s=SECONDS"
        )
    try:
        base = SimulationPlan.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"tune: {explain(error, SimulationPlan, page=PAGE)}") from error
    found = candidates(base, fitted, request.space, recording.sandboxes)
    if request.out is not None:
        try:
            request.out.mkdir(parents=True, exist_ok=True)
            (request.out / JSON).touch()
        except OSError as error:
            raise ConfigError(f"--out {request.out}: cannot be written ({error.strerror}); name a folder") from error
    outside = explain_slow(read_times(source)).outside_agent if source.is_dir() else None
    return Prepared(
        request=request, recording=recording, fit=fitted, base=base, candidates=found, outside_agent=outside
    )


def run_tuning(prepared: Prepared, say: Callable[[int, int, int], None]) -> TuningResult:
    """Search, choose a setting, and write the result. Raises ConfigError."""
    request = prepared.request
    effort = Effort(steps=request.steps, processes=request.processes or os.cpu_count() or 1, within=request.within)
    searched = search(prepared.candidates, prepared.base, effort, say)
    tuned = TuningResult(
        recording=prepared.recording,
        fit=prepared.fit,
        base=prepared.base,
        searched=searched,
        outside_agent=prepared.outside_agent,
    )
    if request.out is not None:
        write(tuned, request.out)
    return tuned


def write(tuned: TuningResult, out: Path) -> None:
    """Write the picture, the page, and the JSON and TOML files."""
    png = pareto_png(tuned.searched)
    (out / PICTURE).write_bytes(png)
    (out / HTML).write_text(page(tuned, png), encoding="utf-8")
    (out / JSON).write_bytes(orjson.dumps(tuned.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
    (out / TOML).write_text(tuned.toml(), encoding="utf-8")
