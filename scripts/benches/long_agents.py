"""The bench of half-hour agents in scaled time with the real service, gateway and engines: `scripts/bench longagents`.

Invariants:
- The clocks are those of `scripts/recipes/claude_code.toml`: the workload's clocks are divided by 60, the machine's
  (health, lease, hang) by 10, with a minimum of 2 s; starts, boots and transfers are not scaled.
- Agent and learner wait instead of working; every turn goes through the real gateway to an embedded engine, and every
  step pushes weights into it.
- The figures are read from the ledger and the metrics after the run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headrace.actors.derivation.clocks import gate_wait_s
from headrace.actors.derivation.terms import Terms
from headrace.actors.errors import RunStalled
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig, load_recipe, resolve
from headrace.actors.run.launch import drive, lay_out
from headrace.actors.run.summary import summarize
from headrace.buffer.audit.evidence import read_evidence

SCRIPTS: Final = Path(__file__).resolve().parents[2] / "scripts"
RECIPE: Final = SCRIPTS / "recipes" / "claude_code.toml"
MODEL: Final = SCRIPTS / "models" / "tiny"
WORKLOAD: Final = 60
MACHINE: Final = 10
LEAST_S: Final = 2.0
"""Lower bound on the machine's clocks after scaling."""
AGENT_MINUTES: Final = range(10, 31)
STEP_MINUTES: Final = 4
EVALUATE_MINUTES: Final = 2
STEPS: Final = 12
QUEUE_S: Final = 20.0
"""Queue timeout; together with the boot timeout it must stay below the scaled stall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAgents:
    """Result of the run. `stalls` counts stall warnings and stalls that ended the run, `infra` the training and
    evaluation attempts that ended as infrastructure failures. Seconds are real time."""

    completed: bool
    stalls: int
    infra: int
    max_staleness_seen: int
    max_staleness: int
    steps: int
    rollouts: int
    evaluation_answers: int
    turns: int
    agent_s_mean: float
    agent_s_max: float
    wall_s: float
    clocks_s: dict[str, float]
    ended_by: str
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scaled_clocks(recipe: RunConfig) -> dict[str, dict[str, float]]:
    """Return the clocks of a resolved recipe in scaled time, by table. The other clocks are derived from these: the
    guard from its phases, and the wait for an engine from the engine's start."""

    def machine(seconds: float) -> float:
        return max(LEAST_S, seconds / MACHINE)

    return {
        "rollout": {
            "agent_timeout_s": recipe.rollout.agent_timeout_s / WORKLOAD,
            "evaluate_timeout_s": recipe.rollout.evaluate_timeout_s / WORKLOAD,
            "queue_timeout_s": QUEUE_S,
            "lease_s": machine(recipe.rollout.lease_s),
        },
        "gateway": {"turn_timeout_s": recipe.gateway.turn_timeout_s / WORKLOAD},
        "training": {"stage_timeout_s": recipe.training.stage_timeout_s / WORKLOAD},
        "service": {"stall_s": recipe.service.stall_s / WORKLOAD, "hang_s": machine(recipe.service.hang_s)},
        "engines": {"health_timeout_s": machine(recipe.engines.health_timeout_s)},
        # Must be below the scaled stall clock, as in real time.
        "cluster": {"absent_s": min(recipe.cluster.absent_s, recipe.service.stall_s / WORKLOAD / 1.5)},
    }


def prepare_long_agents(directory: RunDirectory, *, steps: int = STEPS, answers: int | None = None) -> RunConfig:
    """Prepare the run directory; return its configuration. `answers` is the number of answers per evaluation; None uses
    the recipe's number."""
    recipe = load_recipe(RECIPE, [f"model.path={MODEL}"], directory.path)
    clocks = scaled_clocks(recipe)
    minute_s = 60.0 / WORKLOAD
    durations = {"recorded_s": tuple(minutes * minute_s for minutes in AGENT_MINUTES), "cap_s": 30 * minute_s}
    evaluation = recipe.evaluation.model_dump()
    if answers is not None:
        evaluation |= {"tasks": answers, "samples": 1, "every_steps": 0}
    document = {
        **clocks,
        "model": {"path": str(MODEL)},
        "agent": {"kind": "simulated", "simulated": {"durations": durations, "turns": 6}},
        "tasks": {"train_count": 512, "heldout_count": evaluation["tasks"], "evaluate_s": EVALUATE_MINUTES * minute_s},
        "sampling": {"max_tokens_per_turn": 16, "max_context_tokens": 2048},
        "dispatcher": {"slots_per_worker": 64, "evaluation_slots": 64},
        "sandbox": {"provider": "simulated", "pool": {"max_live": 160, "boot_concurrency": 32}},
        "learner": {"kind": "simulated", "simulated": {"step_s": STEP_MINUTES * minute_s}, "token_budget": 2048},
        "training": {**clocks["training"], "steps": steps, "save_every": 4},
        "evaluation": evaluation,
    }
    config = resolve(document, RECIPE, directory.path)
    lay_out(config, directory)
    return config


def measure_long_agents(directory: RunDirectory, config: RunConfig, *, quiet: bool = False) -> LongAgents:
    """Drive the run to its end. A stall is reported as a figure; other errors that end a run are raised."""
    ended_by, completed = "", False
    try:
        completed = drive(config, directory, quiet=quiet).completed
    except RunStalled as error:
        ended_by = str(error)
    return read_long_agents(directory, config, completed=completed, ended_by=ended_by)


def read_long_agents(directory: RunDirectory, config: RunConfig, *, completed: bool, ended_by: str = "") -> LongAgents:
    """Read the figures of a run that has ended. Raises LedgerRefused."""
    summary = summarize(directory, completed=completed)
    metrics, evidence = read_metrics(directory.metrics), read_evidence(directory.path)
    agent_s = [
        sum(seconds for phase, seconds in attempt.phases_s if phase == "agent")
        for attempt in evidence.attempts
        if attempt.offered
    ]
    infra = sum(attempt.cause in ("infra", "evaluator") for attempt in evidence.attempts)
    return LongAgents(
        completed=completed,
        stalls=sum(record["kind"] == "stall" for record in metrics),
        infra=infra + summary.evaluation_infra,
        max_staleness_seen=summary.max_staleness_seen,
        max_staleness=config.buffer.max_staleness,
        steps=summary.steps,
        rollouts=summary.rollouts,
        evaluation_answers=sum(record["answers"] for record in metrics if record["kind"] == "evaluation"),
        turns=sum(attempt.turns or 0 for attempt in evidence.attempts),
        agent_s_mean=sum(agent_s) / len(agent_s) if agent_s else 0.0,
        agent_s_max=max(agent_s, default=0.0),
        wall_s=summary.total_wall_s,
        clocks_s={
            f"{table}.{key}": getattr(getattr(config, table), key)
            for table, keys in scaled_clocks(config).items()
            for key in keys
        }
        | {"rollout.guard_s": config.rollout.guard_s, "gateway.gate_wait_s": gate_wait_s(Terms.of(config))},
        ended_by=ended_by,
        problems=summary.problems,
    )
