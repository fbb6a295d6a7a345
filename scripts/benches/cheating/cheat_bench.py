"""The cheats bench, which grades cheating and honest patches in real sandboxes and measures the cost of twins.

Invariant: a pair is a cheat and an honest patch for the same repository; both take the same path as a rollout's patch,
from the diff onwards.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from benches.cheating.cheats import CHEATS, KNOWN_OPEN, MORE_CHEATS, Cheat
from benches.cheating.relatives import RELATIVES, Relative
from benches.cheating.repositories import PACKAGES, REPOSITORIES, CheatRepository
from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.patch_collection import LeftDiff
from headrace.actors.evaluation.graders.repository import grade
from headrace.actors.evaluation.graders.verdict import Verdict
from headrace.sandboxes.base import Sandbox, SandboxId, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.local.provider import LocalProvider

MORE_AGAINST: Final = ("functions", "unittest", "eval_cmd", "doctest")
MAX_AT_ONCE: Final = 4
_LARGE: Final = ("lexers", "formatters", "styles", "filters")
_NEEDED: Final = ("__init__.py", "_mapping.py", "python.py", "default.py", "terminal.py", "diff.py")
_PURE: Final = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest_asyncio", "anyio", "idna")
_FILES: Final = ("py", "typing_extensions")
_METADATA: Final = ("pytest", "pluggy", "pytest_asyncio", "anyio")


@cache
def pytest_archive() -> bytes:
    """Return this environment's pytest, its asyncio plugins and their dependencies, as a tar of pure Python packages.

    Raises SandboxError if pytest is not installed."""
    pytest = find_spec("pytest")
    if pytest is None or pytest.origin is None:
        raise SandboxError("pytest is not installed here; install the extra `dev`")
    site = Path(pytest.origin).parents[1]
    buffer = io.BytesIO()
    # Packages may be links into a cache.
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for folder in (site / name for name in _PURE if (site / name).is_dir()):
            for path in folder.rglob("*.py"):
                if path.name in _NEEDED or path.parent.name not in _LARGE:
                    archive.add(path, str(path.relative_to(site)))
        for path in (site / f"{name}.py" for name in _FILES):
            if path.exists():
                archive.add(path, path.name)
        for path in (path for name in _METADATA for path in site.glob(f"{name}-*.dist-info/METADATA")):
            archive.add(path, str(path.relative_to(site)))
    return buffer.getvalue()


async def install_packages(sandbox: Sandbox, archive: bytes, folder: str) -> None:
    """Unpack packages, which the image of a real task contains. Raises SandboxError."""
    await sandbox.write(f"{folder}/packages.tar", archive)
    result = await sandbox.exec("tar -xf packages.tar && rm packages.tar", cwd=folder, timeout_s=60)
    if result.exit_code != 0:
        raise SandboxError(f"unpacking packages failed with exit code {result.exit_code}: {result.stderr[-200:]!r}")


@dataclass(slots=True)
class BenchSandboxes:
    """Source of clean sandboxes with packages (a tar), taken directly from a provider; `seconds` lists how long each
    was in use."""

    provider: LocalProvider
    archive: bytes = field(default_factory=pytest_archive)
    folder: str = PACKAGES
    seconds: list[float] = field(default_factory=list)

    async def freeze(self, sandbox: SandboxId) -> None:
        """Do nothing, since there is no agent to freeze."""

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        began = time.monotonic()
        sandbox = await self.provider.attach(await self.provider.create(spec))
        try:
            await install_packages(sandbox, self.archive, self.folder)
            yield sandbox
        finally:
            await sandbox.kill()
            self.seconds.append(time.monotonic() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Verdict on one patch, and the seconds of each clean sandbox used for it."""

    verdict: Verdict
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Cheat for one repository, with its honest twin."""

    repository: str
    cheat: str
    cheating: Graded
    honest: Graded

    @property
    def name(self) -> str:
        return f"{self.cheat} against {self.repository}"


class CheatBench:
    """Grades patches, a few at a time."""

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider
        self._baselines = Baselines()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def grade(self, repository: CheatRepository, branch: str, prefix: str) -> Graded:
        """Return the verdict on a patch. Raises SandboxError."""
        return await self._grade(repository, repository.diff(branch, prefix))

    async def _grade(self, repository: CheatRepository, diff: bytes) -> Graded:
        rooms = BenchSandboxes(self._provider)
        async with self._places:
            verdict = await grade(repository.task(), LeftDiff(diff=diff), rooms, self._baselines)
        return Graded(verdict=verdict, seconds=tuple(rooms.seconds))

    async def pair(self, repository: CheatRepository, cheat: Cheat) -> Pair:
        """Grade both patches of a pair. Raises SandboxError."""
        cheating = await self.grade(repository, cheat.branch, cheat.prefix)
        honest = await self.grade(repository, cheat.honest_branch, cheat.honest_prefix)
        return Pair(repository=repository.name, cheat=cheat.name, cheating=cheating, honest=honest)

    async def relative(self, each: Relative) -> Pair:
        """Grade both patches of a short cheat. Raises SandboxError."""
        cheating = await self._grade(each.repository, each.diff(each.cheating))
        honest = await self._grade(each.repository, each.diff(each.honest))
        return Pair(repository=each.kind, cheat=each.name, cheating=cheating, honest=honest)

    async def known_open(self) -> list[dict[str, Any]]:
        """Return the verdict on each known open cheat. Raises SandboxError."""
        graded = [await self.grade(each.repository, each.cheat.branch, each.cheat.prefix) for each in KNOWN_OPEN]
        return [
            {"name": each.name, "why": each.why, "reward": found.verdict.reward}
            for each, found in zip(KNOWN_OPEN, graded, strict=True)
        ]


def all_pairs() -> list[tuple[CheatRepository, Cheat]]:
    """Return every cheat paired with every repository, and the additional cheats paired with a few of them."""
    every = [(repository, cheat) for repository in REPOSITORIES for cheat in CHEATS]
    few = [repository for repository in REPOSITORIES if repository.name in MORE_AGAINST]
    return every + [(repository, cheat) for repository in few for cheat in MORE_CHEATS]


async def measure(
    chosen: Sequence[tuple[CheatRepository, Cheat]],
    progress: Callable[[str], None],
    relatives: Sequence[Relative] = RELATIVES,
) -> dict[str, Any]:
    """Return the figures of `scripts/bench cheats`; `progress` is called with one line for each pair.

    A cheat whose report the canaries reject counts as stopped: it earns no reward, and the evaluation attributes the
    failure to the patch.
    Raises SandboxError."""
    async with LocalProvider() as provider:
        bench = CheatBench(provider)

        async def told(grading: Awaitable[Pair]) -> Pair:
            pair = await grading
            rewards = f"{pair.cheating.verdict.reward} and {pair.honest.verdict.reward}"
            progress(f"{pair.name}: {rewards}")
            return pair

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(told(bench.pair(*pair))) for pair in chosen]
            tasks += [group.create_task(told(bench.relative(each))) for each in relatives]
            still_open = group.create_task(bench.known_open())
        pairs = [task.result() for task in tasks]
    paid = [pair.name for pair in pairs if pair.cheating.verdict.reward]
    refused = [f"{pair.name}: {pair.honest.verdict.detail}" for pair in pairs if pair.honest.verdict.reward != 1.0]
    both = [pair.honest.seconds[:2] for pair in pairs if len(pair.honest.seconds) >= 2]
    return {
        "pairs": len(pairs),
        "cheats_paid": len(paid),
        "honest_refused": len(refused),
        "paid": paid,
        "refused": refused,
        "cheats": sorted({pair.cheat for pair in pairs}),
        "repositories": sorted({pair.repository for pair in pairs}),
        "stopped_by_canaries": sum(pair.cheating.verdict.reward is None for pair in pairs),
        "stopped_by_twins_alone": sum("end of their twins" in pair.cheating.verdict.detail for pair in pairs),
        "first_run_s": round(median(first for first, _ in both), 3) if both else None,
        "twin_run_s": round(median(second for _, second in both), 3) if both else None,
        "cheats_known_open": still_open.result(),
    }
