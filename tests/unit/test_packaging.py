"""The packages: import order, wheel content, weight of an import, the version."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from import_graph import imported_names

ROOT = Path(__file__).resolve().parents[2]
PAGE_FILES = tuple(ROOT / "actors" / "telemetry" / "page" / name for name in ("templates", "static"))
RANKS = {"sandboxes": 0, "buffer": 0, "policies": 1, "serve": 2, "actors": 3}
PRIMITIVES = "headrace.buffer.primitives"
"""What sandboxes may import of the buffer: file locks and the like, which need nothing else of it."""
HEAVY = ("torch", "sglang", "megatron", "e2b", "transformers", "matplotlib")


def imported_packages(path: Path, allowed: str = "") -> set[str]:
    """Packages of ours that a file imports anywhere in it, type-checking imports included; `allowed` is left out."""
    names = imported_names(ast.parse(path.read_text(encoding="utf-8")))
    ours = (name for name in names if name.startswith("headrace.") and not name.startswith(f"{allowed}."))
    return {name.split(".")[1] for name in ours}


@pytest.mark.parametrize("package", RANKS)
def test_packages_import_only_lower_packages(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for target in imported_packages(path, PRIMITIVES if package == "sandboxes" else "") - {package}:
            assert RANKS[target] < RANKS[package], f"{path.relative_to(ROOT)} imports headrace.{target}"


def test_an_upward_import_is_detected(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f() -> None:\n    from headrace import actors\n    import headrace.serve.gateway.http.gateway\n"
    )
    assert imported_packages(bad) == {"actors", "serve"}


@pytest.mark.whole
def test_the_wheel_contains_exactly_the_source_tree(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    # What an earlier build left in the checkout would be packed too.
    (tmp_path / "extra.cfg").write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    subprocess.run(
        [*command, "--config-settings=--build-option=--quiet", str(ROOT)],
        check=True,
        cwd=tmp_path,
        timeout=100,
        env={**os.environ, "DIST_EXTRA_CONFIG": str(tmp_path / "extra.cfg")},
    )
    [wheel] = tmp_path.glob("headrace-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("headrace/")}
    tree = {
        f"headrace/{path.relative_to(ROOT)}"
        for package in RANKS
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".txt") or path.name == "py.typed" or path.parent in PAGE_FILES
    }
    assert packed == tree


def test_importing_the_packages_imports_nothing_heavy() -> None:
    code = (
        "import sys, headrace.sandboxes, headrace.buffer, headrace.policies, headrace.serve, headrace.actors\n"
        "import headrace.actors.run.config, headrace.actors.run.service, headrace.serve.gateway.http.gateway\n"
        "import headrace.sandboxes.local.provider\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_the_version_is_read_from_the_distribution_metadata() -> None:
    from importlib.metadata import version

    assert version("headrace") == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
