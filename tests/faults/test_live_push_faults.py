"""Pushes that a trainer performs itself, as slime does, with failing engines and a failing trainer: over gloo, and over
`lazy`, which behaves as NCCL does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, FinishReason
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push import execution
from headrace.policies.push.contract import PushConfig, PushReport
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.machine import Phase, PushOutcome, PushStep
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig
from support.engine_kinds import changed_sglang
from support.plain_trainer import PlainTrainer
from support.push_rig import VOCABULARY, RecordingGate, Rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
OLD, NEW, NEXT = (PolicyVersion(1, step) for step in range(3))
TESTS = Path(__file__).resolve().parents[1]
BACKENDS = ("gloo", "lazy")
UPDATED, BEHIND, QUARANTINED = PushOutcome.UPDATED, PushOutcome.BEHIND, PushOutcome.QUARANTINED


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, write_model: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("other") / "model", seed=9)


@pytest.fixture(scope="module", autouse=True)
def know_lazy() -> Any:
    """Let the engines know the backend, under which the trainer's groups are formed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(TESTS / "support" / "server_site"), str(TESTS))))
        patch.setenv("HEADRACE_TEST_BACKEND", "lazy")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(
    tiny_model_dir: Path, open_rig: Any, tmp_path_factory: pytest.TempPathFactory, know_lazy: None
) -> AsyncIterator[Rig]:
    async with open_rig(tiny_model_dir, tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: Rig, tiny_model_dir: Path) -> Rig:
    """The shared rig with two good engines at 1.0: processes are replaced only where a test broke them."""
    for name in shared_rig.engines:
        if not shared_rig.processes[name].alive or name in shared_rig.gate.closed:
            await shared_rig.replace(name)
    shared_rig.gate.closed.clear()
    assert set(outcomes(await shared_rig.push(tiny_model_dir, 0)).values()) == {UPDATED}
    shared_rig.journal.clear()
    return shared_rig


@pytest_asyncio.fixture(loop_scope="module", params=BACKENDS)
async def trainer(request: pytest.FixtureRequest, other_model: Path) -> AsyncIterator[PlainTrainer]:
    trainer = PlainTrainer(other_model, NEW, request.param)
    await trainer.start()
    yield trainer
    await trainer.end()


def outcomes(report: PushReport) -> dict[str, PushOutcome]:
    return {str(engine.engine_id): engine.outcome for engine in report.engines}


def at(phase: Phase, action: Callable[[], Awaitable[object] | None]) -> Callable[[int, Phase], Awaitable[None]]:
    """A journal hook that acts before the first time of a phase."""
    done: list[Phase] = []

    async def before(_wave: int, reached: Phase) -> None:
        if reached == phase and not done:
            done.append(reached)
            if (waiting := action()) is not None:
                await waiting

    return before


async def push(rig: Rig, trainer: PlainTrainer, **more: Any) -> PushReport:
    rig.journal.clear()
    limits = {"transfer_timeout_s": 6.0, "read_timeout_s": 20.0, "phase_timeout_s": 15.0}
    return await rig.push_snapshot(WeightsSnapshot(version=NEW, live=True), trainer=trainer, **(limits | more))


async def works(rig: Rig, name: str, version: PolicyVersion) -> None:
    """Not paused, not held, and at this version."""
    done = await rig.generate(name, f"after-{name}-{time.monotonic()}", 5)
    assert done.finish is not FinishReason.ABORT
    assert {span.version for span in done.spans} == {version}


async def checksums(rig: Rig) -> list[dict[str, str]]:
    return [await engine.checksums() for engine in rig.engines.values()]


async def test_a_trainer_sends_its_weights_to_all_engines(rig: Rig, trainer: PlainTrainer, other_model: Path) -> None:
    first = await push(rig, trainer)
    # The groups stay: the second push forms none.
    second = await push(rig, trainer)
    assert outcomes(first) == outcomes(second) == {"one": UPDATED, "two": UPDATED}
    assert trainer.connections == 1
    sent = await checksums(rig)
    assert outcomes(await rig.push(other_model, 2)) == {"one": UPDATED, "two": UPDATED}
    assert sent == await checksums(rig), "the snapshot's files have other weights"
    assert first.sent_bytes == second.sent_bytes == sum(p.received_bytes for p in first.engines) / 2 > 0
    for name in rig.engines:
        await works(rig, name, NEXT)


async def test_a_replaced_engine_is_connected_with_the_next_push(rig: Rig, trainer: PlainTrainer) -> None:
    await push(rig, trainer)
    await rig.replace("one")
    assert outcomes(await push(rig, trainer)) == {"one": UPDATED, "two": UPDATED}
    assert trainer.connections == 2
    one, two = await checksums(rig)
    assert one == two


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.PAUSE, Phase.BEGIN])
async def test_an_engine_that_dies_before_the_transfer_is_left_out(
    rig: Rig, trainer: PlainTrainer, phase: Phase
) -> None:
    report = await push(rig, trainer, before=at(phase, rig.processes["one"].kill))
    assert outcomes(report) == {"one": QUARANTINED, "two": UPDATED}
    assert not trainer.given_up
    await works(rig, "two", NEW)


async def test_an_engine_that_dies_while_groups_form_costs_the_trainer(rig: Rig, trainer: PlainTrainer) -> None:
    """Its process waits for all members, and no engine has been changed."""
    report = await push(rig, trainer, transfer_timeout_s=20.0, before=at(Phase.FORM, rig.processes["one"].kill))
    assert outcomes(report)["two"] is BEHIND
    assert len(trainer.given_up) == 1
    assert "one" in trainer.given_up[0]
    assert "joining slime-pp_0 at 127.0.0.1:" in trainer.given_up[0]
    assert "two" not in rig.gate.closed
    await works(rig, "two", OLD)


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "stopped"])
async def test_an_engine_lost_in_the_transfer_ends_the_trainer_and_not_the_push(
    rig: Rig, trainer: PlainTrainer, hangs: bool
) -> None:
    async def stop() -> None:
        os.kill(rig.processes["one"].pid, signal.SIGSTOP)

    started_s = time.monotonic()
    report = await push(rig, trainer, before=at(Phase.BROADCAST, stop if hangs else rig.processes["one"].kill))
    assert time.monotonic() - started_s < 60
    if hangs:
        os.kill(rig.processes["one"].pid, signal.SIGCONT)
    # The survivor got a part of a bucket, or waits in the collective: both are replaced.
    assert outcomes(report) == {"one": QUARANTINED, "two": QUARANTINED}
    assert set(rig.gate.closed) == {"one", "two"}
    assert report.sender_failure is not None


async def test_a_trainer_killed_before_the_transfer_leaves_engines_serving(rig: Rig, trainer: PlainTrainer) -> None:
    report = await push(rig, trainer, before=at(Phase.BROADCAST, trainer.end))
    assert outcomes(report) == {"one": BEHIND, "two": BEHIND}
    assert not rig.gate.closed
    for name in rig.engines:
        await works(rig, name, OLD)


@pytest.mark.parametrize("phase", [Phase.FORM, Phase.BROADCAST])
async def test_a_stopped_trainer_misses_its_deadline(rig: Rig, trainer: PlainTrainer, phase: Phase) -> None:
    report = await push(
        rig, trainer, read_timeout_s=6.0, before=at(phase, lambda: os.kill(trainer.pid, signal.SIGSTOP))
    )
    assert outcomes(report) == {"one": BEHIND, "two": BEHIND}
    assert "within" in str(report.sender_failure)
    assert not rig.gate.closed
    for name in rig.engines:
        await works(rig, name, OLD)


async def test_a_trainer_that_has_trained_on_is_not_asked_for_old_weights(rig: Rig, trainer: PlainTrainer) -> None:
    snapshot = WeightsSnapshot(version=NEXT, live=True)
    report = await rig.push_snapshot(snapshot, trainer=trainer)
    assert outcomes(report) == {"one": BEHIND, "two": BEHIND}
    assert [phase for _, phase in rig.journal] == ["probe", "form"], "an engine was paused for nothing"
    await works(rig, "one", OLD)


async def test_a_trainer_of_another_model_is_refused_before_any_change(
    rig: Rig, trainer: PlainTrainer, write_model: Any, tmp_path: Path
) -> None:
    assert rig.directories is not None
    before, rig.directories.model_dir = rig.directories.model_dir, write_model(tmp_path / "model", num_hidden_layers=1)
    try:
        report = await push(rig, trainer)
    finally:
        rig.directories.model_dir = before
    assert outcomes(report) == {"one": QUARANTINED, "two": QUARANTINED}
    assert "serves another model" in report.engines[0].failure
    assert [phase for _, phase in rig.journal] == ["probe"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", [Phase.PAUSE, Phase.BROADCAST])
async def test_only_the_dead_engine_of_a_wave_of_one_is_lost_with_a_sender(
    rig: Rig, other_model: Path, backend: str, phase: Phase
) -> None:
    """Our own sender over both backends: with waves of one engine, a hang costs that engine and the sender."""
    report = await rig.push(
        other_model,
        1,
        backend=backend,
        transfer_timeout_s=6.0,
        wave_size=1,
        before=at(phase, rig.processes["one"].kill),
    )
    again = {name: outcome for name, outcome in outcomes(report).items() if outcome is BEHIND}
    assert outcomes(report)["one"] is QUARANTINED
    if again:
        # The sender was killed with its snapshot: the pusher pushes once more to the engines that it did not reach.
        rig.engines = {"two": rig.engines["two"]}
        report = await rig.push(other_model, 1, backend=backend)
        rig.attach("one")
    assert outcomes(report)["two"] is UPDATED
    await works(rig, "two", NEW)


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arrives", [True, False], ids=["late", "never"])
async def test_an_sglang_server_is_resumed_only_with_all_bytes(
    tiny_model_dir: Path, other_model: Path, tmp_path: Path, arrives: bool
) -> None:
    """As with NCCL: the server answers every bucket, and the trainer is done, before anything has arrived."""
    hold = tmp_path / "hold"
    python = changed_sglang(tmp_path, HEADRACE_TEST_BACKEND="lazy", HEADRACE_TEST_HOLD=str(hold))
    given = {"model": tiny_model_dir, "directory": tmp_path, "python": python, "dtype": "float32", "max_context": 256}
    process = SGLangProcess(SGLangServerConfig.model_validate(given | {"start_timeout_s": 600}))
    trainer, gate, phases, verifying = PlainTrainer(other_model, NEW, "lazy"), RecordingGate(), [], asyncio.Event()

    async def journal(_push_id: str, step: PushStep) -> None:
        phases.append(step.phase)
        if step.phase is Phase.VERIFY:
            verifying.set()

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        stack.push_async_callback(process.stop)
        stack.push_async_callback(trainer.end)
        await asyncio.gather(process.start(), trainer.start())
        sender = await stack.enter_async_context(SenderProcess(SenderConfig(log_path=tmp_path / "sender.log")))
        client = SGLangConfig(vocab_size=VOCABULARY, update_timeout_s=60.0)
        engine = SGLangEngine(EngineId("one"), process.url, session, client)
        config = PushConfig(transfer_timeout_s=60.0, read_timeout_s=60.0 if arrives else 10.0, phase_timeout_s=30.0)
        directories = SnapshotDirectories(tmp_path / "weights", tiny_model_dir, DirectoryReaders())
        hold.touch()
        snapshot = WeightsSnapshot(version=NEW, live=True)
        pushing = asyncio.ensure_future(
            execution.push(snapshot, [engine], sender, gate, journal, config, directories=directories, trainer=trainer)
        )
        await verifying.wait()
        assert await engine.is_paused()
        assert set(gate.closed) == {"one"}
        if arrives:
            hold.unlink()
        report = await pushing
        assert outcomes(report) == {"one": UPDATED if arrives else QUARANTINED}
        assert (Phase.RESUME in phases) is arrives
        if arrives:
            sent = await engine.checksums()
            await engine.update_from_disk(other_model, version=NEXT)
            assert sent == await engine.checksums()
        else:
            assert set(gate.closed) == {"one"}
            await process.kill()
