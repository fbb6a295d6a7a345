"""The releases bench: strangers' repositories, graded as pytest alone decides.

Two adjacent releases of a project on PyPI make a pair: the repository is the older one with the tests of the newer, the
gold patch is the difference in all other files that are text, and the required tests are those that pass in the newer
one. The grader's verdict on each variant of the patch is compared with a run of plain pytest on the host, without
sandbox, plugin or twin.

Invariants:
- Archives and packages come from PyPI through pip, and lie in the state folder only.
- A verdict is written down as soon as it is there; a bench that is started again goes on where the last one ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benches.cheating.cheat_bench import BenchSandboxes
from benches.cheating.repositories import PACKAGES
from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.diff_filter import is_test
from headrace.actors.evaluation.graders.patch_collection import LeftDiff, parse_collected
from headrace.actors.evaluation.graders.repository import grade
from headrace.actors.evaluation.in_sandbox import source
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.parts import BinaryFile
from headrace.buffer.tasks.repositories import RepositorySpec, TestIds
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.local.provider import LocalProvider

PROJECTS: Final = Path(__file__).with_name("released.txt")
PYTEST: Final = "pytest==9.1.1"
PYTHON: Final = "/usr/bin/python3"
WORKDIR: Final = "/workspace/repository"
PAIRS_EACH: Final = 3
MAX_TESTS: Final = 1500
TIMEOUT_S: Final = 150.0
AT_ONCE: Final = 2
COMMIT: Final = (
    "git init -q -b main . && git add -A -f && git -c user.name=a -c user.email=a@example.invalid commit -q -m base "
    "&& chown -R agent:agent ."
)
_PLUGIN: Final = """\
import json, os
phases = {}
def pytest_runtest_logreport(report):
    phases.setdefault(report.nodeid, []).append("xfail" if hasattr(report, "wasxfail") else report.outcome)
def pytest_sessionfinish():
    json.dump(phases, open(os.environ["RESULTS"], "w"))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePair:
    """Two releases of a project, unpacked, and the packages that their tests need."""

    name: str
    before: Path
    after: Path
    packages: Path
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


class Unusable(Exception):
    """A pair that makes no task, with the reason."""


def projects() -> dict[str, list[str]]:
    """Return what the tests of each project need."""
    lines = (line.split() for line in PROJECTS.read_text().splitlines() if not line.startswith("#"))
    return {name: needs for name, *needs in filter(None, lines)}


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ran.returncode != 0:
        raise Unusable(f"pip {arguments[0]}: {(ran.stderr or ran.stdout).strip()[-200:]}")
    return ran.stdout


def final_versions(name: str) -> list[str]:
    """Return the final releases of a project, newest first. Raises Unusable."""
    found = re.search(r"Available versions: (.*)", _pip("index", "versions", name))
    versions = [] if found is None else found[1].split(", ")
    return [version for version in versions if re.fullmatch(r"[\d.]+", version)]


def unpacked(name: str, version: str, state: Path) -> Path:
    """Return the folder of a release's source archive, which is fetched once. Raises Unusable."""
    target = state / "sources" / f"{name}-{version}"
    if target.is_dir():
        return target
    staged = state / "staged" / f"{name}-{version}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    _pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(staged), f"{name}=={version}")
    [archive] = staged.iterdir()
    if archive.suffix == ".zip":
        zipfile.ZipFile(archive).extractall(staged)
    else:
        with tarfile.open(archive) as file:
            file.extractall(staged, filter="data")
    [top] = [path for path in staged.iterdir() if path.is_dir()]
    target.parent.mkdir(parents=True, exist_ok=True)
    top.rename(target)
    return target


def installed(name: str, version: str, needs: list[str], state: Path) -> Path:
    """Return a folder with pytest, what the project and its tests need, and the project's metadata. Raises Unusable."""
    target = state / "packages" / f"{name}-{version}"
    if target.is_dir():
        return target
    staged = state / "staged" / f"packages-{name}-{version}"
    shutil.rmtree(staged, ignore_errors=True)
    _pip("install", "-q", "--no-compile", "--target", str(staged), PYTEST, f"{name}=={version}", *needs)
    own = state / "staged" / f"own-{name}-{version}"
    shutil.rmtree(own, ignore_errors=True)
    _pip("install", "-q", "--no-compile", "--no-deps", "--target", str(own), f"{name}=={version}")
    for path in own.iterdir():  # the repository has its code, and only its metadata are looked up
        if path.is_dir() and path.name != "bin" and not path.name.endswith(".dist-info"):
            shutil.rmtree(staged / path.name, ignore_errors=True)
        elif path.suffix == ".py":
            (staged / path.name).unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return target


def files_of(tree: Path) -> dict[str, Path]:
    """Return the regular files of a tree by relative path, without what building it has left."""
    return {
        path.relative_to(tree).as_posix(): path
        for path in sorted(tree.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and "__pycache__" not in path.parts
        and not any(part.endswith(".egg-info") for part in path.parts)
        and path.name != "PKG-INFO"
    }


def serves_tests(path: str) -> bool:
    return is_test(path, frozenset()) or path.rsplit("/", 1)[-1] in ("conftest.py", "pytest.ini", "tox.ini")


def is_given(name: str, path: Path) -> bool:
    """Whether a file comes with the task: tests, and files that are not text, which no patch of a row can have."""
    return serves_tests(name) or b"\0" in path.read_bytes()[:8000]


def lay(target: Path, code: Path, tests: Path) -> None:
    """Write a repository with the code of one release and the tests of another."""
    shutil.rmtree(target, ignore_errors=True)
    for tree, wants_tests in ((code, False), (tests, True)):
        for name, path in files_of(tree).items():
            if is_given(name, path) is wants_tests:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name)


def plain_pytest(tree: Path, packages: Path, paths: list[str]) -> dict[str, list[str]]:
    """Return the phases of each test by its id, as plain pytest on the host has them. Raises Unusable."""
    plugin, results = tree.parent / "plugin", tree.parent / "results.json"
    plugin.mkdir(exist_ok=True)
    (plugin / "headrace_results.py").write_text(_PLUGIN)
    results.unlink(missing_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tree.parent),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(map(str, (packages, tree, tree / "src", plugin))),
        "RESULTS": str(results),
    }
    command = [PYTHON, "-m", "pytest", "-q", "-p", "headrace_results", "-p", "no:cacheprovider", *paths]
    with open(os.devnull, "r+b") as null:  # noqa: PTH123 - no path of a tree
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return {}
    return json.loads(results.read_bytes()) if results.exists() else {}


def passed(phases: dict[str, list[str]]) -> set[str]:
    """Return the tests that passed, by the ids that SWE-bench writes: without what follows a blank."""
    good = {test for test, found in phases.items() if set(found) == {"passed"}}
    return {test for test in good if " " not in test}


def pair_of(name: str, before: str, after: str, needs: list[str], state: Path) -> ReleasePair:
    """Make a pair, whose tests run three times on the host. Raises Unusable."""
    old, new = unpacked(name, before, state), unpacked(name, after, state)
    tests = [
        path for path in files_of(new) if serves_tests(path) and re.search(r"(^|/)(test_.*|.*_test|tests)\.py$", path)
    ]
    if not tests:
        raise Unusable("the archive has no tests")
    packages = installed(name, after, needs, state)
    tree = state / "host" / f"{name}-{after}" / "tree"
    runs = []
    for code in (new, new, old):
        lay(tree, code, new)
        runs.append(passed(plain_pytest(tree, packages, tests)))
    good, bad = runs[0] & runs[1], runs[2]
    if not good - bad:
        raise Unusable(f"no test tells the releases apart ({len(good)} pass)")
    if len(good) > MAX_TESTS:
        raise Unusable(f"{len(good)} tests are too many")
    return ReleasePair(
        name=f"{name} {before} {after}",
        before=old,
        after=new,
        packages=packages,
        fail_to_pass=tuple(sorted(good - bad)),
        pass_to_pass=tuple(sorted(good & bad)),
    )


def variants(pair: ReleasePair, tree: Path) -> Iterator[str]:
    """Write each variant of the gold patch into the tree of an agent, and yield its name."""
    new = {name: path for name, path in files_of(pair.after).items() if not is_given(name, path)}
    old = {name: path for name, path in files_of(pair.before).items() if not is_given(name, path)}
    changed = sorted(
        name
        for name in new.keys() | old.keys()
        if name not in new or name not in old or new[name].read_bytes() != old[name].read_bytes()
    )

    def begin(names: list[str]) -> None:
        lay(tree, pair.before, pair.after)
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if name in new:
                shutil.copyfile(new[name], tree / name)
            else:
                (tree / name).unlink()

    begin(changed)
    yield "gold"
    for name in changed:
        if name.endswith(".py") and name in new:
            (tree / name).write_bytes((tree / name).read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    yield "crlf"
    begin(changed)
    for name in changed:
        if name in new:
            (tree / name).chmod(0o755)
    yield "modes"
    begin(changed)
    (tree / "picture.png").write_bytes(bytes(range(256)))
    (tree / "link").symlink_to("/etc/passwd")
    yield "binary"
    begin([])
    yield "empty"
    code = [name for name in changed if name.endswith(".py")]
    begin([name for name in changed if name not in code[1::2]])
    yield "half"
    begin(changed)
    if both := [name for name in code if name in new and name in old]:
        _drop_a_hunk(tree, both[-1], old[both[-1]])
    yield "hunk"


def _drop_a_hunk(tree: Path, name: str, before: Path) -> None:
    """Take the last hunk of a file's change back."""
    from difflib import SequenceMatcher

    old, new = before.read_bytes().split(b"\n"), (tree / name).read_bytes().split(b"\n")
    matched = SequenceMatcher(None, old, new, autojunk=False)
    _, a, b, c, d = [code for code in matched.get_opcodes() if code[0] != "equal"][-1]
    (tree / name).write_bytes(b"\n".join([*new[:c], *old[a:b], *new[d:]]))


def collected(base: Path, left: Path) -> LeftDiff:
    """Return the diff of an agent's tree, as the collector of a sandbox makes it."""
    given = json.dumps({"base": str(base), "left": str(left), "caps": [500_000, 1000, 1 << 20]})
    ran = subprocess.run([PYTHON, "-c", source("collect"), given], capture_output=True, check=True, cwd="/")
    return parse_collected(ran.stdout)


def archive_of(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(folder, ".")
    return target


def task_of(pair: ReleasePair, base: Path) -> Task:
    packed = archive_of(base, base.parent / "base.tar")
    data = packed.read_bytes()
    paths = (PACKAGES, WORKDIR, f"{WORKDIR}/src")
    spec = RepositorySpec(
        workdir=WORKDIR,
        grader=TestIds(fail_to_pass=pair.fail_to_pass, pass_to_pass=pair.pass_to_pass),
        prepare=(f"tar -xf /opt/base.tar -C {WORKDIR}", COMMIT),
        environment={"PYTHONPATH": ":".join(paths)},
    )
    return Task(
        id=TaskId(pair.name),
        family="releases",
        instruction="make the tests pass",
        files={f"{WORKDIR}/.keep": ""},
        binary_files={"/opt/base.tar": BinaryFile(file=str(packed), sha256=sha256(data).hexdigest(), size=len(data))},
        evaluator=RepositoryEvaluator(repository=spec, timeout_s=TIMEOUT_S),
    )


async def verdicts_of(pair: ReleasePair, provider: LocalProvider, state: Path) -> list[dict[str, Any]]:
    """Return a row for each variant of a pair: plain pytest's verdict and the grader's."""
    work = state / "work" / pair.name.replace(" ", "-")
    base, left = work / "base", work / "left" / "tree"
    await asyncio.to_thread(lay, base, pair.before, pair.after)
    task = await asyncio.to_thread(task_of, pair, base)
    packages = (await asyncio.to_thread(archive_of, pair.packages, work / "packages.tar")).read_bytes()
    required = {*pair.fail_to_pass, *pair.pass_to_pass}
    paths = sorted({test.partition("::")[0] for test in required})
    baselines, rows = Baselines(work / "untouched"), []
    left.parent.mkdir(parents=True, exist_ok=True)
    for variant in variants(pair, left):
        diff = await asyncio.to_thread(collected, base, left)
        # What the filter drops by its rules never counts: links and binaries.
        phases = await asyncio.to_thread(plain_pytest, left, pair.packages, paths)
        verdict = await grade(task, diff, BenchSandboxes(provider, packages), baselines)
        rows.append(
            {
                "pair": pair.name,
                "variant": variant,
                "plain": float(required <= passed(phases)),
                "reward": verdict.reward,
                "detail": verdict.detail[:400],
            }
        )
    shutil.rmtree(work, ignore_errors=True)
    return rows


class Known:
    """The verdicts of this bench and of those before it, one JSON line each."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, rows: list[dict[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.rows += rows


async def measure(
    state: Path, sample: int | None, progress: Callable[[str], None], seed: int = 0, only: Collection[str] = ()
) -> dict[str, Any]:
    """Grade the pairs that the state folder has no verdicts of (about `sample` verdicts if given, of the projects
    `only` if there are any), and return the figures of all verdicts there. Raises SandboxError."""
    known = Known(state / "verdicts.jsonl")
    named = [(name, needs) for name, needs in projects().items() if not only or name in only]
    random.Random(seed).shuffle(named)
    left, places = sample, asyncio.Semaphore(AT_ONCE)

    async def project(name: str, needs: list[str]) -> None:
        nonlocal left
        async with places:
            try:
                versions = await asyncio.to_thread(final_versions, name)
            except Unusable as error:
                progress(f"{name}: {error}")
                return
            for after, before in pairwise(versions[: PAIRS_EACH + 1]):
                title = f"{name} {before} {after}"
                if (left is not None and left <= 0) or any(row["pair"] == title for row in known.rows):
                    continue
                try:
                    pair = await asyncio.to_thread(pair_of, name, before, after, needs, state)
                    rows = await verdicts_of(pair, provider, state)
                except (Unusable, OSError, ValueError, subprocess.SubprocessError) as error:
                    progress(f"{title}: {error}")
                    rows = [{"pair": title, "variant": "", "plain": None, "reward": None, "detail": str(error)[:200]}]
                known.add(rows)
                left = None if left is None else left - len(rows)
                wrong = sum(row["reward"] != row["plain"] for row in rows)
                progress(f"{title}: {len(rows)} verdicts, {wrong} differ")

    async with LocalProvider() as provider, asyncio.TaskGroup() as group:
        for name, needs in named:
            group.create_task(project(name, needs))
    return figures(known.rows)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    graded = [row for row in rows if row["variant"]]

    def named(select: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [f"{row['pair']} {row['variant']}: {row['detail'][:160]}" for row in graded if select(row)]

    ungradable = named(lambda row: row["reward"] is None)
    refused = named(lambda row: row["plain"] == 1.0 and row["reward"] == 0.0)
    rewarded = named(lambda row: row["plain"] == 0.0 and row["reward"] == 1.0)
    return {
        "verdicts": len(graded),
        "projects": len({row["pair"].split()[0] for row in graded}),
        "pairs": len({row["pair"] for row in graded}),
        "unusable_pairs": sum(not row["variant"] for row in rows),
        "ungradable": round(len(ungradable) / max(1, len(graded)), 3),
        "false_refusals": len(refused),
        "false_rewards": len(rewarded),
        "variants": dict(Counter(row["variant"] for row in graded)),
        "ungradable_ones": ungradable,
        "refused_ones": refused,
        "rewarded_ones": rewarded,
    }
