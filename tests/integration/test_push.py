"""Weights pushed over real gloo into two real engines while they generate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from benches.push.testbed import PoolGate, pool_over
from safetensors.torch import save_file

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineId, FinishReason, GenerateRequest, RequestId
from headrace.policies.errors import ModelInvalid
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.models.qwen import Qwen, read_weights
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.push import fitting
from headrace.policies.push.contract import Gate
from headrace.policies.push.machine import ORDER, Phase
from headrace.policies.push.weights import read_snapshot
from headrace.policies.tensors import TensorSpec
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.http.engines import EnginePool, join_pieces
from headrace.serve.gateway.http.routing import RoutingKey
from support.push_rig import snapshot
from support.tiny_model import QWEN2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, write_model) -> list[Path]:
    """Three sets of weights of one shape, which end no answer before its limit."""
    directory = tmp_path_factory.mktemp("models")
    models = [write_model(directory / str(seed), seed=seed) for seed in range(3)]
    for model in models:
        (model / "generation_config.json").write_text('{"eos_token_id": []}')
    return models


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(models: list[Path], open_rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator:
    async with open_rig(models[0], tmp_path_factory.mktemp("rig")) as rig:
        yield rig


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return read_snapshot({directory / "model.safetensors": None}).tensors()


def reference_logprobs(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token after the first, under the weights of a directory."""
    config = QwenConfig.read(directory / "config.json")
    model = Qwen(config, read_weights(config, directory), capacity=1024)
    logprobs = model.logits([tokens])[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def split(whole: dict[str, torch.Tensor], directory: Path, step: int) -> WeightsSnapshot:
    """Every second tensor in the first file, the others in the second."""
    shards = []
    for number in range(2):
        path = directory / f"rank{number}.safetensors"
        save_file({name: whole[name] for name in sorted(whole)[number::2]}, path)
        shards.append(WeightsShard.of(path))
    return WeightsSnapshot(version=PolicyVersion(1, step), shards=tuple(shards))


async def sample(pool: EnginePool, name: str, tokens: int) -> list[Completion]:
    """The pieces of one turn."""
    pieces: list[Completion] = []
    ask = GenerateRequest(request_id=RequestId(name), input_ids=tuple(PROMPT), max_new_tokens=tokens)
    await pool.sample(RoutingKey(SessionId(name)), ask, pieces, UsageClock(since_s=0.0))
    return pieces


@pytest.mark.core
async def test_versions_change_during_a_request_and_every_token_matches_its_version(rig, models: list[Path]) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(rig.generate(name, f"{name}{index}", 1000)) for name in rig.engines for index in range(8)
        ]
        for name in rig.engines:
            await rig.until_busy(name, 8)
        reports = [await rig.push(models[step], step) for step in (1, 2)]
    for report in reports:
        assert report.updated == ("one", "two")
        assert report.quarantined == ()
        assert all(engine.in_flight > 0 for engine in report.engines), report
        assert report.sent_bytes == 2 * sum(item.nbytes for item in tensors(models[1]).values())
    completions = [task.result() for task in running]
    assert all(done.finish is not FinishReason.ABORT for done in completions)
    mixed = [done for done in completions if len(done.spans) > 1]
    assert mixed
    assert any(done.retractions for done in completions)
    for done in completions:
        tokens = [*PROMPT, *done.output_ids]
        for span in done.spans:
            expected = reference_logprobs(models[span.version.step], tokens)[len(PROMPT) - 1 :]
            got = torch.tensor(done.logprobs)
            assert (got - expected)[span.start : span.end].abs().max() <= 1e-3, span


async def test_engines_agree_with_the_snapshot_after_a_push(rig, models: list[Path]) -> None:
    await rig.push(models[2], 3)
    expected = read_snapshot({models[2] / "model.safetensors": None}).checksums()
    for engine in rig.engines.values():
        assert await engine.checksums() == expected
        info = await engine.info()
        assert (info.version, info.paused) == (PolicyVersion(1, 3), False)
    assert not rig.gate.closed


async def test_phases_are_journalled_in_order_and_gates_enclose_the_pause(rig, models: list[Path]) -> None:
    rig.journal.clear()
    rig.gate.log.clear()
    await rig.push(models[1], 4)
    assert rig.journal == [(wave, phase.value) for wave in (0, 1) for phase in Phase if phase is not Phase.PULL]
    assert rig.gate.log == ["close one", "open one", "close two", "open two"]


async def test_gates_can_stay_closed_for_longer_than_one_lease(rig, models: list[Path]) -> None:
    """The lease is renewed in every phase in which a gate is closed."""
    rig.gate.log.clear()
    held = ORDER[ORDER.index(Phase.PAUSE) : ORDER.index(Phase.OPEN)]
    seen: list[tuple[int, Phase]] = []

    async def outlast_the_lease(wave: int, phase: Phase) -> None:
        if phase not in held:
            return
        closing = f"close {('one', 'two')[wave]}"
        before = rig.gate.log.count(closing)
        async with asyncio.timeout(30):
            while True:
                if rig.gate.log.count(closing) > before:
                    break
                await asyncio.sleep(0.01)
        seen.append((wave, phase))

    report = await rig.push(models[2], 5, gate_lease_s=0.03, before=outlast_the_lease)
    assert report.updated == ("one", "two")
    assert seen == [(wave, phase) for wave in (0, 1) for phase in held]
    assert rig.gate.log[-1] == "open two"
    assert rig.gate.log.index("open one") > max(at for at, what in enumerate(rig.gate.log) if what == "close one")


async def test_two_engines_are_updated_in_one_wave(rig, models: list[Path]) -> None:
    report = await rig.push(models[0], 6, wave_size=2, verify="snapshot")
    assert report.updated == ("one", "two")
    assert {(await engine.info()).version for engine in rig.engines.values()} == {PolicyVersion(1, 6)}


async def test_aborts_lost_during_the_pause_are_sent_again(rig, models: list[Path]) -> None:
    """A request that arrives in the pause cannot be aborted there: the gate tells, the push aborts it afterwards."""
    late: list[asyncio.Task] = []

    async def before(wave: int, phase: Phase) -> None:
        if (wave, phase) == (0, Phase.BEGIN):
            late.append(asyncio.get_running_loop().create_task(rig.generate("one", "late", 1000)))
            async with asyncio.timeout(30):
                while (await rig.engines["one"].load()).waiting < 1:
                    pass
            await rig.engines["one"].abort("late")
            rig.gate.aborts = ["late"]

    await rig.push(models[1], 7, before=before)
    rig.gate.aborts = []
    assert (await late[0]).finish is FinishReason.ABORT


async def test_a_snapshot_may_be_in_two_files(rig, models: list[Path], tmp_path: Path) -> None:
    """Also if they divide modules: the version comes with the last bucket of both."""
    whole = tensors(models[2])
    weights = split(whole, tmp_path, step=8)
    report = await rig.push_snapshot(weights, bucket_bytes=50_000)
    assert report.updated == ("one", "two")
    assert report.sent_bytes == 2 * sum(item.nbytes for item in whole.values())
    expected = read_snapshot({models[2] / "model.safetensors": None}).checksums()
    for engine in rig.engines.values():
        assert await engine.checksums() == expected
        assert (await engine.info()).version == PolicyVersion(1, 8)


async def test_overlapping_shards_are_refused(rig, models: list[Path], tmp_path: Path) -> None:
    shards = (*snapshot(models[1], 8).shards, *split(tensors(models[1]), tmp_path, step=8).shards)
    with pytest.raises(ModelInvalid, match="is in another file of the snapshot too"):
        await rig.push_snapshot(WeightsSnapshot(version=PolicyVersion(1, 8), shards=shards))


async def test_a_snapshot_of_another_model_is_refused_before_any_change(
    rig, models: list[Path], tmp_path: Path
) -> None:
    changed = tensors(models[1]) | {"model.norm.weight": torch.zeros(7)}
    save_file(changed, tmp_path / "model.safetensors")
    rig.journal.clear()
    before = [(await engine.info()).version for engine in rig.engines.values()]
    report = await rig.push(tmp_path, 9)
    assert report.quarantined == ("one", "two")
    assert {phase for _, phase in rig.journal} == {"probe"}
    for engine, part in zip(rig.engines.values(), report.engines, strict=True):
        assert "model.norm.weight: the snapshot has shape (7,), but the engine's model" in part.failure
        assert (await engine.info()).version in before


async def test_a_slow_disk_of_a_served_model_fails_no_phase(
    rig, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = fitting.read_specs, []

    def slow(path: Path) -> dict[str, TensorSpec]:
        reads.append(path)
        time.sleep(2.5)
        return read(path)

    monkeypatch.setattr(fitting, "read_specs", slow)
    # The engines serve one directory, which is written anew for this test.
    (served,) = {Path((await engine.info()).model_path) for engine in rig.engines.values()}
    os.utime(served / "model.safetensors")
    for _ in range(2):
        report = await rig.push(models[2], 9, phase_timeout_s=2.0)
        assert report.updated == ("one", "two"), report
    assert reads == [served / "model.safetensors"]


async def test_a_push_report_contains_its_costs(rig, models: list[Path]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for name in rig.engines:
            for index in range(4):
                tasks.create_task(rig.generate(name, f"cost-{name}{index}", 1000))
        for name in rig.engines:
            await rig.until_busy(name, 4)
        report = await rig.push(models[1], 10)
    size = sum(item.nbytes for item in tensors(models[1]).values())
    for part in report.engines:
        assert (part.received_bytes, part.ranks, part.flushed) == (size, 1, True)
        assert 0 < part.transfer_s < part.paused_s < part.gate_s
        assert part.gb_per_s == pytest.approx(size / part.transfer_s / 1e9)
        assert part.retracted <= 4
        assert part.recomputed_tokens >= part.retracted * len(PROMPT)
    assert any(part.retracted for part in report.engines)
    assert report.gates_s == sum(part.gate_s for part in report.engines)
    assert sum(report.seconds.values()) <= report.total_s


async def test_aborted_turns_continue_on_another_engine_or_later(rig, models: list[Path]) -> None:
    """Their partial answers are kept: every token is under the version that sampled it, and none is missing."""
    async with pool_over(list(rig.engines.values())) as pool, asyncio.TaskGroup() as tasks:
        turns = [tasks.create_task(sample(pool, f"turn-{index}", 500)) for index in range(12)]
        for name in rig.engines:
            await rig.until_busy(name, 6)
        gate = PoolGate(pool)
        for step, model in ((11, 2), (12, 0)):
            report = await rig.push_snapshot(snapshot(models[model], step), gate=gate, pause_mode="abort")
            assert report.updated == ("one", "two")
    interrupted = [turn.result() for turn in turns if len(turn.result()) > 1]
    assert interrupted
    weights = {10: models[1], 11: models[2], 12: models[0]}
    for turn in turns:
        whole = join_pieces(turn.result())
        assert (len(whole.output_ids), whole.finish) == (500, FinishReason.LENGTH)
        tokens = [*PROMPT, *whole.output_ids]
        for span in whole.spans:
            expected = reference_logprobs(weights[span.version.step], tokens)[len(PROMPT) - 1 :]
            got = torch.tensor(whole.logprobs)
            assert (got - expected)[span.start : span.end].abs().max() <= 1e-3, span


async def test_an_in_place_push_marks_stale_tokens(rig, models: list[Path], record_property) -> None:
    """Running requests go on with their keys and values: what they sample from then on is no forward pass of any
    version, and says so. New requests carry the version as namespace, also once the cache is flushed, and are clean."""
    await rig.push(models[0], 20)
    for name in rig.engines:
        rig.attach(name, in_place=True)
    async with asyncio.TaskGroup() as tasks:
        asked = [(name, f"stay-{name}{index}") for name in rig.engines for index in range(4)]
        running = [tasks.create_task(rig.generate(name, request_id, 1000, "1.20")) for name, request_id in asked]
        for name in rig.engines:
            await rig.until_busy(name, 4)
        report = await rig.push(models[1], 21, pause_mode="in_place")
    assert report.updated == ("one", "two")
    assert all((part.retracted, part.recomputed_tokens) == (0, 0) for part in report.engines)
    assert [part.flushed for part in report.engines] == [False, False]
    assert rig.gate.namespaces == {"one": "1.21", "two": "1.21"}
    completions = [task.result() for task in running]
    assert all(done.retractions == 0 for done in completions)
    stale_errors, stale = [], 0
    for done in completions:
        tokens = [*PROMPT, *done.output_ids]
        assert [span.stale_kv for span in done.spans] == [False, *[True] * (len(done.spans) - 1)]
        for span in done.spans:
            expected = reference_logprobs(models[span.version.step - 20], tokens)[len(PROMPT) - 1 :]
            errors = (torch.tensor(done.logprobs) - expected)[span.start : span.end].abs()
            if span.stale_kv:
                stale_errors.append(errors.mean().item())
                stale += span.end - span.start
            else:
                assert errors.max() <= 1e-3, span
    assert stale
    assert max(stale_errors) > 1e-3, "the flag would be for nothing"
    record_property("stale_tokens", stale)
    record_property("stale_mean_error", max(stale_errors))
    quiet = await rig.push(models[2], 22, pause_mode="in_place")
    assert [part.flushed for part in quiet.engines] == [True, True]
    assert rig.gate.namespaces == {"one": "1.22", "two": "1.22"}
    late = await rig.generate("one", "late", 20, namespace="1.22")
    assert [(span.version.step, span.stale_kv) for span in late.spans] == [(22, False)]
    for name in rig.engines:
        rig.attach(name)


async def test_a_changed_snapshot_is_refused_before_any_change(rig, models: list[Path], tmp_path: Path) -> None:
    rig.journal.clear()
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        await rig.push(tmp_path, 23)
    assert rig.journal == []
    assert (await rig.push(models[0], 24)).updated == ("one", "two")


async def test_a_cancelled_push_leaves_no_engine_paused(rig, models: list[Path]) -> None:
    reached, never = asyncio.Event(), asyncio.Event()

    async def before(wave: int, phase: Phase) -> None:
        if phase is Phase.BROADCAST:
            reached.set()
            await never.wait()

    task = asyncio.get_running_loop().create_task(rig.push(models[1], 25, before=before))
    await reached.wait()
    assert (await rig.engines["one"].info()).paused
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    info = await rig.engines["one"].info()
    assert (info.paused, info.version) == (False, PolicyVersion(1, 24))
    assert not rig.gate.closed
    assert (await rig.push(models[1], 26)).updated == ("one", "two")


@dataclass
class StuckGate:
    """Another gate, which opens when it is told to."""

    gate: Gate
    opening: asyncio.Event = field(default_factory=asyncio.Event)
    may_open: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        await self.gate.close(engine_id, lease_s)

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        self.opening.set()
        await self.may_open.wait()
        return await self.gate.open(engine_id, cache_namespace=cache_namespace)


async def test_a_push_that_is_cancelled_twice_still_opens_its_gates(rig, models: list[Path]) -> None:
    reached, never, gate = asyncio.Event(), asyncio.Event(), StuckGate(rig.gate)

    async def before(wave: int, phase: Phase) -> None:
        if phase is Phase.BROADCAST:
            reached.set()
            await never.wait()

    pushing = rig.push_snapshot(snapshot(models[1], 27), before=before, gate=gate, phase_timeout_s=60.0)
    task = asyncio.get_running_loop().create_task(pushing)
    await reached.wait()
    task.cancel()
    await gate.opening.wait()
    task.cancel()
    for _ in range(30):
        await rig.engines["two"].info()
    assert not task.done(), "it went while a gate was closed"
    gate.may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rig.gate.closed
    assert not (await rig.engines["one"].info()).paused
    assert (await rig.push(models[1], 28)).updated == ("one", "two")


async def test_an_engine_joins_a_group_hosted_by_plain_torch(rig) -> None:
    """The trainer's side as SGLang's own function forms it: a tcp rendezvous at rank 0."""
    import socket
    from datetime import timedelta

    from torch.distributed import rendezvous
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

    from headrace.policies.push.process_group import WeightGroup, destroy_group

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def host() -> WeightGroup:
        timeout = timedelta(seconds=10)
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
        group, _ = _new_process_group_helper(
            size, rank, [], "gloo", PrefixStore("plain", store), group_name="plain", timeout=timeout
        )
        _world.pg_group_ranks[group] = {0: 0, 1: 1}
        return WeightGroup(name="plain", rank=0, world_size=2, backend="gloo", group=group, store=store)

    engine = rig.engines["one"]
    async with asyncio.TaskGroup() as tasks:
        hosting = tasks.create_task(asyncio.to_thread(host))
        tasks.create_task(engine.join_group("plain", host="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo"))
    group = hosting.result()
    await engine.leave_group("plain")
    assert group.group.size() == 2, "trainer and engine"
    destroy_group(group)


async def test_a_qwen2_5_model_in_several_files_is_served_and_pushed(tmp_path: Path, write_model, open_rig) -> None:
    """Read from three files, pushed as three shards, and read again from a directory."""
    models = [write_model(tmp_path / str(seed), seed=seed, files=3, **QWEN2) for seed in range(2)]
    async with open_rig(models[0], tmp_path / "rig", names=("one",)) as rig:
        before = await rig.generate("one", "before", 40)
        report = await rig.push(models[1], 1)
        after = await rig.generate("one", "after", 40)
        body = {"model_path": str(models[0]), "weight_version": "1.2"}
        async with rig.session.post(f"{rig.processes['one'].url}/update_weights_from_disk", json=body) as reply:
            assert reply.status == 200, await reply.text()
        again = await rig.generate("one", "again", 40)
    assert report.updated == ("one",)
    assert [completion.spans[-1].version.step for completion in (after, again)] == [1, 2]
    for completion, directory in ((before, models[0]), (after, models[1]), (again, models[0])):
        expected = reference_logprobs(directory, [*PROMPT, *completion.output_ids])[len(PROMPT) - 1 :]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() <= 1e-3
