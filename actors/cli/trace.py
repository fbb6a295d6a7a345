"""The commands `headrace trace ...`, which tell where the time of rollouts went."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.output import Json, say, write_json
from headrace.actors.errors import ConfigError

trace_app = typer.Typer(no_args_is_help=True, help="Tell where the time of rollouts went, and why some were slow.")
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]


@trace_app.command()
def slow(
    run_dir: RunPath,
    top: Annotated[int, typer.Option(min=1, help="Number of rollouts to list.")] = 10,
    since: Annotated[int | None, typer.Option(min=0, help="Only rollouts issued at this step or later.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only rollouts issued at this step.")] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Explain the rollouts of held-out evaluations instead of training.")
    ] = False,
    json: Json = None,
) -> None:
    """Name the rollouts that took far longer than their cohort, the costliest first: the part that held each up, the
    factor that slow ones have in common, the seconds by which it delayed a step, and what to change. It reads the
    run directory only, so it works for runs that are over, killed or copied."""
    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.telemetry.slow.reading import read_evaluation_times, read_times
    from headrace.actors.telemetry.slow.terminal_text import chosen, slow_lines
    from headrace.actors.telemetry.slow.verdicts import explain

    # A long run has millions of values and no cycles among them, which collections would search again and again.
    gc.disable()
    read = read_evaluation_times if evaluations else read_times
    report = explain(read(RunDirectory.at(run_dir).path))
    verdicts = chosen(report, since=since, step=step)
    if json is not None:
        write_json(report.to_json(verdicts[:top]), json)
        return
    for line in slow_lines(report, verdicts, top):
        typer.echo(line)


@trace_app.command("show")
def show_rollout(
    run_dir: RunPath,
    rollout: Annotated[
        str, typer.Argument(metavar="A", help="Id of a rollout, or the beginning of one; with B also a range of steps.")
    ],
    other: Annotated[
        str, typer.Argument(metavar="[B]", help="Another rollout, or a range of steps such as 100-150, to compare.")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the drawing as one HTML file that needs no network.")
    ] = None,
    json: Json = None,
) -> None:
    """Draw the timeline of one rollout, with parallel calls beside each other, and its parts beside what is typical of
    its cohort, and say why if it was slow. Of two rollouts or ranges of steps, show the seconds of each part and the
    labels side by side."""
    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.telemetry.slow.reading import times_with
    from headrace.actors.telemetry.slow.terminal_text import place_of_rollout, waterfall, waterfall_lines
    from headrace.actors.telemetry.slow.timelines import read_timelines
    from headrace.actors.telemetry.slow.waterfall_html import waterfall_page

    path = RunDirectory.at(run_dir).path
    if other:
        if html is not None:
            raise ConfigError("--html draws one rollout: leave out --html or the second one")
        _compare(path, rollout, other, json)
        return
    times = times_with(rollout, path)
    row, typical, verdict = waterfall(times, place_of_rollout(times, rollout))
    attempts = read_timelines(path, row.rollout_id)
    if html is not None:
        try:
            page = waterfall_page(row, typical, verdict, attempts, run=run_dir.resolve().name)
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: cannot be written ({error.strerror}); name a file") from error
    if json is not None:
        known = {part: asdict(each) for part, each in typical.items()}
        document = {"rollout": asdict(row), "typical": known, "verdict": verdict and verdict.to_json()}
        write_json(document | {"attempts": [each.to_json() for each in attempts]}, json)
        return
    for line in waterfall_lines(row, typical, verdict, attempts):
        typer.echo(line)


def _compare(run: Path, a: str, b: str, json: Path | None) -> None:
    from headrace.actors.telemetry.slow.comparison import compare
    from headrace.actors.telemetry.slow.reading import read_times

    comparison = compare(read_times(run), a, b)
    if write_json(comparison.to_json(), json):
        return
    for line in comparison.lines():
        typer.echo(line)


@trace_app.command()
def export(
    run_dir: RunPath,
    otlp: Annotated[str | None, typer.Option(help="Send the spans to this OTLP receiver (full URL).")] = None,
    protocol: Annotated[str, typer.Option(help="Protocol of the receiver: http/protobuf or grpc.")] = "http/protobuf",
    perfetto: Annotated[Path | None, typer.Option(help="Write this file for ui.perfetto.dev.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write spans.parquet into this folder.")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Only traces of slow and failed rollouts.")] = False,
) -> None:
    """Export the spans of a run, also of one that is over: to an OpenTelemetry collector, as a file for Perfetto, or as
    Parquet. Spans that could not be read are counted."""
    from headrace.actors.run.launch import reopen
    from headrace.actors.telemetry.spans.attempts import slow_or_failed
    from headrace.actors.telemetry.spans.files import write_parquet, write_perfetto
    from headrace.actors.telemetry.spans.receiver import send_all
    from headrace.actors.telemetry.spans.store import SpanFolder

    targets = [target for target in (otlp, perfetto, parquet) if target is not None]
    if len(targets) != 1:
        raise ConfigError("name one target: --otlp URL, --perfetto FILE or --parquet DIR")
    directory = reopen(run_dir)[1]
    store = SpanFolder.of_run(directory.path)
    spans = store.spans(traces=slow_or_failed(directory.path) if slow else None)
    if perfetto is not None:
        number = write_perfetto(perfetto, spans)
    elif parquet is not None:
        parquet.mkdir(parents=True, exist_ok=True)
        number = write_parquet(parquet / "spans.parquet", spans)
    else:
        assert otlp is not None
        number = send_all(otlp, protocol, spans)
    torn = f"; {store.torn} torn lines were left out" if store.torn else ""
    say(f"{number} spans exported to {targets[0]}{torn}")
