"""The command `scripts/generate`: writes files that follow from the code, or checks that they are up to date.

Invariants:
- The files of a name are the same in every process, so that a test compares them. Golden files are not compared: tests
  read those that are there, and a change of a format replaces them, by name only.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPARED = {
    "cli": "generators.cli",
    "config": "generators.config",
    "metrics": "generators.metrics",
    "panel": "generators.panel",
    "recipes": "generators.recipes",
}
"""Modules whose `render` returns the files of a name by their paths."""
GOLDEN = ("golden_config", "golden_ledger")
MONITORING = "monitoring"


def files_of(name: str) -> dict[Path, str]:
    """Return the content of the files of a name by their paths."""
    files: dict[Path, str] = import_module(COMPARED[name]).render()
    return files


def stale(names: list[str]) -> list[Path]:
    """Return the files of these names that are not what the code gives."""
    files = [item for name in names for item in files_of(name).items()]
    return [path for path, text in files if not path.is_file() or path.read_text(encoding="utf-8") != text]


def make_golden(name: str) -> Path:
    """Write one of the golden files, and return its path."""
    if name == "golden_config":
        path: Path = import_module("golden.make_config").make()
        return path
    path = ROOT / "tests" / "golden" / "ledger"
    shutil.rmtree(path, ignore_errors=True)
    asyncio.run(import_module("golden.make_ledger").make(path))
    (path / "ledger.lock").unlink()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/generate", description="Writes files that follow from the code.")
    choices = ", ".join([*COMPARED, *GOLDEN, f"{MONITORING} (with --out)"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=choices)
    parser.add_argument("--out", type=Path, help="folder for the files of `monitoring`, which are not kept here")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")
    options = parser.parse_args()
    if options.names == [MONITORING] and options.out is not None:
        import_module("monitoring_files").write(options.out)
        return
    known = [*COMPARED, *([] if options.check else GOLDEN)]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]}: choose from {', '.join(known)}")
    names = options.names or list(COMPARED)
    if options.check:
        for path in (found := stale(names)):
            print(f"{path.relative_to(ROOT)} is not up to date: run scripts/generate", file=sys.stderr)
        sys.exit(bool(found))
    for name in names:
        if name in GOLDEN:
            print(make_golden(name).relative_to(ROOT))
            continue
        for path, text in files_of(name).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
