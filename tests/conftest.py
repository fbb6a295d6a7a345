"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis  # imported late, deep in pytest's stack, Python 3.11 cannot compile it for the first time
import pytest

from headrace.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from support.chat_templates import FAT, QWEN3
from support.tiny_model import write_tiny_model

# A busy machine is no defect: neither an example nor its drawing has a clock.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Processes that tests start, Ray's workers among them, import `support`, and `benches` as scripts/bench does.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT / "scripts"), str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
)

# A lost query to a name server costs torch's store one second, and not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

WHOLE = ("integration", "faults")
"""Folders of which scripts/test runs only what is marked `core`; of the others it leaves out what is marked `whole`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("core", "rest"), help="core: what plain scripts/test runs; rest: all but that")


def missing_on_this_machine() -> str:
    """Return what no test can do without, in one line; empty if nothing is missing."""
    from headrace.actors.errors import ConfigError
    from headrace.actors.runtime.actors.runtime import check_ray_folder
    from headrace.sandboxes.errors import FolderRefused

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        caches.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(dir=caches)).rmdir()
    except OSError as error:
        return f"tests need a folder for caches ({error}): set HOME or XDG_CACHE_HOME"
    try:
        check_ray_folder()
    except (FolderRefused, ConfigError) as error:
        return f"tests need a folder for temporary files: {error}"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (missing := missing_on_this_machine()):
        raise pytest.UsageError(missing)


def pytest_report_header() -> list[str]:
    """Say before the first test which tests this machine skips."""
    told = missing_namespaces()
    return [f"no local sandboxes here, and tests with them are skipped: {told}"] if told else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files that have no test of this part: what they import takes seconds."""
    if config.option.part is None or not collection_path.name.startswith("test_"):
        return None
    elsewhere = (config.option.part == "core") == (collection_path.parent.name in WHOLE)
    mark = f"mark.{'core' if config.option.part == 'core' else 'whole'}"
    return (elsewhere and mark not in collection_path.read_text(encoding="utf-8")) or None


def pytest_collection_finish() -> None:
    """What was collected lives as long as the process: a full collection would stand still for a second over it."""
    gc.collect()
    gc.freeze()


def keep_first(items: list[pytest.Item]) -> None:
    """Take marks with `but_first` from the first parametrisation of a test."""
    seen: set[str] = set()
    for item in items:
        if (test := item.nodeid.partition("[")[0]) not in seen:
            seen.add(test)
            item.own_markers[:] = [mark for mark in item.own_markers if not mark.kwargs.get("but_first")]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests for several workers (`--dist loadgroup`): a file's tests share a worker. The files that read the
    finished run share one, and the others that use Ray another: beside the hosts of namespaces, two local Rays take all
    of two cores. Those come first, with the groups that files name themselves."""
    keep_first(items)
    if config.option.part is not None:
        parts: dict[str, list[pytest.Item]] = {"core": [], "rest": []}
        for item in items:
            is_core = item.get_closest_marker("core") is not None or item.path.parent.name not in WHOLE
            parts["core" if is_core and item.get_closest_marker("whole") is None else "rest"].append(item)
        items[:] = parts.pop(config.option.part)
        config.hook.pytest_deselected(items=[item for others in parts.values() for item in others])
    lanes: dict[Path, str] = {}
    for item in items:
        for fixture in {"ray_cluster", "finished_run"}.intersection(getattr(item, "fixturenames", ())):
            lanes[item.path] = max(fixture, lanes.get(item.path, ""), key=lambda name: name == "finished_run")
        if named := item.get_closest_marker("xdist_group"):
            lanes[item.path] = named.args[0] if named.args else named.kwargs["name"]
    items.sort(key=lambda item: item.path not in lanes)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(lanes.get(item.path, item.path.stem)))


@functools.cache
def missing_namespaces() -> str:
    """Return what this machine lacks for local sandboxes, or "" if it has all of it."""
    from headrace.sandboxes import doctor
    from headrace.sandboxes.errors import NamespacesUnavailable

    try:
        doctor.require_namespaces()
    except NamespacesUnavailable as error:
        return str(error)
    return ""


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, which start sandboxes
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `namespaces` where the kernel cannot run local sandboxes."""
    if item.get_closest_marker("namespaces") and (reason := missing_namespaces()):
        pytest.skip(reason)


@pytest.fixture
async def sandbox(provider: SandboxProvider) -> Sandbox:
    """Default sandbox of the module's own fixture `provider`, which ends it."""
    return await provider.attach(await provider.create(SandboxSpec()))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tokenizer and chat template of Qwen3 for the gateway: do not write into it."""
    return QWEN3.write(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def fat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one token of 250 characters: do not write into it."""
    return FAT.write(tmp_path_factory.mktemp("fat"))


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    """`write_model(directory, seed=0, tied=True)` writes a random tiny Qwen3 model directory."""
    return write_tiny_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    """A random tiny Qwen3 model directory, the same in the whole run: do not write into it."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def open_rig() -> Callable[..., Any]:
    """`async with open_rig(model_dir, work_dir) as rig`: two engines (or `names`), a sender and counting gates."""
    from support.push_rig import open_rig  # torch is imported for these tests alone

    return open_rig


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The one Ray of a test run."""
    from headrace.actors.runtime.actors.runtime import start_local_ray, stop_local_ray

    start_local_ray("tests", object_store_bytes=128 << 20)
    yield
    stop_local_ray()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of one small real run by the command line, shared by all tests: only read it."""
    from support import run_rig
    from support.environments import environments_below

    folder = tmp_path_factory.mktemp("finished")
    # Every version's weights are kept as a checkpoint, so that any token can be scored again.
    settings = (
        "training.steps=6",
        "training.save_every=1",
        "learner.keep_checkpoints=99",
        "evaluation.sampling.temperature=0",
        "gateway.processes=2",
    )
    options = [argument for setting in settings for argument in ("--set", setting)]
    outputs = ("--runs-dir", str(folder), "--name", "run", "--quiet", "--json", str(folder / "out.json"))
    arguments = ("run", str(run_rig.RECIPE), *outputs, *run_rig.small_arguments(), *options)
    driver = run_rig.start_driver(*arguments, **run_rig.SECRETS)
    with environments_below(driver.pid, folder / "environments.json"):
        _, errors = driver.communicate(timeout=900)
    assert driver.returncode == 0, errors.decode()
    return run_rig.RunDirectory(path=folder / "run")
