"""The weight routes of a real CPU engine against a trainer in this process: what arrives, what is refused, what a pause
in place keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.policies.push.process_group import (
    WeightGroup,
    destroy_group,
    finish_broadcast,
    form_group,
    host_store,
    start_broadcast,
)
from headrace.policies.push.weights import checksum, read_snapshot

pytestmark = pytest.mark.asyncio(loop_scope="module")
NORM = "model.norm.weight"
Reply = tuple[int, Any]


@dataclass
class Trainer:
    """Rank 0 of a group of two, and the engine's routes."""

    session: aiohttp.ClientSession
    url: str
    groups: int = 0
    group: WeightGroup | None = None

    async def post(self, path: str, body: object) -> Reply:
        async with self.session.post(self.url + path, data=json.dumps(body)) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def checksums(self) -> dict[str, str]:
        _, reply = await self.post("/weights_checker", {"action": "checksum"})
        return reply["ranks"][0]["checksums"]

    async def version(self) -> str:
        return (await self.get("/model_info"))["weight_version"]

    async def join(self) -> None:
        self.groups += 1
        name = f"group{self.groups}"
        store = host_store("127.0.0.1", 2, 10.0)
        body = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": "gloo",
        }

        def form() -> WeightGroup:
            return form_group(store, name=name, rank=0, world_size=2, backend="gloo", timeout_s=10.0)

        async with asyncio.TaskGroup() as tasks:
            forming = tasks.create_task(asyncio.to_thread(form))
            joined = tasks.create_task(self.post("/init_weights_update_group", body))
        assert joined.result()[0] == 200
        self.group = forming.result()

    async def leave(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            await self.post("/destroy_weights_update_group", {"group_name": group.name})
            destroy_group(group)

    async def send(
        self, tensors: Mapping[str, torch.Tensor], *, pieces: list[torch.Tensor] | None = None, **body: object
    ) -> Reply:
        """One bucket; `pieces` are what is broadcast in its stead."""
        assert self.group is not None
        group = self.group
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
        told = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

        def broadcast() -> None:
            for piece in [flat] if pieces is None else pieces:
                finish_broadcast(group, start_broadcast(group, piece))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(broadcast))
            reply = tasks.create_task(self.post("/update_weights_from_distributed", {**told, **body}))
        return reply.result()

    async def session_open(self) -> None:
        assert (await self.post("/begin_weight_update", {}))[0] == 200

    async def session_end(self) -> Reply:
        return await self.post("/end_weight_update", {})

    def long(self, rid: str, tokens: int = 900) -> asyncio.Task[Reply]:
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, "rid": rid, "extra_key": "x"}
        return asyncio.get_running_loop().create_task(self.post("/generate", body))

    async def until(self, **numbers: int) -> None:
        async with asyncio.timeout(30):
            while True:
                load = (await self.get("/v1/loads"))["loads"][0]
                if all(load[f"num_{name}_reqs"] == number for name, number in numbers.items()):
                    return


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, write_model) -> list[Path]:
    return [write_model(tmp_path_factory.mktemp("models") / "model", seed=seed) for seed in range(2)]


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return read_snapshot({model / "model.safetensors": None}).tensors()


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum(tensor.float(), tensor.dtype) for name, tensor in tensors.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    config = EngineProcessConfig(
        model=models[0],
        directory=tmp_path_factory.mktemp("engine"),
        weights=(tmp_path_factory.getbasetemp(),),
        max_running=4,
        group_timeout_s=8.0,
    )
    async with EngineProcess(config) as process, aiohttp.ClientSession() as session:
        yield Trainer(session=session, url=process.url)


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(engine: Trainer, models: list[Path]) -> AsyncIterator[Trainer]:
    """The shared engine, idle, with the first model's weights as version 0."""
    body = {"model_path": str(models[0]), "weight_version": "0"}
    assert (await engine.post("/update_weights_from_disk", body))[0] == 200
    yield engine
    await engine.session_end()
    await engine.post("/continue_generation", {})
    await engine.post("/abort_request", {"abort_all": True})
    await engine.until(running=0, waiting=0)
    await engine.leave()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["storage", "reversed"])
async def test_weights_of_every_dtype_and_in_any_order_are_received(
    trainer: Trainer, models: list[Path], dtype: torch.dtype, order: str
) -> None:
    """In place where the order allows, through a buffer elsewhere: the sums of what runs are the sender's."""
    given = {name: tensor.to(dtype) for name, tensor in tensors_of(models[1]).items()}
    names = list(given) if order == "storage" else list(given)[::-1]
    await trainer.join()
    await trainer.session_open()
    for first in range(0, len(names), 5):
        bucket = {name: given[name] for name in names[first : first + 5]}
        last = first + 5 >= len(names)
        assert (await trainer.send(bucket, weight_version="1" if last else None))[0] == 200
        assert await trainer.version() == ("1" if last else "0")
    assert await trainer.checksums() == sums(given)
    assert (await trainer.session_end())[0] == 200


async def test_separate_broadcasts_can_update_only_some_parameters(trainer: Trainer, models: list[Path]) -> None:
    names = ["model.layers.0.self_attn.q_norm.weight", NORM, "model.layers.2.mlp.down_proj.weight"]
    changed = {name: 2 * tensors_of(models[0])[name] for name in names}
    await trainer.join()
    await trainer.session_open()
    pieces = list(changed.values())
    assert (await trainer.send(changed, pieces=pieces, load_format=None, weight_version="1"))[0] == 200
    assert await trainer.checksums() == sums(tensors_of(models[0]) | changed)
    assert (await trainer.session_end())[0] == 200
    assert await trainer.version() == "1"


async def test_weights_without_a_version_are_never_used(trainer: Trainer, models: list[Path]) -> None:
    """A sender that dies between two buckets: whoever ends its session must not put half a set into use."""
    given = tensors_of(models[1])
    await trainer.join()
    await trainer.session_open()
    assert (await trainer.send({NORM: given.pop(NORM)}))[0] == 200
    assert (await trainer.session_end())[0] == 200
    assert await trainer.checksums() == sums(tensors_of(models[0]))
    await trainer.session_open()
    assert (await trainer.send(given, weight_version="1"))[0] == 200
    assert await trainer.checksums() == sums(given | {NORM: tensors_of(models[0])[NORM]}), "nor later"


async def test_mismatched_tensors_are_refused_before_the_transfer(trainer: Trainer) -> None:
    await trainer.join()
    await trainer.session_open()
    cases: list[tuple[dict[str, object], str]] = [
        ({"shapes": [[97]]}, f"parameter {NORM}: the snapshot has shape (97,), but this engine has (96,)"),
        ({"names": ["other"]}, "parameter other: the snapshot has it, but this engine's model does not"),
        ({"dtypes": ["int8"]}, f"parameter {NORM}: the snapshot has dtype int8, but this engine takes"),
        ({"names": [NORM] * 2, "dtypes": ["float32"] * 2, "shapes": [[96]] * 2}, "names contains a parameter twice"),
        ({"load_format": "pickle"}, "load_format pickle is not supported"),
    ]
    for change, message in cases:
        status, reply = await trainer.send({NORM: torch.ones(96)}, pieces=[], **change)
        assert (status, reply["success"]) == (400, False)
        assert reply["message"].startswith(message)
    # The group is as good as before: nobody waited in it.
    assert (await trainer.send({NORM: torch.ones(96)}, weight_version="1"))[0] == 200


async def test_an_update_with_non_finite_values_keeps_the_old_weights(trainer: Trainer, models: list[Path]) -> None:
    given = tensors_of(models[1])
    await trainer.join()
    await trainer.session_open()
    assert (await trainer.send({NORM: torch.full((96,), float("nan"))}))[0] == 200
    del given[NORM]
    status, reply = await trainer.send(given, weight_version="1")
    assert status == 400
    assert f"{NORM} contains NaN or infinity" in reply["message"]
    assert await trainer.version() == "0"
    assert await trainer.checksums() == sums(tensors_of(models[0]))
    # What came with it was dropped as well: no subset may become live now.
    status, reply = await trainer.send(given, weight_version="1")
    assert status == 400
    assert f"{NORM} (1 in all) was not sent again" in reply["message"]
    assert (await trainer.send(tensors_of(models[1]), weight_version="1"))[0] == 200
    assert await trainer.checksums() == sums(tensors_of(models[1]))


async def test_parameters_lost_in_an_interrupted_transfer_must_be_sent_again(
    trainer: Trainer, models: list[Path]
) -> None:
    given = tensors_of(models[1])
    names = list(given)
    await trainer.join()
    await trainer.session_open()
    assert (await trainer.send({name: given[name] for name in names[:5]}))[0] == 200
    # Nothing is broadcast: the collective ends with the group's time.
    status, reply = await trainer.send({names[5]: given[names[5]]}, pieces=[])
    assert status == 400
    assert "broadcast in group" in reply["message"]
    assert await trainer.checksums() == sums(tensors_of(models[0]))
    await trainer.leave()
    await trainer.join()
    status, reply = await trainer.send({name: given[name] for name in names[5:]}, weight_version="1")
    assert status == 400
    assert "(5 in all) was not sent again" in reply["message"]
    assert await trainer.version() == "0"
    assert (await trainer.send(given, weight_version="1"))[0] == 200
    assert await trainer.checksums() == sums(given)


async def test_an_in_place_pause_keeps_requests_and_splits_their_spans(trainer: Trainer, models: list[Path]) -> None:
    await trainer.join()
    running = trainer.long("running")
    await trainer.until(running=1)
    assert (await trainer.post("/pause_generation", {"mode": "in_place"}))[0] == 200
    arrived = trainer.long("arrived", tokens=3)
    await trainer.until(running=1, waiting=1)
    # It does not wait for the request that is paused.
    await trainer.session_open()
    assert (await trainer.send(tensors_of(models[1]), weight_version="1"))[0] == 200
    assert (await trainer.session_end())[0] == 200
    status, text = await trainer.post("/flush_cache", {})
    assert (status, text.strip()) == (400, "Flush cache failed.")
    assert not running.done()
    await trainer.until(running=1, waiting=1)
    assert (await trainer.post("/continue_generation", {}))[0] == 200
    meta = (await running)[1]["meta_info"]
    cut = meta["weight_versions"][0]["end"]
    assert 0 < cut < 900
    assert meta["weight_versions"] == [
        {"version": "0", "start": 0, "end": cut},
        {"version": "1", "start": cut, "end": 900},
    ]
    assert (meta["num_retractions"], meta["finish_reason"]) == (0, {"type": "length", "length": 900})
    late = (await arrived)[1]["meta_info"]
    assert late["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]


async def test_an_in_place_pause_keeps_the_cache_of_the_old_weights(trainer: Trainer, models: list[Path]) -> None:
    """After a swap to the same weights nothing differs; so what a pause in place keeps is the cache itself."""
    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    running = trainer.long("running")
    await trainer.until(running=1)
    await trainer.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(models[0]), "weight_version": "1", "flush_cache": False}
    assert (await trainer.post("/update_weights_from_disk", body))[0] == 200
    await trainer.post("/continue_generation", {})
    reply = (await running)[1]
    assert len(reply["meta_info"]["weight_versions"]) == 2
    config = QwenConfig.read(models[0] / "config.json")
    model = Qwen(config, read_weights(config, models[0]), capacity=1024)
    tokens = [5, 6, 7, *reply["output_ids"]]
    expected = model.logits([tokens])[0, 2:-1].log_softmax(-1).gather(1, torch.tensor(tokens[3:])[:, None])[:, 0]
    got = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (got - expected).abs().max() <= 1e-3


async def test_a_request_aborted_during_an_in_place_pause_is_answered_when_the_pause_ends(trainer: Trainer) -> None:
    running = trainer.long("running")
    await trainer.until(running=1)
    await trainer.post("/pause_generation", {"mode": "in_place"})
    assert await trainer.post("/abort_request", {"rid": "running"}) == (200, "")
    await trainer.until(running=1)
    assert not running.done()
    await trainer.post("/continue_generation", {})
    meta = (await running)[1]["meta_info"]
    assert meta["finish_reason"]["message"] == "Aborted"
    assert 0 < meta["completion_tokens"] < 900


async def test_a_flush_prevented_by_running_requests_is_reported_after_the_update(
    trainer: Trainer, models: list[Path]
) -> None:
    running = trainer.long("running")
    await trainer.until(running=1)
    await trainer.post("/pause_generation", {"mode": "in_place"})
    await trainer.join()
    await trainer.session_open()
    status, reply = await trainer.send(tensors_of(models[1]), weight_version="1", flush_cache=True)
    assert (status, reply["success"]) == (400, False)
    assert reply["message"].startswith("Weights were updated, but the cache was not flushed")
    assert await trainer.version() == "1"
    assert await trainer.checksums() == sums(tensors_of(models[1]))
    await trainer.post("/pause_generation", {"mode": "abort"})
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_weights_are_loaded_from_disk(trainer: Trainer, models: list[Path]) -> None:
    running = trainer.long("running", tokens=900)
    await trainer.until(running=1)
    body = {"model_path": str(models[1]), "weight_version": "1"}
    status, reply = await trainer.post("/update_weights_from_disk", body)
    assert status == 200
    assert reply == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to 1.",
        "num_paused_requests": 0,
    }
    # Without a pause it waits for what runs.
    assert (await running)[1]["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 900}]
    assert await trainer.checksums() == sums(tensors_of(models[1]))
    info = await trainer.get("/model_info")
    assert (info["weight_version"], info["model_path"]) == ("1", str(models[1]))
    assert (await trainer.long("after", tokens=2))[0] == 200


async def test_a_mismatched_directory_is_refused_and_changes_nothing(
    trainer: Trainer, models: list[Path], tmp_path: Path, write_model
) -> None:
    other = write_model(tmp_path / "other", tied=False)
    missing, surplus, shaped, broken = (write_model(tmp_path / name, seed=5) for name in ("a", "b", "c", "d"))
    given = tensors_of(missing)
    save_file({name: tensor for name, tensor in given.items() if name != NORM}, missing / "model.safetensors")
    save_file({**given, "more.weight": torch.ones(2)}, surplus / "model.safetensors")
    save_file({**given, NORM: torch.ones(97)}, shaped / "model.safetensors")
    save_file({**given, NORM: torch.full((96,), float("inf"))}, broken / "model.safetensors")
    cases = {
        str(tmp_path / "nowhere"): "nowhere/config.json",
        str(other): "config.json has tie_word_embeddings False, but this engine has True",
        str(missing): f"parameter {NORM} is missing",
        str(surplus): "has the parameter more.weight, but this engine's model does not",
        str(shaped): f"parameter {NORM} has shape (97,), but the config requires (96,)",
        str(broken): f"parameter {NORM} contains NaN or infinity",
    }
    for path, message in cases.items():
        status, reply = await trainer.post("/update_weights_from_disk", {"model_path": path, "weight_version": "9"})
        assert (status, reply["success"], reply["num_paused_requests"]) == (400, False, 0)
        assert message in reply["message"]
    assert await trainer.version() == "0"
    assert await trainer.checksums() == sums(tensors_of(models[0]))
    assert (await trainer.get("/model_info"))["model_path"] == str(models[0])
    await trainer.session_open()
    status, reply = await trainer.post("/update_weights_from_disk", {"model_path": str(models[1])})
    assert status == 400
    assert "session is open" in reply["message"]
    await trainer.session_end()


async def test_a_pause_holds_requests_while_weights_are_loaded_from_disk(trainer: Trainer, models: list[Path]) -> None:
    held = trainer.long("held", tokens=900)
    await trainer.until(running=1)
    await trainer.post("/pause_generation", {"mode": "retract"})
    status, reply = await trainer.post("/update_weights_from_disk", {"model_path": str(models[1])})
    assert (status, reply["num_paused_requests"]) == (200, 1)
    await trainer.post("/continue_generation", {})
    assert (await held)[1]["meta_info"]["num_retractions"] == 1


async def test_the_same_weights_can_be_given_another_version(trainer: Trainer) -> None:
    first = trainer.long("first")
    await trainer.until(running=1)
    body = {"new_version": "0.5", "abort_all_requests": False}
    status, reply = await trainer.post("/update_weight_version", body)
    assert (status, reply["success"], reply["new_version"]) == (200, True, "0.5")
    assert [span["version"] for span in (await first)[1]["meta_info"]["weight_versions"]] == ["0", "0.5"]
    second = trainer.long("second")
    await trainer.until(running=1)
    await trainer.post("/update_weight_version", {"new_version": "0.6"})
    assert (await second)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert await trainer.version() == "0.6"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/update_weights_from_tensor", "does not unpickle"),
        ("/release_memory_occupation", "release_memory_occupation is not supported"),
        ("/resume_memory_occupation", "resume_memory_occupation is not supported"),
    ],
)
async def test_unsupported_routes_explain_their_refusal(trainer: Trainer, path: str, named: str) -> None:
    status, reply = await trainer.post(path, {"serialized_named_tensors": ["gASV"]})
    assert status == 400
    assert named in reply["error"]["message"]


async def test_the_server_reports_its_ranks(trainer: Trainer) -> None:
    assert (await trainer.get("/server_info"))["tp_size"] == 1


@pytest.mark.slow
async def test_a_hundred_pushes_use_no_more_memory_than_one(tmp_path: Path) -> None:
    """Two sets of weights and two buckets: in turns received in place and through buffers, each in a new group."""
    import psutil
    from benches.push.testbed import write_random_model

    given = read_snapshot({write_random_model(tmp_path / "model", 48_000_000): None}).tensors()
    names = list(given)
    buckets = [names[:5], names[5:9], names[9:]]
    total_bytes = sum(tensor.nbytes for tensor in given.values())
    largest_bytes = max(sum(given[name].nbytes for name in bucket) for bucket in buckets)
    config = EngineProcessConfig(model=tmp_path / "model", directory=tmp_path, max_running=1, max_context=64)
    async with EngineProcess(config) as process, aiohttp.ClientSession() as session:
        trainer = Trainer(session=session, url=process.url)
        # The first group and the first sums load libraries.
        await trainer.join()
        await trainer.leave()
        await trainer.checksums()
        memory = psutil.Process(process.pid).memory_info
        before_bytes = memory().rss
        for turn in range(100):
            await trainer.join()
            await trainer.session_open()
            for index, bucket in enumerate(buckets):
                order = bucket if turn % 2 == 0 else bucket[::-1]
                version = str(turn) if index == 2 else None
                reply = await trainer.send({name: given[name] for name in order}, weight_version=version)
                assert reply[0] == 200
            assert (await trainer.session_end())[0] == 200
            await trainer.leave()
        grown_bytes = memory().rss - before_bytes
    slack_bytes = 16_000_000
    assert grown_bytes <= total_bytes + 2 * largest_bytes + slack_bytes
