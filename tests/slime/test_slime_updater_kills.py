"""Transfers of slime's ranks that lose a rank, an engine or the engine group while they run, over a backend that
behaves as NCCL does."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorError
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.training.slime_loop import SlimeLoop
from headrace.buffer.audit.verify import verify
from support import slime_rig as rig

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), pytest.mark.usefixtures("slime_ray")]


async def two_engines(runtime: RayRuntime, directory: RunDirectory, model: Path) -> EngineGroup:
    engines = EnginesConfig(count=2, max_context_tokens=256)
    limits = {"read_timeout_s": 25.0, "transfer_timeout_s": 15.0, "phase_timeout_s": 20.0}
    return await rig.engine_group(runtime, directory, model, engines, transport="nccl", **limits)


@pytest_asyncio.fixture
async def run(tmp_path: Path, bf16_model: Path) -> AsyncIterator[rig.SlimeRun]:
    """Two engines and slime's ranks, over `lazy`."""
    terms = rig.terms(tmp_path, bf16_model)
    section = {"environment": {**terms.learner.slime.environment, "HEADRACE_TEST_BACKEND": "lazy"}}
    changes = {"start_engines": two_engines, "transport": "nccl", "slime": section}
    async with rig.open_run(tmp_path, bf16_model, steps=4, save_every=1, **changes) as run, run.producing():
        yield run


async def train_through(
    run: rig.SlimeRun, learner: SlimeLoop, hold: Path, victim: str, by: signal.Signals
) -> dict[str, Any]:
    """Train four steps; in the transfer of one, a process gets the signal. Returns the state of the transport."""
    training = asyncio.ensure_future(until_back(learner.run, deadline_s=600.0))
    journal = run.directory.path / "engines" / "pushes.jsonl"
    await until(lambda: phase_of(journal, "1.0") == "disband", training)
    await asyncio.to_thread(hold.touch)
    try:
        await until(lambda: any(phase_of(journal, f"1.{step}") == "broadcast" for step in range(1, 5)), training)
        process = await process_of(run, victim)
        process.send_signal(by)
    finally:
        await asyncio.to_thread(hold.unlink)
    with suppress(psutil.NoSuchProcess):
        if by is signal.SIGSTOP:
            # It is killed in the end by what notices that it hangs.
            process.wait(300) if victim != "engine group" else process.send_signal(signal.SIGCONT)
    end = await training
    assert end.version.step == 4
    state = run.directory.path / "push_transport.json"
    return dict(json.loads(state.read_bytes())) if state.exists() else {}


def phase_of(journal: Path, version: str) -> str:
    """Return the last phase of a push of this version, "" if there was none."""
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()] if journal.exists() else []
    return next((line["phase"] for line in reversed(lines) if line.get("version") == version), "")


async def until(is_so: Any, training: asyncio.Future[Any]) -> None:
    while not is_so():
        assert not training.done(), training
        await asyncio.sleep(0.05)


async def process_of(run: rig.SlimeRun, victim: str) -> psutil.Process:
    if victim == "rank":
        return rig.ranks()[1]
    if victim == "engine group":
        return psutil.Process((await run.runtime.stats(run.engines))[0])
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if "headrace.policies.cpu_engine" in command and str(run.directory.path) in command:
            return process
    raise AssertionError("no engine runs")


@pytest.mark.parametrize(
    ("victim", "by", "transport"),
    [
        ("rank", signal.SIGKILL, None),
        ("rank", signal.SIGSTOP, "disk"),
        ("engine", signal.SIGKILL, "disk"),
        ("engine", signal.SIGSTOP, "disk"),
        # Its engines end with it, in the middle of a transfer in which the ranks then hang.
        ("engine group", signal.SIGKILL, "disk"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
async def test_a_loss_in_a_transfer_ends_neither_run_nor_ledger(
    run: rig.SlimeRun, hold: Path, victim: str, by: signal.Signals, transport: str | None
) -> None:
    learner = await run.learner()
    try:
        state = await train_through(run, learner, hold, victim, by)
    finally:
        await run.runtime.stop(learner)
    # Embedded engines have no deltas: the run goes on from nccl to disk at once.
    assert state.get("transport") == transport
    demotions = [each["transport"] for each in read_metrics(run.directory.metrics, ("push_demotion",))]
    assert demotions == (["delta", "disk"] if transport else [])
    report = verify(run.directory.path)
    assert report.clean, report.problems
    with suppress(ActorError):
        assert str(await run.engines.served_version()).endswith(".4")
