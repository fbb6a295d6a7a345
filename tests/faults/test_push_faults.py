"""A push under failing engines and a failing sender: the others get their weights, and nobody is left paused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, EngineInfo, FinishReason
from headrace.policies.errors import SenderFailed, SenderTimeout, UnknownGroup
from headrace.policies.push.machine import Phase, PushOutcome
from headrace.policies.push.transfer import group_name
from headrace.policies.push.weights import read_snapshot
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, write_model) -> Path:
    return write_model(tmp_path_factory.mktemp("other") / "model", seed=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(tiny_model_dir: Path, open_rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator:
    async with open_rig(tiny_model_dir, tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig, tiny_model_dir: Path) -> AsyncIterator:
    """The shared rig with two good engines at 1.0: processes are replaced only where a test broke them."""
    for name in shared_rig.engines:
        if not shared_rig.processes[name].alive or name in shared_rig.gate.closed:
            await shared_rig.replace(name)
    shared_rig.gate.closed.clear()
    assert set(outcomes(await shared_rig.push(tiny_model_dir, 0)).values()) == {PushOutcome.UPDATED}
    shared_rig.journal.clear()
    return shared_rig


def at(phase: Phase, action: Callable[[], Awaitable[None]], wave: int = 0) -> Callable[[int, Phase], Awaitable[None]]:
    """A journal hook that acts before one phase."""

    async def before(now: int, reached: Phase) -> None:
        if (now, reached) == (wave, phase):
            await action()

    return before


def outcomes(report) -> dict[str, PushOutcome]:
    return {engine.engine_id: engine.outcome for engine in report.engines}


async def has_left(rig, name: str, report, attempt: int = 0) -> None:
    """The engine knows nothing of a group of the first wave."""
    with pytest.raises(UnknownGroup):
        await rig.engines[name].leave_group(group_name(report.push_id, 0, attempt))


async def works(rig, name: str, version: PolicyVersion) -> None:
    """Not paused, not held, and at this version."""
    done = await rig.generate(name, f"after-{name}", 5)
    assert done.finish is not FinishReason.ABORT
    assert {span.version for span in done.spans} == {version}


async def test_an_engine_killed_before_the_broadcast_is_quarantined(rig, other_model: Path) -> None:
    report = await rig.push(other_model, 1, before=at(Phase.BROADCAST, rig.processes["one"].kill))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    await works(rig, "two", NEW)


async def test_an_engine_killed_before_its_gate_is_closed_is_quarantined(rig, other_model: Path) -> None:
    report = await rig.push(other_model, 1, before=at(Phase.GATE, rig.processes["one"].kill))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert not rig.gate.closed
    await works(rig, "two", NEW)


async def test_killing_one_engine_of_a_wave_spares_the_other(rig, other_model: Path) -> None:
    report = await rig.push(other_model, 1, wave_size=2, before=at(Phase.PAUSE, rig.processes["one"].kill))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "EngineDown" in report.engines[0].failure
    await works(rig, "two", NEW)
    for attempt in range(2):
        await has_left(rig, "two", report, attempt)


async def test_an_engine_that_hangs_at_the_end_of_a_push_stays_updated(rig, other_model: Path) -> None:
    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    report = await rig.push(other_model, 1, phase_timeout_s=4.0, before=at(Phase.DISBAND, stop))
    os.kill(rig.processes["one"].pid, signal.SIGCONT)
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    await works(rig, "one", NEW)
    await works(rig, "two", NEW)


async def test_a_group_is_closed_on_both_sides_before_the_next_wave(rig, other_model: Path) -> None:
    seen: list[int] = []

    async def look() -> None:
        seen.append(len(tcp_sockets(rig.sender.pid)))

    before = len(tcp_sockets(rig.sender.pid))
    await rig.push(other_model, 1, before=at(Phase.PROBE, look, wave=1))
    assert seen == [before]


@pytest.mark.slow
async def test_an_engine_stopped_during_the_pause_misses_its_deadline(rig, other_model: Path) -> None:
    """F4."""

    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    report = await rig.push(other_model, 1, phase_timeout_s=4.0, before=at(Phase.BEGIN, stop))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "EngineTimeout" in report.engines[0].failure
    assert not rig.gate.closed
    await works(rig, "two", NEW)
    os.kill(rig.processes["one"].pid, signal.SIGCONT)


async def test_an_engine_stopped_during_the_broadcast_is_quarantined(rig, other_model: Path) -> None:
    """F5."""

    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    report = await rig.push(other_model, 1, transfer_timeout_s=7.0, before=at(Phase.BROADCAST, stop))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    # It may hold mixed weights: it stays gated until somebody replaces it.
    assert set(rig.gate.closed) == {"one"}
    assert report.engines[0].gate_s > report.engines[1].gate_s > 0
    await works(rig, "two", NEW)
    os.kill(rig.processes["one"].pid, signal.SIGCONT)


@pytest.mark.slow
async def test_only_the_hung_engine_of_a_wave_of_three_is_lost(
    tmp_path: Path, tiny_model_dir: Path, other_model: Path, open_rig
) -> None:
    """The third gets its bytes through the first: it waits for it, and must not be taken for silent itself."""
    async with open_rig(tiny_model_dir, tmp_path / "rig", names=("one", "two", "three")) as rig:

        async def stop() -> None:
            os.kill(rig.processes["one"].pid, signal.SIGSTOP)

        report = await rig.push(other_model, 1, wave_size=3, transfer_timeout_s=7.0, before=at(Phase.BROADCAST, stop))
        assert outcomes(report) == {
            "one": PushOutcome.QUARANTINED,
            "two": PushOutcome.UPDATED,
            "three": PushOutcome.UPDATED,
        }
        assert "EngineTimeout" in report.engines[0].failure
        assert set(rig.gate.closed) == {"one"}
        for name in ("two", "three"):
            await works(rig, name, NEW)
        os.kill(rig.processes["one"].pid, signal.SIGCONT)


@pytest.mark.slow
async def test_an_engine_that_never_answers_a_pause_is_quarantined(rig, other_model: Path) -> None:
    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    report = await rig.push(other_model, 1, phase_timeout_s=4.0, before=at(Phase.PAUSE, stop))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "EngineTimeout" in report.engines[0].failure
    # It got no bucket: it keeps its old weights and would serve them again.
    assert not rig.gate.closed
    await works(rig, "two", NEW)
    os.kill(rig.processes["one"].pid, signal.SIGCONT)


class WrongWeights(SGLangEngine):
    """It holds other weights than it was sent."""

    async def checksums(self) -> dict[str, str]:
        return dict.fromkeys(await super().checksums(), "wrong")


async def test_a_wrong_first_engine_is_outvoted(tiny_model_dir: Path, tmp_path: Path, open_rig) -> None:
    async with open_rig(tiny_model_dir, tmp_path, names=("one", "two", "three")) as rig:
        config = SGLangConfig(vocab_size=258)
        rig.engines["one"] = WrongWeights(EngineId("one"), rig.processes["one"].url, rig.session, config)
        together = await rig.push(tiny_model_dir, 1, verify="snapshot", wave_size=3)
        assert together.quarantined == ("one",)
        await rig.replace("one")
        rig.engines["one"] = WrongWeights(EngineId("one"), rig.processes["one"].url, rig.session, config)
        # One after another: the snapshot decides, and not who came first.
        report = await rig.push(tiny_model_dir, 2, verify="snapshot")
        assert report.quarantined == ("one",)
        assert report.updated == ("two", "three")


class OwnChecksums(SGLangEngine):
    """Its checksums cannot be compared with the snapshot's, like SGLang's."""

    async def info(self) -> EngineInfo:
        return replace(await super().info(), snapshot_checksums=False)


@pytest.mark.parametrize("transport", ["group", "disk"])
@pytest.mark.parametrize("wrong", ["one", "two"])
async def test_a_second_read_decides_between_two_engines_of_their_own_checksums(
    rig, tiny_model_dir: Path, other_model: Path, wrong: str, transport: str
) -> None:
    """One of them loads another model before it is compared. The first one was believed, whichever was wrong."""
    for name in rig.engines:
        rig.engines[name] = OwnChecksums(
            EngineId(name), rig.processes[name].url, rig.session, SGLangConfig(vocab_size=258)
        )

    async def overwrite() -> None:
        await rig.engines[wrong].update_from_disk(tiny_model_dir, version=NEW)

    wave = list(rig.engines).index(wrong)
    report = await rig.push(other_model, 1, transport=transport, before=at(Phase.VERIFY, overwrite, wave))
    if wrong == "one":
        assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    else:
        # The second read of the snapshot repaired it.
        assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    for name in set(rig.engines) - set(report.quarantined):
        assert await rig.engines[name].checksums() == checksums_of(other_model)
        await works(rig, name, NEW)
    for name in rig.engines:
        rig.attach(name)
    # A condemned engine serves already: whoever keeps the engines takes it out.
    if wrong == "one":
        await rig.replace("one")


async def test_a_sender_killed_during_a_bucket_ends_the_push(tmp_path: Path, write_model, open_rig) -> None:
    """A bucket of more bytes than the sockets take: it dies while some are on their way."""
    model = write_model(tmp_path / "model", intermediate_size=32768)
    async with open_rig(model, tmp_path / "rig") as rig:
        watching: list[asyncio.Task[None]] = []

        async def kill_in_mid_bucket() -> None:
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(sending, rig.sender.pid):
                    pass
            os.kill(rig.sender.pid, signal.SIGKILL)
            os.kill(rig.processes["one"].pid, signal.SIGCONT)

        async with asyncio.TaskGroup() as tasks:

            async def watch() -> None:
                # It takes nothing any more, so that the bytes stay on their way.
                os.kill(rig.processes["one"].pid, signal.SIGSTOP)
                watching.append(tasks.create_task(kill_in_mid_bucket()))

            report = await rig.push(model, 1, bucket_bytes=2**30, before=at(Phase.BROADCAST, watch))
        assert watching
        assert isinstance(report.sender_failure, SenderFailed)
        assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.BEHIND}
        # Nobody knows what it has: it gets no traffic until it was sent everything again.
        assert set(rig.gate.closed) == {"one"}
        await works(rig, "two", OLD)
        await rig.replace("one")
        rig.gate.closed.clear()
        again = await rig.push(model, 2, bucket_bytes=2**30)
        assert outcomes(again) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


async def test_a_push_can_be_cancelled_during_a_bucket(tmp_path: Path, write_model, open_rig) -> None:
    """The engine takes nothing any more, so that the bytes stay on their way."""
    model = write_model(tmp_path / "model", intermediate_size=32768)
    async with open_rig(model, tmp_path / "rig") as rig:
        stopped = asyncio.Event()

        async def stop() -> None:
            os.kill(rig.processes["one"].pid, signal.SIGSTOP)
            stopped.set()

        pushing = rig.push(model, 1, bucket_bytes=2**30, before=at(Phase.BROADCAST, stop))
        task = asyncio.get_running_loop().create_task(pushing)
        async with asyncio.timeout(60):
            await stopped.wait()
            while not await asyncio.to_thread(sending, rig.sender.pid):
                pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.kill(rig.processes["one"].pid, signal.SIGCONT)
        assert set(rig.gate.closed) == {"one"}, "nobody knows what it has"
        assert (await rig.engines["one"].info()).paused
        await works(rig, "two", OLD)
        await rig.replace("one")
        rig.gate.closed.clear()
        again = await rig.push(model, 2, bucket_bytes=2**30)
        assert outcomes(again) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


@pytest.mark.parametrize(
    ("wave", "phase"),
    [*((0, phase) for phase in Phase if phase is not Phase.PULL), (1, Phase.BROADCAST), (1, Phase.END)],
)
async def test_a_failing_journal_ends_the_push_cleanly(
    rig, tiny_model_dir: Path, other_model: Path, wave: int, phase: Phase
) -> None:
    """Every engine serves one version whole, and the disk's error is what the caller hears."""

    async def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await rig.push(other_model, 1, before=at(phase, fail, wave))
    assert not rig.gate.closed
    order = [phase for phase in Phase if phase is not Phase.PULL]
    reached = wave + (order.index(phase) > order.index(Phase.BROADCAST))
    models = {OLD: tiny_model_dir, NEW: other_model}
    for number, (name, engine) in enumerate(rig.engines.items()):
        version = NEW if number < reached else OLD
        assert await engine.checksums() == checksums_of(models[version])
        await works(rig, name, version)
    assert outcomes(await rig.push(other_model, 2)) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


def checksums_of(model: Path) -> dict[str, str]:
    return read_snapshot({model / "model.safetensors": None}).checksums()


def sending(pid: int) -> bool:
    """Whether a process has a TCP connection with bytes that the other end has not taken yet."""
    return any(int(fields[4].split(":")[0], 16) > 0 for fields in tcp_sockets(pid))


def tcp_sockets(pid: int) -> list[list[str]]:
    """Those of a process, as the kernel lists them."""
    own = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(path.readlink()))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [fields for fields in lines if f"socket:[{fields[9]}]" in own]


async def test_an_engine_whose_weights_differ_from_those_sent_is_quarantined(
    rig, tiny_model_dir: Path, other_model: Path
) -> None:
    """Somebody loads another model from disk after the last bucket: only the checksums tell."""

    async def overwrite() -> None:
        await rig.engines["one"].update_from_disk(tiny_model_dir, version=NEW)

    report = await rig.push(other_model, 1, before=at(Phase.VERIFY, overwrite))
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert "checksums disagree" in report.engines[0].failure
    assert set(rig.gate.closed) == {"one"}
    assert (await rig.engines["one"].info()).paused
    await works(rig, "two", NEW)


async def test_an_engine_with_an_open_update_is_quarantined_before_any_rank_broadcasts(rig, other_model: Path) -> None:
    await rig.engines["one"].begin_update()
    report = await rig.push(other_model, 1)
    assert outcomes(report) == {"one": PushOutcome.QUARANTINED, "two": PushOutcome.UPDATED}
    assert (0, "broadcast") not in rig.journal
    assert not rig.gate.closed
    await works(rig, "one", OLD)
    await works(rig, "two", NEW)


@pytest.mark.parametrize("phase", [Phase.FORM, Phase.BEGIN, Phase.BROADCAST])
async def test_a_killed_sender_is_replaced(rig, other_model: Path, phase: Phase) -> None:
    async def kill() -> None:
        os.kill(rig.sender.pid, signal.SIGKILL)

    report = await rig.push(other_model, 1, before=at(phase, kill))
    assert isinstance(report.sender_failure, SenderFailed)
    assert outcomes(report) == {"one": PushOutcome.BEHIND, "two": PushOutcome.BEHIND}
    assert not rig.gate.closed
    await has_left(rig, "one", report)
    for name in rig.engines:
        await works(rig, name, OLD)
    again = await rig.push(other_model, 2)
    assert outcomes(again) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


@pytest.mark.parametrize(
    ("phase", "first"),
    [(Phase.FORM, PushOutcome.BEHIND), (Phase.BROADCAST, PushOutcome.BEHIND), (Phase.DISBAND, PushOutcome.UPDATED)],
)
async def test_a_dead_sender_is_not_restarted_during_the_push(
    rig, other_model: Path, phase: Phase, first: PushOutcome
) -> None:
    """That would take seconds at closed gates, for a sender without weights."""

    async def kill() -> None:
        await kill_and_reap(rig.sender._process)

    incarnation = rig.sender.incarnation
    report = await rig.push(other_model, 1, before=at(phase, kill))
    assert isinstance(report.sender_failure, SenderFailed)
    assert outcomes(report) == {"one": first, "two": PushOutcome.BEHIND}
    assert rig.sender.incarnation == incarnation
    assert not rig.gate.closed
    assert outcomes(await rig.push(other_model, 2)) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}


async def kill_and_reap(process: asyncio.subprocess.Process) -> None:
    """It is known to be dead, before anybody asks it for something."""
    process.kill()
    await process.wait()


async def test_a_stopped_sender_misses_its_deadline_and_is_replaced(rig, other_model: Path) -> None:
    async def stop() -> None:
        os.kill(rig.sender.pid, signal.SIGSTOP)

    first = rig.sender.pid
    report = await rig.push(other_model, 1, phase_timeout_s=4.0, before=at(Phase.BROADCAST, stop))
    assert isinstance(report.sender_failure, SenderTimeout)
    assert outcomes(report) == {"one": PushOutcome.BEHIND, "two": PushOutcome.BEHIND}
    for name in rig.engines:
        await works(rig, name, OLD)
    assert outcomes(await rig.push(other_model, 2)) == {"one": PushOutcome.UPDATED, "two": PushOutcome.UPDATED}
    assert rig.sender.pid != first


async def test_a_sender_killed_between_waves_leaves_the_second_wave_outdated(rig, other_model: Path) -> None:
    async def kill() -> None:
        os.kill(rig.sender.pid, signal.SIGKILL)

    report = await rig.push(other_model, 1, before=at(Phase.FORM, kill, wave=1))
    assert isinstance(report.sender_failure, SenderFailed)
    assert outcomes(report) == {"one": PushOutcome.UPDATED, "two": PushOutcome.BEHIND}
    await works(rig, "one", NEW)
    await works(rig, "two", OLD)
