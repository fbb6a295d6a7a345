"""Calls to an engine whose replies are recorded (tests/golden/sglang-VERSION/replies.json) and compared.

What is kept of a reply is what our code reads: long ones are cut down to those keys, and nothing of the machine stays.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

Json = Any
PROMPT = [10, 20, 30, 40]
GREEDY = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
BUCKET = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[96]], "group_name": "nobody"}
DISTRIBUTED = "/update_weights_from_distributed"
KEPT = {
    "/server_info": {"version", "tp_size", "context_length", "max_req_input_len", "max_total_num_tokens", "status"},
    "/model_info": {"weight_version", "is_generation", "model_type", "architectures"},
    "/v1/loads": {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage"},
}
NOT_OURS = {"tensors_without"}
"""What the embedded engine refuses for another reason."""
CALLS: list[tuple[str, str, str, Json]] = [
    ("flushed", "POST", "/flush_cache", {}),
    ("generate", "POST", "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}),
    (
        "generate_stop",
        "POST",
        "/generate",
        {"input_ids": [5], "sampling_params": {"stop_token_ids": list(range(258))}, "return_logprob": True},
    ),
    ("generate_bare", "POST", "/generate", {"input_ids": [6], "sampling_params": GREEDY}),
    ("no_ids", "POST", "/generate", {"input_ids": [], "sampling_params": {}}),
    ("long_prompt", "POST", "/generate", {"input_ids": [1] * 1024}),
    ("long_total", "POST", "/generate", {"input_ids": [1] * 1000, "sampling_params": {"max_new_tokens": 25}}),
    ("temperature", "POST", "/generate", {"input_ids": [1], "sampling_params": {"temperature": -1.0}}),
    ("sampling_key", "POST", "/generate", {"input_ids": [1], "sampling_params": {"foo": 1}}),
    ("abort_unknown", "POST", "/abort_request", {"rid": "nobody"}),
    ("health", "GET", "/health", None),
    ("ready", "GET", "/ready", None),
    ("paused", "POST", "/pause_generation", {"mode": "retract"}),
    ("ready_paused", "GET", "/ready", None),
    ("health_paused", "GET", "/health", None),
    ("flushed_paused", "POST", "/flush_cache", {}),
    ("continued", "POST", "/continue_generation", {}),
    ("end_without", "POST", "/end_weight_update", {}),
    ("update_without", "POST", DISTRIBUTED, BUCKET),
    ("tensors_without", "POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}),
    ("disk_nowhere", "POST", "/update_weights_from_disk", {"model_path": "nowhere"}),
    ("begun", "POST", "/begin_weight_update", {}),
    ("begun_twice", "POST", "/begin_weight_update", {}),
    ("update_unknown_group", "POST", DISTRIBUTED, BUCKET),
    ("ended", "POST", "/end_weight_update", {}),
    ("destroy_unknown", "POST", "/destroy_weights_update_group", {"group_name": "nobody"}),
    ("checksums", "POST", "/weights_checker", {"action": "checksum"}),
    ("server_info", "GET", "/server_info", None),
    ("model_info", "GET", "/model_info", None),
    ("loads", "GET", "/v1/loads", None),
    ("nowhere", "GET", "/nowhere", None),
]


async def exchange(session: aiohttp.ClientSession, url: str) -> dict[str, Json]:
    """`{name: {path, status, reply}}` of all calls, and of two aborted requests."""

    async def call(method: str, path: str, body: Json) -> Json:
        async with session.request(method, url + path, json=body) as response:
            return {"path": path, "status": response.status, "reply": kept(path, await response.read())}

    done = {name: await call(method, path, body) for name, method, path, body in CALLS}
    long = {"max_new_tokens": 900, "ignore_eos": True}
    for name, paused in (("aborted_running", False), ("aborted_retracted", True)):
        body = {"input_ids": PROMPT, "sampling_params": long, "return_logprob": True, "rid": name}
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
            running = tasks.create_task(call("POST", "/generate", body))
            while (await call("GET", "/v1/loads", None))["reply"]["loads"][0]["num_used_tokens"] < 100:
                pass
            if paused:
                await call("POST", "/pause_generation", {"mode": "retract"})
            await call("POST", "/abort_request", {"rid": name})
            done[name] = await running
            await call("POST", "/continue_generation", {})
        shorten(done[name]["reply"])
    return done


def kept(path: str, payload: bytes) -> Json:
    try:
        reply = json.loads(payload)
    except ValueError:
        return payload.decode()
    if keys := KEPT.get(path):
        target = reply["loads"][0] if path == "/v1/loads" else reply
        cut = {key: target[key] for key in sorted(keys & target.keys())}
        return {"loads": [cut]} if path == "/v1/loads" else cut
    if isinstance(reply, dict) and "ranks" in reply:
        rank = reply["ranks"][0]
        name = "model.norm.weight"
        return {"success": reply["success"], "ranks": [{"checksums": {name: rank["checksums"][name]}}]}
    return reply


def shorten(reply: Json) -> None:
    """Two tokens are enough to see how they come."""
    length = min(2, len(reply["output_ids"]))
    meta = reply["meta_info"]
    reply["text"] = ""
    reply["output_ids"] = reply["output_ids"][:length]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:length]
    meta["completion_tokens"] = meta["output_token_logprobs_length"] = length
    for span in meta.get("weight_versions", []):
        span["end"] = length


REPORTED_TIMES = {"queue_time", "forward_entry_time", "prefill_finished_time"}
"""SGLang was recorded without `--enable-metrics`; the embedded engine always reports these."""


def differences(recorded: Json, other: Json, where: str = "", *, exact: bool) -> list[str]:
    """Keys that are missing (with `exact` also those too many), lists that are empty on one side only, and values of
    another type."""
    if isinstance(recorded, dict) and isinstance(other, dict):
        wrong = [f"{where} lacks {key}" for key in recorded.keys() - other.keys()]
        wrong += [f"{where} has {key}" for key in other.keys() - recorded.keys() - REPORTED_TIMES if exact]
        for key in recorded.keys() & other.keys():
            wrong += differences(recorded[key], other[key], f"{where}.{key}", exact=exact)
        return wrong
    if isinstance(recorded, list) and isinstance(other, list):
        if not recorded or not other:
            return [] if bool(recorded) is bool(other) else [f"{where} has {len(other)} entries, not {len(recorded)}"]
        return differences(recorded[0], other[0], f"{where}[0]", exact=exact)
    same = type(recorded) is type(other)
    return [] if same else [f"{where} is {type(other).__name__}, recorded was {type(recorded).__name__}"]
