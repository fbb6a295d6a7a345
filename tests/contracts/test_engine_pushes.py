"""Every token under the version that its span names, before, during and after pushes, against real engines.

The reference is transformers' forward pass of that version's weights in float32. The embedded engine computes in
float32 too; SGLang is run in bfloat16 here, as it is on GPUs (test_engine_contract.py runs it in float32).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineId, FinishReason, GenerateRequest, PauseMode, RequestId
from headrace.policies.errors import FlushRefused, NoSession, SessionAlreadyOpen, UnknownGroup
from headrace.policies.processes.server_process import EngineProcess, ServerProcess
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushOutcome, PushStep
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.versions import SGLangApi, release
from headrace.policies.tensors import Bucket
from support import push_rig
from support.engine_kinds import engine_process, kind_dialect

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
VOCABULARY, TOKENS = 258, 900
FLOAT32_ERROR = 1e-3
BFLOAT16_MEAN, BFLOAT16_MAX = 0.02, 0.1


@dataclass
class Rig:
    """One engine and a sender. `models` are the directories of two sets of weights, `served` which of them a version
    was."""

    process: ServerProcess
    engine: SGLangEngine
    sender: SenderProcess
    models: list[Path]
    dialect: SGLangApi
    support: Any
    gate: Any
    directories: SnapshotDirectories
    served: dict[PolicyVersion, int] = field(default_factory=lambda: {PolicyVersion(1, 0): 0})
    asked: int = 0

    @property
    def genuine(self) -> bool:
        return not isinstance(self.process, EngineProcess)

    @property
    def tells_checksums(self) -> bool:
        return release(self.dialect.version) >= (0, 5, 22)

    def next_version(self) -> tuple[PolicyVersion, Path]:
        version, model = PolicyVersion(1, len(self.served)), len(self.served) % 2
        self.served[version] = model
        return version, self.models[model]

    async def push(
        self, mode: PauseMode, transport: str = "group", **before: Callable[[], Awaitable[None]]
    ) -> PolicyVersion:
        """`before`, by phase: what to do when the journal has been told of it."""
        version, model = self.next_version()
        # Before 0.5.22 SGLang tells no checksums without CUDA.
        verify = "snapshot" if self.tells_checksums else "off"
        config = PushConfig.model_validate(
            {
                "pause_mode": mode,
                "transport": transport,
                "bucket_bytes": 200_000,
                "verify": verify,
                "phase_timeout_s": 30.0,
            }
        )
        snapshot = self.support.snapshot(model, version.step)

        async def journal(_: object, step: PushStep) -> None:
            if (action := before.pop(step.phase.value, None)) is not None:
                await action()

        report = await push(
            snapshot, [self.engine], self.sender, self.gate, journal, config, directories=self.directories
        )
        assert [part.outcome for part in report.engines] == [PushOutcome.UPDATED], report
        assert snapshot.version == version
        return version

    async def generate(self, *prompt: int, tokens: int = TOKENS, namespace: str | None = None) -> Completion:
        self.asked += 1
        request = GenerateRequest(
            request_id=RequestId(f"r{self.asked}"),
            input_ids=prompt,
            max_new_tokens=tokens,
            temperature=0.9,
            cache_namespace=namespace,
        )
        return await self.engine.generate(request)

    async def until_sampling(self, tokens: int) -> None:
        """Until the engine holds so many tokens of running requests."""
        async with asyncio.timeout(30):
            while (await self.engine._transport.get("/v1/loads"))["loads"][0]["num_used_tokens"] < tokens:
                pass


@pytest.fixture(scope="module")
def weights(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    return [softened(write_model(folder / f"model{seed}", seed=seed)) for seed in range(2)]


def softened(model: Path) -> Path:
    """Without an end token, so that nothing ends early; and with logits whose size is that of a trained model's: the
    error of bfloat16 grows with them."""
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "generation_config.json"):
        keys = json.loads((model / name).read_text())
        del keys["eos_token_id"]
        (model / name).write_text(json.dumps(keys))
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 0.3
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["cpu", pytest.param("sglang", marks=pytest.mark.sglang)]
)
async def rig(
    request: pytest.FixtureRequest,
    weights: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("engine")
    process = engine_process(request.param, weights[0], folder, dtype="bfloat16")
    sender = SenderProcess(SenderConfig(log_path=folder / "sender.log"))
    async with process, sender, aiohttp.ClientSession() as session:
        config = SGLangConfig(vocab_size=VOCABULARY, in_place=True)
        engine = SGLangEngine(EngineId("e"), process.url, session, config)
        dialect = kind_dialect(request.param)
        directories = SnapshotDirectories(folder / "weights", weights[0], DirectoryReaders())
        yield Rig(process, engine, sender, weights, dialect, push_rig, push_rig.RecordingGate(), directories)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def resumed(rig: Rig) -> AsyncIterator[None]:
    """A test that fails in the midst of a push must not hold the next one."""
    yield
    await rig.engine.resume()


class Errors:
    """Differences to the reference, of tokens on clean and on stale keys and values."""

    def __init__(self, rig: Rig) -> None:
        from transformers import Qwen3ForCausalLM

        self._rig = rig
        self._models = [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in rig.models]
        self.clean: list[float] = []
        self.stale: list[float] = []

    def add(self, prompt: tuple[int, ...], done: Completion) -> None:
        for span in done.spans:
            model = self._models[self._rig.served[span.version]]
            ids = [*prompt, *done.output_ids[: span.end]]
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, len(prompt) + span.start - 1 : -1] / 0.9
            output = torch.tensor(done.output_ids[span.start : span.end])
            expected = logits.log_softmax(-1)[torch.arange(len(output)), output]
            found = (torch.tensor(done.logprobs[span.start : span.end]) - expected).abs().tolist()
            (self.stale if span.stale_kv else self.clean).extend(found)

    def check(self, record: Callable[[str, object], None]) -> None:
        """What is not flagged is within the bound; all is told."""
        for name, found in (("clean", self.clean), ("stale", self.stale)):
            if found:
                told = f"{len(found)} tokens, mean {sum(found) / len(found):.5f}, max {max(found):.5f}"
                record(f"{name}_error", told)
                print(f"{'sglang' if self._rig.genuine else 'embedded'} {name}: {told}")
        if not self._rig.genuine:
            assert max(self.clean) <= FLOAT32_ERROR
        else:
            assert sum(self.clean) / len(self.clean) <= BFLOAT16_MEAN
            assert max(self.clean) <= BFLOAT16_MAX


@pytest.mark.whole
@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_each_token_is_sampled_by_the_version_of_its_span(
    rig: Rig, mode: PauseMode, record_property: Callable[[str, object], None]
) -> None:
    if mode is PauseMode.RETRACT and not rig.dialect.version_spans:
        pytest.skip(f"SGLang {rig.dialect.version} labels a reply as a whole: pause it by abort")
    prompts = [(10 + index, 20, 30) for index in range(4)]
    errors = Errors(rig)
    before = await rig.generate(*prompts[0], tokens=60)
    running: list[asyncio.Task[Completion]] = []
    async with asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            running.extend(tasks.create_task(rig.generate(*prompt)) for prompt in prompts)
            await rig.until_sampling(400)

        version = await rig.push(mode, pause=ask)
    after = await rig.generate(*prompts[0], tokens=60)
    assert [span.version for span in after.spans] == [version]
    errors.add(prompts[0], before)
    errors.add(prompts[0], after)
    for prompt, task in zip(prompts, running, strict=True):
        done = task.result()
        errors.add(prompt, done)
        if mode is PauseMode.RETRACT:
            assert (done.retractions, done.spans[-1].version) == (1, version)
            assert len(done.spans) == 2
        else:
            assert (done.finish, len(done.spans)) == (FinishReason.ABORT, 1)
            assert done.spans[0].version < version
    # The client was told that pushes may come in place, and flags each change of version: these were clean.
    errors.clean, errors.stale = errors.clean + errors.stale, []
    errors.check(record_property)
    assert (await rig.engine.info()).version == version


async def test_a_push_by_disk_changes_running_requests_to_the_new_weights(
    rig: Rig, record_property: Callable[[str, object], None]
) -> None:
    if not rig.dialect.version_spans:
        pytest.skip(f"SGLang {rig.dialect.version} labels a reply as a whole: pause it by abort")
    prompt = (40, 50, 60)
    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[Completion]] = []

        async def ask() -> None:
            running.append(tasks.create_task(rig.generate(*prompt)))
            await rig.until_sampling(100)

        version = await rig.push(PauseMode.RETRACT, "disk", pause=ask)
    done = running[0].result()
    assert (done.retractions, len(done.spans), done.spans[-1].version) == (1, 2, version)
    after = await rig.generate(*prompt, tokens=60)
    errors = Errors(rig)
    errors.add(prompt, done)
    errors.add(prompt, after)
    errors.clean, errors.stale = errors.clean + errors.stale, []
    errors.check(record_property)
    assert (await rig.engine.info()).version == version


async def test_an_in_place_pause_marks_every_token_not_computed_by_its_version(
    rig: Rig, record_property: Callable[[str, object], None]
) -> None:
    if not rig.dialect.version_spans:
        pytest.skip(f"SGLang {rig.dialect.version} labels a reply as a whole: pause it by abort")
    old = max(rig.served)
    await rig.engine.flush()
    prompts = [(100 + index, 20, 30, 40) for index in range(4)]
    running: list[asyncio.Task[Completion]] = []
    async with asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            running.extend(tasks.create_task(rig.generate(*prompt, namespace=str(old))) for prompt in prompts)
            await rig.until_sampling(400)

        async def flush() -> None:
            with pytest.raises(FlushRefused):
                await rig.engine.flush()

        # While they are held in place they cannot end.
        version = await rig.push(PauseMode.IN_PLACE, pause=ask, resume=flush)
    assert rig.gate.namespaces == {"e": str(version)}, "the push could not flush either"
    errors = Errors(rig)
    for prompt, task in zip(prompts, running, strict=True):
        done = task.result()
        assert [(span.version, span.stale_kv) for span in done.spans] == [(old, False), (version, True)]
        errors.add(prompt, done)
    if rig.genuine:
        # The cache of before is still there: a request under the new version's name shares none of it.
        shared = await rig.generate(*prompts[0], tokens=60, namespace=str(old))
        assert shared.cached_tokens > 0
        assert [span.stale_kv for span in shared.spans] == [True]
        errors.add(prompts[0], shared)
    own = await rig.generate(*prompts[0], tokens=60, namespace=str(version))
    assert own.cached_tokens == 0
    assert [span.stale_kv for span in own.spans] == [False]
    errors.add(prompts[0], own)
    errors.check(record_property)
    # Else the flag would mean nothing.
    assert max(errors.stale) > BFLOAT16_MAX
    await rig.engine.flush()
    clean = await rig.generate(*prompts[0], tokens=60)
    assert clean.cached_tokens == 0


async def test_refused_updates_raise_typed_errors(rig: Rig) -> None:
    engine = rig.engine
    bucket = Bucket(names=("model.norm.weight",), dtypes=("float32",), shapes=((96,),))
    with pytest.raises(UnknownGroup):
        await engine.leave_group("nobody")
    if not rig.dialect.update_session:
        # Refused by the client: the server would end.
        with pytest.raises(UnknownGroup):
            await engine.update(bucket, group="nobody", version=None)
        return
    with pytest.raises(NoSession):
        await engine.end_update()
    with pytest.raises(NoSession):
        await engine.update(bucket, group="nobody", version=None)
    await engine.begin_update()
    try:
        with pytest.raises(SessionAlreadyOpen):
            await engine.begin_update()
        with pytest.raises(UnknownGroup):
            await engine.update(bucket, group="nobody", version=None)
    finally:
        await engine.end_update()
    assert (await rig.generate(1, tokens=5)).finish is FinishReason.LENGTH


async def test_health_checks_succeed_during_a_pause(rig: Rig) -> None:
    await rig.engine.health()
    await rig.engine.pause(PauseMode.RETRACT)
    assert (await rig.engine.info()).paused
    await rig.engine.health()
    await rig.engine.resume()
    assert not (await rig.engine.info()).paused


async def test_a_relabelled_engine_continues_its_requests(rig: Rig) -> None:
    old = max(rig.served)
    version = PolicyVersion(old.epoch, old.step + 1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rig.generate(7, 8, 9, tokens=900))
        await rig.until_sampling(50)
        await rig.engine.relabel(version)
    assert running.result().finish is FinishReason.LENGTH
    assert (await rig.engine.info()).version == version
    rig.served[version] = rig.served[old]
