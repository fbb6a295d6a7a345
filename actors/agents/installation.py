# ruff: noqa: T201 - a program
"""Installs agents from npm and PyPI into the user's cache: `scripts/install_agents [--all] [--latest] [NAME ...]`.

Invariants:
- An installation appears complete or not at all: it is built beside its place and renamed. What is there stays as it
  is: another version is another folder. One installer works at a time, and first removes what a killed one left.
- npm's scripts are never run; what is taken out of its packages are files.
- Everybody may read and run the files: sandboxes show them to users of their own.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.actors.agents import versions
from headrace.buffer.primitives.file_lock import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

EVERY_RUN: Final = ("claude-code", "codex", "mini-swe-agent")
"""Those that the ordinary tests need."""
_TIMEOUT_S: Final = 900.0
_ARCHITECTURES: Final = {"x86_64": ("x64", "x86_64"), "aarch64": ("arm64", "aarch64")}
"""By machine: as npm packages and as Rust's targets call it."""
_BUILDING, _NPM = ".building-", ".npm-"
_SYSTEM_PYTHON: Final = "/usr/bin/python3"
"""Of the image `host`."""


class AgentMissing(Exception):
    """An agent is not installed on this host."""


class InstallFailed(Exception):
    """npm or pip could not be run, could not reach its registry, or did not deliver what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmPackage:
    """`version` may be `latest`. `files` maps paths in the package to paths in the installation."""

    name: str
    version: str
    files: Mapping[str, str]


def npm_packages(agent: str, machine: str) -> tuple[NpmPackage, ...]:
    """What an agent is made of; empty for one that comes from PyPI. Raises InstallFailed, KeyError."""
    try:
        short, long = _ARCHITECTURES[machine]
    except KeyError:
        raise InstallFailed(f"no agent is built for {machine}") from None
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
"""Names of the installations' folders, after the agent's."""


def cache_folder() -> Path:
    """Where agents are installed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "agents"


def installed_folder(agent: str) -> Path:
    """The pinned version of an agent on this host. Raises AgentMissing."""
    folder = cache_folder() / f"{agent}-{PINNED[agent]}"
    # That of packages for several versions of Python is made before the first of them is in it.
    if not folder.is_dir() or not any(folder.iterdir()):
        raise AgentMissing(f"{agent} {PINNED[agent]} is not installed: run `scripts/install_agents {agent}`")
    return folder


def install(agent: str, *, latest: bool = False, python: str | None = None) -> Path:
    """The folder of an agent, installed if it is not there. `python` is a version (`3.12`) of the images that
    mini-swe-agent is to run in; by default that of the image `host`. Raises InstallFailed."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache):
        if agent == "mini-swe-agent":
            return _install_mini(cache, latest=latest, python=python or system_python())
        return _install_npm(agent, cache, latest=latest)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    with FileLock(cache / ".lock"):
        for left in (*cache.glob(f"{_BUILDING}*"), *cache.glob(f"{_NPM}*")):
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def _building(cache: Path) -> Iterator[Path]:
    """A new folder beside the installations; gone at the end unless it became one."""
    folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    if not target.is_dir():
        _open_to_all(folder)
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)


def _open_to_all(folder: Path) -> None:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files, "."):
            path = Path(parent, name)
            if not path.is_symlink():
                mode = path.stat().st_mode
                # ripgrep comes without the permission where a script of npm's would give it.
                executable = 0o111 if path.is_dir() or mode & 0o100 or name == "rg" else 0
                path.chmod((mode | 0o444 | executable) & 0o755)


def _install_npm(agent: str, cache: Path, *, latest: bool) -> Path:
    packages = npm_packages(agent, platform.machine())
    if latest:
        packages = tuple(_newest(package) for package in packages)
    target = cache / "-".join((agent, *map(_label, packages)))
    if not target.is_dir():
        with _building(cache) as building, tempfile.TemporaryDirectory(dir=cache, prefix=_NPM) as prefix:
            for package in packages:
                _take(package, Path(prefix), building)
            _publish(building, target)
    return target


def _label(package: NpmPackage) -> str:
    """Its version in the folder's name."""
    return f"node{package.version}" if package.name.startswith("node-") else package.version.partition("-linux-")[0]


def _newest(package: NpmPackage) -> NpmPackage:
    """Node stays: it is no agent. The platform's package of Codex is a version with a suffix of the same package."""
    if package.name.startswith("node-"):
        return package
    version = json.loads(_run(("npm", "view", package.name, "version", "--json")))
    suffix = package.version.removeprefix(versions.CODEX) if package.name == "@openai/codex" else ""
    return replace(package, version=f"{version}{suffix}")


def _take(package: NpmPackage, prefix: Path, building: Path) -> None:
    options = ("--ignore-scripts", "--omit=optional", "--no-save", "--no-package-lock", "--no-audit", "--no-fund")
    # By default it would try for 70 s where there is no registry.
    patience = ("--fetch-retries=2", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")
    _run(("npm", "install", "--prefix", str(prefix), *options, *patience, f"{package.name}@{package.version}"))
    unpacked = prefix / "node_modules" / package.name
    for source, target in package.files.items():
        try:
            shutil.move(unpacked / source, building / target)
        except OSError as error:
            raise InstallFailed(f"{package.name} {package.version}: no {source} in the package ({error})") from error


def _install_mini(cache: Path, *, latest: bool, python: str) -> Path:
    """Packages for one version of Python, beside those for others."""
    folder = cache / f"mini-swe-agent-{versions.MINI_SWE_AGENT}"
    if not latest and (folder / f"py{python}").is_dir():
        return folder
    with _building(cache) as building:
        if latest:
            _pip(building, python, ("mini-swe-agent", "litellm", "mcp"))
            [metadata] = building.glob("mini_swe_agent-*.dist-info")
            folder = cache / metadata.name.removesuffix(".dist-info").replace("_", "-")
        else:
            _pip(building, python, ("--no-deps", *versions.MINI_SWE_AGENT_REQUIREMENTS))
        _publish(building, folder / f"py{python}")
    return folder


def _pip(target: Path, python: str, arguments: Sequence[str]) -> None:
    """Install binary packages for that Python and compile them: sandboxes could not keep what they compile."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-warn-script-location", "--no-compile")
    place = ("--target", str(target), "--python-version", python, "--only-binary=:all:")
    _run((sys.executable, "-m", "pip", "install", *quiet, *place, *arguments))
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    compiler = sys.executable if python == ours else shutil.which(f"python{python}")
    if compiler is not None:
        # Some packages hold files for other versions of Python, which do not compile.
        command = (compiler, "-m", "compileall", "-qq", str(target))
        subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S)


def system_python() -> str:
    """The version, as in `3.11`, of the Python that the image `host` has."""
    program = _SYSTEM_PYTHON if Path(_SYSTEM_PYTHON).exists() else sys.executable
    return _run((program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")).strip()


def _run(command: Sequence[str]) -> str:
    """Its standard output. Raises InstallFailed with the end of what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = " ".join(line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower())
        # npm begins with the reason, pip ends with it.
        ends = said if len(said) <= 400 else f"{said[:200]} ... {said[-200:]}"
        raise InstallFailed(f"{' '.join(command[:4])} ... ended with {done.returncode}: {ends}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. 0 when all that was asked for is installed, 1 otherwise, with the reasons on standard error."""
    parser = argparse.ArgumentParser(prog="scripts/install_agents", description="Installs agents from npm and PyPI.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(PINNED)}; {', '.join(EVERY_RUN)} if none"
    )
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--latest", action="store_true", help="the newest versions instead of the pinned ones")
    parser.add_argument("--python", metavar="X.Y", help="the image's Python, for mini-swe-agent")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(PINNED)):
        parser.error(f"{', '.join(unknown)}: no such agent; there are {', '.join(PINNED)}")
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
