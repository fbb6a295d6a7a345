"""`scripts/bench NAME --json`: each measurement prints one JSON object on standard output; logs go to standard
error."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print JSON (the only format; the option is for symmetry).")]
QUICKSTART = Path(__file__).resolve().parents[1] / "scripts" / "recipes" / "quickstart.toml"


@app.command()
def sandbox(json: Json = True, repeats: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """CPU of one create and destroy, latency of an exec, boots per second by concurrency, clones, memory while idle
    (local provider, all guarantees on); and the same of bwrap and runc where they are installed."""
    from headrace.sandboxes.measure import measure
    from headrace.sandboxes.peers import measure_peers

    figures = asyncio.run(measure(repeats=repeats))
    _print({**figures, "peers": asyncio.run(measure_peers())})


@app.command()
def orchestration(json: Json = True, rollouts: Annotated[int, typer.Option(min=200)] = 2048) -> None:
    """Ray's CPU and calls per rollout: real dispatcher, worker, pool, evaluator and buffer, an agent that returns at
    once."""
    from headrace.actors.orchestration import measure

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        _print(measure(Path(folder), rollouts=rollouts))


@app.command()
def gateway(json: Json = True) -> None:
    """Processor time and memory of agent-sized turns, bridges beside full re-renders, latency beside a direct
    connection, 2,000 first turns at once."""
    from headrace.serve.measuring.figures import measure

    _print(asdict(measure()))


@app.command()
def control(
    json: Json = True,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 30,
) -> None:
    """The negative control: the quickstart with rewards shuffled over the batch must not learn."""
    from headrace.actors.launch import RunRequest, drive, prepare

    overrides = [
        f"training.steps={steps}",
        "training.rewards=shuffled",
        "evaluation.every_steps=0",
        f"service.seed={seed}",
    ]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        request = RunRequest(recipe=QUICKSTART, runs_dir=Path(folder), name="control", overrides=overrides)
        summary = drive(*prepare(request))
    document = summary.to_json()
    _print({key: document[key] for key in ("base_success", "final_success", "steps", "rollouts", "train_wall_s")})


def _print(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")


def main() -> None:
    from headrace.actors.expected import EXPECTED

    try:
        app(standalone_mode=False)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except EXPECTED as error:
        Console(stderr=True).print(f"bench: {error}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
