"""A push by disk under failing engines and damaged directories: a reader that dies affects only itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import FinishReason
from headrace.policies.errors import ModelInvalid, SenderFailed
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot
from headrace.policies.push.contract import PushReport
from headrace.policies.push.machine import GROUP_PHASES, Phase, PushOutcome
from headrace.policies.push.weights import read_snapshot
from support import push_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
PHASES = [phase for phase in Phase if phase not in GROUP_PHASES | {Phase.PULL}]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    return write_model(tmp_path_factory.mktemp("other") / "model", seed=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[push_rig.Rig]:
    async with push_rig.open_rig(tiny_model_dir, tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: push_rig.Rig, tiny_model_dir: Path) -> push_rig.Rig:
    """The shared rig with two good engines at 1.0: processes are replaced only where a test broke them."""
    for name in shared_rig.engines:
        if not shared_rig.processes[name].alive or name in shared_rig.gate.closed:
            await shared_rig.replace(name)
    shared_rig.gate.closed.clear()
    assert set(outcomes(await push(shared_rig, tiny_model_dir, 0)).values()) == {PushOutcome.UPDATED}
    shared_rig.journal.clear()
    return shared_rig


async def push(rig: push_rig.Rig, model: Path, step: int, **options: Any) -> PushReport:
    return await rig.push(model, step, transport="disk", **options)


def at(phase: Phase, action: Callable[[], Awaitable[None]], wave: int = 0) -> Callable[[int, Phase], Awaitable[None]]:
    """A journal hook that acts before one phase."""

    async def before(now: int, reached: Phase) -> None:
        if (now, reached) == (wave, phase):
            await action()

    return before


def outcomes(report: PushReport) -> dict[str, PushOutcome]:
    return {engine.engine_id: engine.outcome for engine in report.engines}


async def works(rig: push_rig.Rig, name: str, version: PolicyVersion, model: Path) -> None:
    """Not paused, not held, and with all weights of this version."""
    done = await rig.generate(name, f"after-{name}", 5)
    assert done.finish is not FinishReason.ABORT
    assert {span.version for span in done.spans} == {version}
    assert await rig.engines[name].checksums() == read_snapshot({model / "model.safetensors": None}).checksums()


async def test_engines_read_the_directory_and_report_the_costs_of_it(rig: push_rig.Rig, other_model: Path) -> None:
    report = await push(rig, other_model, 1)
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    assert rig.journal == [(wave, phase.value) for wave in range(2) for phase in PHASES]
    size = sum(spec.numel() * spec.itemsize for spec in tensors_of(other_model))
    for part in report.engines:
        assert (part.received_bytes, part.flushed, part.verified) == (size, True, True)
        assert 0 < part.transfer_s < part.paused_s < part.gate_s
        await works(rig, part.engine_id, NEW, other_model)
    assert report.sent_bytes == 2 * size
    assert rig.directories is not None
    directory = rig.directories.path_of(NEW)
    assert (directory / "model.safetensors").samefile(other_model / "model.safetensors")
    assert (directory / "config.json").read_bytes() == (other_model / "config.json").read_bytes()


def tensors_of(model: Path) -> list[Any]:
    return list(read_snapshot({model / "model.safetensors": None}).tensors().values())


@pytest.mark.parametrize(
    "phase",
    [
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in (Phase.PROBE, Phase.GATE, Phase.PAUSE)),
        *(Phase.BROADCAST, Phase.VERIFY),
    ],
)
async def test_an_engine_that_is_killed_affects_only_itself(rig: push_rig.Rig, other_model: Path, phase: Phase) -> None:
    report = await push(rig, other_model, 1, wave_size=2, before=at(phase, rig.processes["one"].kill))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert rig.journal.count((0, "broadcast")) == 1, "nothing is read again for the others"
    await works(rig, "two", NEW, other_model)


async def test_an_engine_killed_while_it_reads_affects_only_itself(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    model = write_model(tmp_path / "model", intermediate_size=32768)
    async with push_rig.open_rig(model, tmp_path / "rig") as rig, asyncio.TaskGroup() as tasks:
        process_id = rig.processes["one"].pid
        killed: list[asyncio.Task[None]] = []

        async def kill_in_mid_read() -> None:
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(is_mapped, process_id, "weights/1.1/model.safetensors"):
                    pass
            os.kill(process_id, signal.SIGKILL)

        async def watch() -> None:
            killed.append(tasks.create_task(kill_in_mid_read()))

        report = await push(rig, model, 1, wave_size=2, before=at(Phase.BROADCAST, watch))
        assert killed[0].done()
        assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
        assert set(rig.gate.closed) == {"one"}
        await works(rig, "two", NEW, model)


def is_mapped(process_id: int | None, path: str) -> bool:
    """Return True if a process has mapped a file whose path ends like this."""
    return f"{path}\n" in Path(f"/proc/{process_id}/maps").read_text()


async def test_a_reader_that_hangs_holds_its_directory_and_no_other_engine(
    rig: push_rig.Rig, tiny_model_dir: Path, other_model: Path
) -> None:
    assert rig.directories is not None

    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    report = await push(rig, other_model, 1, read_timeout_s=3.0, before=at(Phase.BROADCAST, stop))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "EngineTimeout" in report.engines[0].failure
    assert set(rig.gate.closed) == {"one"}
    await works(rig, "two", NEW, other_model)
    stopped = rig.engines.pop("one")
    for step in (2, 3, 4):
        await push(rig, tiny_model_dir, step)
    assert kept(rig) == {"1.1", "1.3", "1.4"}
    os.kill(rig.processes["one"].pid, signal.SIGCONT)
    await rig.replace("one")
    rig.engines = {"one": rig.engines["one"], "two": rig.engines["two"]}
    assert stopped.engine_id == "one"
    await push(rig, tiny_model_dir, 5)
    await push(rig, tiny_model_dir, 6)
    assert kept(rig) == {"1.5", "1.6"}


def kept(rig: push_rig.Rig) -> set[str]:
    assert rig.directories is not None
    return {path.name for path in rig.directories.path_of(NEW).parent.iterdir()}


def as_directory(model: Path, step: int) -> WeightsSnapshot:
    return WeightsSnapshot(version=PolicyVersion(1, step), directory=WeightsDirectory.of(model))


async def test_a_learners_own_directory_is_pushed_by_disk_and_by_group(rig: push_rig.Rig, other_model: Path) -> None:
    for step, transport in enumerate(("disk", "group"), start=1):
        report = await rig.push_snapshot(as_directory(other_model, step), transport=transport)
        assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
        for name in rig.engines:
            await works(rig, name, PolicyVersion(1, step), other_model)


async def test_engines_read_several_files_through_their_index(
    rig: push_rig.Rig, tmp_path: Path, other_model: Path
) -> None:
    tensors = load_file(other_model / "model.safetensors")
    paths = [tmp_path / f"rank{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({name: tensors[name] for name in sorted(tensors)[number::2]}, path)
    shards = tuple(WeightsShard.of(path) for path in paths)
    report = await rig.push_snapshot(WeightsSnapshot(version=NEW, shards=shards), transport="disk")
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    for name in rig.engines:
        await works(rig, name, NEW, other_model)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
async def test_a_damaged_directory_is_refused_before_any_change(
    rig: push_rig.Rig, tiny_model_dir: Path, tmp_path: Path, write_model: Callable[..., Path], damage: str
) -> None:
    model = write_model(tmp_path / "model", seed=3)
    snapshot = as_directory(model, 1)
    if damage == "truncated":
        os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    else:
        (model / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        await rig.push_snapshot(snapshot, transport="disk")
    assert rig.journal == []
    for name in rig.engines:
        await works(rig, name, OLD, tiny_model_dir)


async def test_a_directory_that_is_truncated_during_the_push_reaches_no_further_engine(
    rig: push_rig.Rig, tiny_model_dir: Path, tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    model = write_model(tmp_path / "model", seed=3)
    whole = write_model(tmp_path / "whole", seed=3)

    async def truncate() -> None:
        os.truncate(model / "model.safetensors", 1000)

    report = await push(rig, model, 1, before=at(Phase.PAUSE, truncate, wave=1))
    assert isinstance(report.sender_failure, SenderFailed)
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.BEHIND}
    assert not rig.gate.closed
    await works(rig, "one", NEW, whole)
    await works(rig, "two", OLD, tiny_model_dir)


async def test_engines_need_no_sender_once_the_directory_is_verified(rig: push_rig.Rig, other_model: Path) -> None:
    report = await push(rig, other_model, 1, before=at(Phase.PROBE, rig.sender.kill))
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    assert report.sender_failure is None


async def test_an_engine_whose_weights_differ_from_the_snapshot_is_quarantined(
    rig: push_rig.Rig, tiny_model_dir: Path, other_model: Path
) -> None:
    async def overwrite() -> None:
        await rig.engines["one"].update_from_disk(tiny_model_dir, version=NEW)

    report = await push(rig, other_model, 1, before=at(Phase.VERIFY, overwrite))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "checksums disagree" in report.engines[0].failure
    assert set(rig.gate.closed) == {"one"}
    await works(rig, "two", NEW, other_model)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_failing_journal_ends_the_push_cleanly(
    rig: push_rig.Rig, tiny_model_dir: Path, other_model: Path, phase: Phase
) -> None:
    async def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await push(rig, other_model, 1, before=at(phase, fail))
    assert not rig.gate.closed
    has_read = PHASES.index(phase) > PHASES.index(Phase.BROADCAST)
    await works(rig, "one", *((NEW, other_model) if has_read else (OLD, tiny_model_dir)))
    await works(rig, "two", OLD, tiny_model_dir)
    assert outcomes(await push(rig, other_model, 2)) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


async def test_a_push_can_be_cancelled_while_an_engine_reads(
    rig: push_rig.Rig, tiny_model_dir: Path, other_model: Path
) -> None:
    assert rig.directories is not None

    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    task = asyncio.get_running_loop().create_task(push(rig, other_model, 1, before=at(Phase.BROADCAST, stop)))
    async with asyncio.timeout(60):
        while not rig.directories.readers.held():
            await rig.engines["two"].load()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.kill(rig.processes["one"].pid, signal.SIGCONT)
    assert set(rig.gate.closed) == {"one"}, "nobody knows what it has"
    await works(rig, "two", OLD, tiny_model_dir)
