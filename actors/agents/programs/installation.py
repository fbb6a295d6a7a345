# ruff: noqa: T201 - a program
"""The installer of agents from npm and PyPI: `scripts/install agents [--all] [--latest] [NAME ...]`.

Invariants:
- An installation appears complete or not at all: it is built in a temporary folder and then renamed. Existing
  installations are never changed: each version has its own folder. A lock allows one installer at a time, which first
  removes anything left behind by killed installers.
- Scripts of npm packages are never run; only files are copied from packages.
- The files are readable and executable for all users, since sandboxes run agents as other users.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headrace.actors.agents.programs import versions
from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.host.child_environment import child_environment

EVERY_RUN: Final = ("claude-code", "codex", "mini-swe-agent")
"""Agents that the default tests need."""
_TIMEOUT_S: Final = 900.0
_ARCHITECTURES: Final = {"x86_64": ("x64", "x86_64"), "aarch64": ("arm64", "aarch64")}
"""Names of each machine architecture in npm packages and in Rust targets."""
_BUILDING, _NPM = ".building-", ".npm-"
_SYSTEM_PYTHON: Final = "/usr/bin/python3"
"""Python interpreter of the image `host`."""


class AgentMissing(Exception):
    """An agent is not installed on this host."""


class InstallFailed(Exception):
    """npm or pip failed, could not reach its registry, or delivered unexpected files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmPackage:
    """An npm package. `version` may be `latest`; `files` maps paths in the package to paths in the installation."""

    name: str
    version: str
    files: Mapping[str, str]


def npm_packages(agent: str, machine: str) -> tuple[NpmPackage, ...]:
    """Return the npm packages of an agent; empty for an agent from PyPI. Raises InstallFailed, KeyError."""
    try:
        short, long = _ARCHITECTURES[machine]
    except KeyError:
        raise InstallFailed(f"there are no agent binaries for {machine}; use x86_64 or aarch64") from None
    codex = f"vendor/{long}-unknown-linux-musl"
    return {
        "claude-code": (
            NpmPackage(
                name=f"@anthropic-ai/claude-code-linux-{short}",
                version=versions.CLAUDE_CODE,
                files={"claude": "claude"},
            ),
        ),
        "codex": (
            NpmPackage(
                name="@openai/codex",
                version=f"{versions.CODEX}-linux-{short}",
                files={
                    f"{codex}/bin": "bin",
                    f"{codex}/codex-path": "codex-path",
                    f"{codex}/codex-package.json": "codex-package.json",
                },
            ),
        ),
        "opencode": (
            NpmPackage(name=f"opencode-linux-{short}", version=versions.OPENCODE, files={"bin/opencode": "opencode"}),
        ),
        "qwen-code": (
            NpmPackage(name="@qwen-code/qwen-code", version=versions.QWEN_CODE, files={".": "qwen-code"}),
            NpmPackage(name=f"node-linux-{short}", version=versions.NODE, files={"bin/node": "node"}),
        ),
        "mini-swe-agent": (),
    }[agent]


PINNED: Final = {
    "claude-code": versions.CLAUDE_CODE,
    "codex": versions.CODEX,
    "mini-swe-agent": versions.MINI_SWE_AGENT,
    "opencode": versions.OPENCODE,
    "qwen-code": f"{versions.QWEN_CODE}-node{versions.NODE}",
}
"""Pinned version of each agent, as it appears in the name of the installation folder."""


def cache_folder() -> Path:
    """Return the folder of all installations."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "agents"


def installed_folder(agent: str) -> Path:
    """Return the folder of the pinned version of an agent. Raises AgentMissing."""
    folder = cache_folder() / f"{agent}-{PINNED[agent]}"
    # The folder for several Python versions is created before the first of them is installed.
    if not folder.is_dir() or not any(folder.iterdir()):
        raise AgentMissing(f"{agent} {PINNED[agent]} is not installed: run `python -m {__name__} {agent}`")
    return folder


def install(agent: str, *, latest: bool = False, python: str | None = None) -> Path:
    """Install an agent if it is missing, and return its folder. `python` is the Python version (`3.12`) in the images
    that mini-swe-agent runs in; it defaults to the version in the image `host`. Raises InstallFailed."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        for left in (*cache.glob(f"{_BUILDING}*"), *cache.glob(f"{_NPM}*")):
            shutil.rmtree(left, ignore_errors=True)
        if agent == "mini-swe-agent":
            return _install_mini(cache, latest=latest, python=python or system_python())
        packages = npm_packages(agent, platform.machine())
        if latest:
            packages = tuple(_newest(package) for package in packages)
        target = cache / "-".join((agent, *map(_label, packages)))
        if not target.is_dir():
            with _building(cache) as building, tempfile.TemporaryDirectory(dir=cache, prefix=_NPM) as prefix:
                for package in packages:
                    _copy_files(package, Path(prefix), building)
                _publish(building, target)
        return target


@contextmanager
def _building(cache: Path) -> Iterator[Path]:
    """Create a temporary folder beside the installations. It is removed on exit unless it has been renamed to an
    installation."""
    folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    """Publish a built folder as an installation that all users can read."""
    if target.is_dir():
        return
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files, "."):
            path = Path(parent, name)
            if not path.is_symlink():
                mode = path.stat().st_mode
                # ripgrep lacks the permission, since the npm script that sets it is not run.
                executable = 0o111 if path.is_dir() or mode & 0o100 or name == "rg" else 0
                path.chmod((mode | 0o444 | executable) & 0o755)
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)


def _label(package: NpmPackage) -> str:
    """Return a package's version for the folder name."""
    return f"node{package.version}" if package.name.startswith("node-") else package.version.partition("-linux-")[0]


def _newest(package: NpmPackage) -> NpmPackage:
    """Return the newest version of a package. Node stays at its pin, and Codex has a version suffix per platform."""
    if package.name.startswith("node-"):
        return package
    version = json.loads(_run(("npm", "view", package.name, "version", "--json")))
    suffix = package.version.removeprefix(versions.CODEX) if package.name == "@openai/codex" else ""
    return replace(package, version=f"{version}{suffix}")


def _copy_files(package: NpmPackage, prefix: Path, building: Path) -> None:
    options = ("--ignore-scripts", "--omit=optional", "--no-save", "--no-package-lock", "--no-audit", "--no-fund")
    # By default npm would retry for 70 s without a registry.
    patience = ("--fetch-retries=2", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")
    _run(("npm", "install", "--prefix", str(prefix), *options, *patience, f"{package.name}@{package.version}"))
    unpacked = prefix / "node_modules" / package.name
    for source, target in package.files.items():
        try:
            shutil.move(unpacked / source, building / target)
        except OSError as error:
            raise InstallFailed(f"{package.name} {package.version}: the package has no {source} ({error})") from error


def _install_mini(cache: Path, *, latest: bool, python: str) -> Path:
    """Install the packages for one Python version beside those for other versions."""
    folder = cache / f"mini-swe-agent-{versions.MINI_SWE_AGENT}"
    if not latest and (folder / f"py{python}").is_dir():
        return folder
    with _building(cache) as building:
        if latest:
            _pip(building, python, ("mini-swe-agent", "litellm", "mcp"))
            [metadata] = building.glob("mini_swe_agent-*.dist-info")
            folder = cache / metadata.name.removesuffix(".dist-info").replace("_", "-")
        else:
            _pip(building, python, ("--no-deps", *versions.mini_swe_agent_requirements()))
        _publish(building, folder / f"py{python}")
    return folder


def _pip(target: Path, python: str, arguments: Sequence[str]) -> None:
    """Install binary packages for a Python version and compile them, since sandboxes could not store compiled files."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-warn-script-location", "--no-compile")
    place = ("--target", str(target), "--python-version", python, "--only-binary=:all:")
    _run((sys.executable, "-m", "pip", "install", *quiet, *place, *arguments))
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    compiler = sys.executable if python == ours else shutil.which(f"python{python}")
    if compiler is not None:
        # Not checked: some packages have files for other Python versions, which do not compile.
        command = (compiler, "-m", "compileall", "-qq", str(target))
        subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S, env=child_environment())


def system_python() -> str:
    """Return the Python version of the image `host`, e.g. `3.11`."""
    program = _SYSTEM_PYTHON if Path(_SYSTEM_PYTHON).exists() else sys.executable
    return _run((program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")).strip()


def _run(command: Sequence[str]) -> str:
    """Run a command and return its standard output. Raises InstallFailed with its error lines."""
    try:
        environment = child_environment()
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = " ".join(line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower())
        # npm prints the reason first, pip last.
        ends = said if len(said) <= 400 else f"{said[:200]} ... {said[-200:]}"
        raise InstallFailed(f"{' '.join(command[:4])} ... failed with exit code {done.returncode}: {ends}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Install agents. Returns 0 if all are installed, else 1, with the reasons on standard error."""
    parser = argparse.ArgumentParser(prog="scripts/install agents", description="Installs agents from npm and PyPI.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"agents: {', '.join(PINNED)}; by default {', '.join(EVERY_RUN)}"
    )
    parser.add_argument("--all", action="store_true", help="install all agents")
    parser.add_argument("--latest", action="store_true", help="install the newest versions instead of the pinned ones")
    parser.add_argument("--python", metavar="X.Y", help="Python version of the task image (only for mini-swe-agent)")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(PINNED)):
        parser.error(f"{', '.join(unknown)}: unknown agent; choose from {', '.join(PINNED)}")
    failed = False
    for agent in PINNED if given.all else given.names or EVERY_RUN:
        try:
            print(install(agent, latest=given.latest, python=given.python))
        except InstallFailed as error:
            failed = True
            print(f"{agent} is not installed: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
