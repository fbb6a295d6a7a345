"""The tuner's result, as text, a table, JSON, and TOML to paste.

Invariant: the TOML has every key that the chosen setting changes, so that a run uses exactly what was simulated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson
from rich.table import Table

from headrace.actors.simulation.tuning.candidates import recorded_candidate
from headrace.actors.simulation.tuning.duration_fit import Fit
from headrace.actors.simulation.tuning.records import Recording
from headrace.actors.simulation.tuning.selection import Prediction, pareto_front

if TYPE_CHECKING:
    from headrace.actors.simulation.tuning.search import SearchResult
    from headrace.actors.simulation.tuning.trial import Trial
    from headrace.actors.simulation.virtual.plan import SimulationPlan

COLUMNS = ("step s", "staleness", "largest", "waste", "slow decile", "reward", "evicted/step", "learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Result of a search, with its recording and fit."""

    recording: Recording
    fit: Fit
    base: SimulationPlan
    searched: SearchResult
    outside_agent: float | None = None
    """Share of the time that slow rollouts took above typical and spent outside the agent; None if unknown."""

    @property
    def chosen(self) -> Trial:
        return self.searched.chosen

    def finals(self) -> list[Trial]:
        """Return the final trials, fastest first."""
        return sorted(self.searched.finals, key=lambda trial: (trial.step_s, trial.candidate))

    def toml(self) -> str:
        """Return the lines to paste into the recipe."""
        candidate, recorded = self.chosen.candidate, recorded_candidate(self.base)
        buffer: dict[str, object] = {
            "mode": "async",
            "rule": candidate.rule,
            "unfinished": candidate.unfinished,
            "max_staleness": candidate.max_staleness,
        }
        if candidate.over_issue:
            buffer["group_size"] = self.base.group_size + candidate.over_issue
        if self.recording.capped:
            buffer["max_in_flight"] = candidate.slots
        lines = ["[buffer]", *(f"{key} = {orjson.dumps(value).decode()}" for key, value in buffer.items())]
        if candidate.slots != recorded.slots:
            lines += ["", "[dispatcher]", f"slots_per_worker = {-(-candidate.slots // self.recording.workers)}"]
        return "\n".join(lines) + "\n"

    def lines(self) -> list[str]:
        """Return a summary of the recording and the prediction."""
        fit, recorded = self.fit, self.searched.recorded
        before, after = self.searched.recorded_prediction, self.searched.chosen_prediction
        measured = f", {self.recording.step_s:.3g} s measured" if self.recording.step_s else ""
        attempts = f"{fit.finished} attempts finished and {fit.unfinished} did not, on {fit.tasks} tasks"
        means = f"mean {fit.mean_s:.3g} s ({fit.naive_mean_s:.3g} s if only finished ones count)"
        chosen = f"chosen ({self.chosen.candidate.label()}): {_spread(after)} per step predicted"
        lines = []
        if self.outside_agent is not None:
            lines.append(
                f"{self.outside_agent:.0%} of the time that slow rollouts took above typical was spent outside the "
                f"agent, where no acceptance rule helps: see `headrace trace slow {self.recording.source}`"
            )
        lines += [
            f"{attempts}: {means}; {fit.durations.task_share:.0%} of the variance is due to the task",
            f"recorded setting ({recorded.candidate.label()}): {_spread(before)} per step predicted{measured}",
            f"{chosen}, {before.step_s / after.step_s:.2f} times as fast",
        ]
        if self.chosen == recorded:
            lines.append("no other setting beats the recorded one by more than the variation between seeds: keep it")
        if fit.beyond > 0.01:
            lines.append(
                f"{fit.beyond:.1%} of attempts take longer than any finished one and follow a fitted lognormal; "
                "record a longer run for better data"
            )
        if self.chosen.candidate.slots > self.base.slots:
            lines.append("durations were recorded at a lower load: with more slots the engines may be slower")
        return lines

    def table(self) -> Table:
        table = Table("", "setting", box=None)
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for trial in self.finals():
            style = "bold" if trial == self.chosen else None
            table.add_row(self.mark(trial), trial.candidate.label(), *cells(trial), style=style)
        return table

    def mark(self, trial: Trial) -> str:
        """Return the mark of a trial: `>` chosen, `=` recorded, `*` on the Pareto front."""
        if trial == self.chosen:
            return ">"
        if trial == self.searched.recorded:
            return "="
        return "*" if trial in pareto_front(self.searched.finals) else ""

    def to_json(self) -> dict[str, Any]:
        front = pareto_front(self.searched.finals)
        return {
            "source": self.recording.source,
            "fit": self.fit.to_json(),
            "outside_agent": self.outside_agent,
            "recorded_step_s": self.recording.step_s,
            "recorded": self.searched.recorded.to_json(),
            "recorded_prediction": asdict(self.searched.recorded_prediction),
            "chosen": self.chosen.to_json(),
            "chosen_prediction": asdict(self.searched.chosen_prediction),
            "toml": self.toml(),
            "trials": [trial.to_json() | {"on_front": trial in front} for trial in self.finals()],
            "screened": [trial.to_json() for trial in self.searched.screened],
            "failed": [asdict(failed) for failed in self.searched.failed],
            "plan": self.base.model_dump(mode="json", exclude={"durations", "chances"}),
        }


def _spread(prediction: Prediction) -> str:
    """Return a prediction with its range over seeds, e.g. `26.1 s (25.2 to 27.3 s)`."""
    return f"{prediction.step_s:.3g} s ({prediction.least_s:.3g} to {prediction.greatest_s:.3g} s)"


def cells(trial: Trial) -> tuple[str, ...]:
    """Return the cells of a trial's table row, one string for each of `COLUMNS`."""
    return (
        f"{trial.step_s:.3g}",
        f"{trial.mean_staleness:.2f}",
        str(trial.max_staleness),
        f"{trial.waste:.1%}",
        f"{trial.slow_share:.2f}",
        f"{trial.reward_bias:+.3f}",
        f"{trial.evictions:.2f}",
        f"{trial.learner_share:.0%}",
    )
