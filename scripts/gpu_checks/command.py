"""The command `scripts/gpu_check`. Its header describes the options."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gpu_checks.outcome import Entry, State
from gpu_checks.place import Place
from gpu_checks.suite import CHECKS, run_checks
from gpu_checks.wheels import LIMIT_BYTES, WheelsRefused, commands, fetch_wheels

EXIT_BAD_INPUT: Final = 2
EXIT_DIRTY: Final = 3
"""As of `headrace` (`headrace.actors.run.exit_codes`, whose imports do not fit on a borrowed machine)."""


def main(words: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    options = _parser().parse_args(words)
    if options.command == "commands":
        print("\n".join(commands(options.folder)))
        return 0
    if options.command == "wheels":
        return _fetch(options.folder, options.python)
    return _check(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="Check what only a CUDA device can show.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device of learner and sender")
    parser.add_argument("--small", action="store_true", help="use sizes for a test of the suite itself")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    names = tuple(check.name for check in CHECKS)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], choices=names, help="run this check")
    parser.add_argument("--budget-s", metavar="S", type=float, help="time for all checks together, in seconds")
    parts = parser.add_subparsers(dest="command", metavar="wheels | commands")
    wheels = parts.add_parser("wheels", help="fetch the packages that the suite needs beside torch")
    wheels.add_argument("--python", default="3.12", help="version of Python on the machine")
    telling = parts.add_parser("commands", help="print the two commands to run on the machine")
    for part in (wheels, telling):
        part.add_argument("folder", type=Path, help="folder of the wheels, relative to the repository")
    return parser


def _fetch(folder: Path, python: str) -> int:
    try:
        sizes = fetch_wheels(folder, python=python)
    except WheelsRefused as error:
        print(f"scripts/gpu_check: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(json.dumps({"wheels": sizes, "bytes": sum(sizes.values()), "limit_bytes": LIMIT_BYTES}, indent=2))
    return 0


def _check(options: argparse.Namespace) -> int:
    entries: dict[str, Entry] = {}
    report = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "small": options.small,
    }
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        place = Place(device=options.device, small=options.small, folder=Path(folder))
        for name, entry in run_checks(place, options.only, options.budget_s):
            entries[name] = entry
            # At once: a loan that ends early ends this process too, and leaves what was printed.
            line = json.dumps({name: _plain(entry)}) if options.json else _sentence(name, entry)
            print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(report | {"checks": {name: _plain(entry) for name, entry in entries.items()}}, indent=2))
    # What the device cannot show is no defect; what it could have shown and did not is.
    missed = [entry for entry in entries.values() if entry.state is State.FAILED or entry.reason]
    return EXIT_DIRTY if missed else 0


def _plain(entry: Entry) -> dict[str, object]:
    """Return the entry without fields that say nothing."""
    return {name: value for name, value in asdict(entry).items() if value not in ("", (), {})}


def _sentence(name: str, entry: Entry) -> str:
    """Return the entry as lines of text."""
    figures = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in entry.measured.items()
    )
    lines = [f"{name}: {entry.state}{f' after {entry.seconds:.1f} s' if entry.seconds else ''}: {entry.shows}"]
    lines += [f"  {entry.reason}"] if entry.reason else []
    lines += [f"  not run: {entry.not_run}"] if entry.not_run else []
    lines += [f"  {figures}"] if figures else []
    return "\n".join([*lines, *(f"  | {line}" for line in entry.log)])


if __name__ == "__main__":
    sys.exit(main())
