"""The bench of off-policy training, `scripts/bench staleness`: the quickstart under several bounds and corrections.

In the quickstart itself the learner waits for rollouts, so that they are hardly stale, whatever the bound. Here the
agent's last tool call is long, and as many rollouts are in flight as the bound allows. With a bound of 0 nothing can
become stale, and every step would wait for the latest agent, so agents are not late there.

Invariants:
- Each run is one of the command line, with real sandboxes, engines, pushes and learner.
- The figures are read from the run's summary and metrics.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from headrace.actors.errors import ActorLost
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory

RECIPE: Final = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.toml"
BATCH: Final = 64
HELD_OUT: Final = 128
"""Held-out answers, all of them at once: 32 tasks, four times each."""
UNBOUNDED: Final = 1e9
PUNCTUAL_S: Final = 0.01
_NO_CLIP: Final = ("learner.eps_low=1", f"learner.eps_high={UNBOUNDED:g}")
CORRECTIONS: Final = {
    "clip and cap": ("learner.correction=cap",),
    "cap": (*_NO_CLIP, "learner.correction=cap"),
    "none": (*_NO_CLIP, "learner.correction=none"),
}
"""What bounds the ratio current / behaviour: PPO's clip and the cap of 2, the cap alone, or nothing."""


def measure(
    folder: Path,
    *,
    bounds: Sequence[int],
    corrections: Sequence[str],
    steps: int,
    late_s: float,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run every combination after the other, and return its figures. Raises ActorLost when a run does not end."""
    runs = []
    for bound in bounds:
        for correction in corrections:
            runs.append(_run(folder, bound, correction, steps=steps, late_s=late_s, seed=seed))
            say(json.dumps(runs[-1]))
    return {"steps": steps, "late_s": late_s, "seed": seed, "runs": runs}


def _run(folder: Path, bound: int, correction: str, *, steps: int, late_s: float, seed: int) -> dict[str, Any]:
    in_flight = BATCH * (bound + 1)
    keys = (
        *(f"training.steps={steps}", f"training.save_every={steps}", f"service.seed={seed}"),
        *("evaluation.every_steps=0", "evaluation.tasks=32", "evaluation.samples=4"),
        *(f"buffer.max_staleness={bound}", f"buffer.mode={'async' if bound else 'sync'}"),
        *(f"dispatcher.slots_per_worker={in_flight}", f"dispatcher.evaluation_slots={HELD_OUT}"),
        *(f"sandbox.pool.max_live={in_flight + 2 * HELD_OUT}", "rollout.agent_timeout_s=300"),
        *("agent.kind=benches.late_agent:LateShell", "agent.turns=3"),
        f"agent.settings.mean_s={late_s if bound else PUNCTUAL_S}",
        *CORRECTIONS[correction],
    )
    name = f"bound-{bound}-{correction.replace(' ', '-')}"
    summary = folder / f"{name}.json"
    program = str(Path(sys.executable).with_name("headrace"))
    options = ("--runs-dir", str(folder), "--name", name, "--json", str(summary), "--quiet")
    settings = [word for key in keys for word in ("--set", key)]
    done = subprocess.run([program, "run", str(RECIPE), *options, *settings], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ActorLost(f"run {folder / name} ended with exit code {done.returncode}")
    return {"bound": bound, "correction": correction, **_figures(folder / name, summary)}


def _figures(run: Path, summary: Path) -> dict[str, Any]:
    """Return the figures of one run. Log-ratios are in nats, means over the steps of the second half."""
    document = json.loads(summary.read_text(encoding="utf-8"))
    records = read_metrics(RunDirectory(path=run).metrics, ("step",))
    later = records[len(records) // 2 :]
    means = {
        name: fmean(values) if (values := [record[name] for record in later if record.get(name) is not None]) else None
        for name in ("mean_abs_log_ratio", "clip_fraction", "capped_share", "grad_norm")
    }
    own = [record["mismatch"]["mean_abs_log_ratio"] for record in later if record.get("mismatch")]
    kept = ("base_success", "final_success", "mean_staleness", "max_staleness_seen", "rollouts", "train_wall_s")
    return {name: document[name] for name in kept} | means | {"mismatch": fmean(own) if own else None}
