"""JSON replies of the CPU engine, with the same keys as SGLang 0.5.23. Pure: times are arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from headrace.policies.cpu_engine.scheduler import Aborted, Finish, Generation, LengthReached, Stopped

Json = dict[str, Any]
MISSING_WHEN_QUEUED = (
    *("prompt_tokens", "cached_tokens", "cached_tokens_details", "num_retractions"),
    *("reasoning_tokens", "dp_rank"),
)


def finish_json(finish: Finish) -> Json:
    """Return the `finish_reason` in SGLang's format."""
    if isinstance(finish, Stopped):
        return {"type": "stop", "matched": finish.matched}
    if isinstance(finish, LengthReached):
        return {"type": "length", "length": finish.length}
    if finish.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def visible_text(generation: Generation, decode: Callable[[Sequence[int], bool], str]) -> str:
    """Return the text without the matched stop, unless `no_stop_trim` is set. `decode` takes the ids and
    `skip_special_tokens`."""
    sampling, finish, ids = generation.prompt.sampling, generation.finish, generation.output_ids
    trimmed = isinstance(finish, Stopped) and not sampling.no_stop_trim
    if trimmed and isinstance(finish, Stopped) and isinstance(finish.matched, int):
        ids = ids[:-1]
    text = decode(ids, sampling.skip_special_tokens)
    if trimmed and isinstance(finish, Stopped) and isinstance(finish.matched, str):
        position = text.find(finish.matched)
        return text if position < 0 else text[:position]
    return text


def generation_json(
    generation: Generation,
    decode: Callable[[Sequence[int], bool], str],
    *,
    version: str,
    latency_s: float,
    now_s: float,
) -> Json:
    """Return the reply to /generate for one sequence. As in SGLang, it lacks some keys if the request was aborted while
    queued."""
    finish = generation.finish
    assert finish is not None
    spans: list[Json] = []
    for label, tokens in groupby(generation.versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": label, "start": start, "end": start + sum(1 for _ in tokens)})
    meta: Json = {
        "id": generation.prompt.request_id,
        "finish_reason": finish_json(finish),
        "prompt_tokens": len(generation.prompt.input_ids),
        "weight_version": version,
        "weight_versions": spans,
        "num_retractions": generation.retractions,
        "completion_tokens": len(generation.output_ids),
        "reasoning_tokens": 0,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": latency_s,
        "response_sent_to_client_ts": now_s,
    }
    if generation.arrived_s is not None and generation.forward_s is not None:
        # SGLang reports these with --enable-metrics: a duration, and moments in seconds since 1970.
        arrived_s = now_s - latency_s
        meta["queue_time"] = generation.forward_s - generation.arrived_s
        meta["forward_entry_time"] = arrived_s + generation.forward_s - generation.arrived_s
        if generation.first_token_s is not None:
            meta["prefill_finished_time"] = arrived_s + generation.first_token_s - generation.arrived_s
    if generation.prompt.return_logprob:
        # JSON has no infinities, so an infinite log-probability becomes null.
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob if math.isfinite(logprob) else None, token, None]
            for logprob, token in zip(generation.logprobs, generation.output_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(generation.output_ids)
    if isinstance(finish, Aborted) and finish.queued:
        for key in MISSING_WHEN_QUEUED:
            del meta[key]
    return {"text": visible_text(generation, decode), "output_ids": generation.output_ids, "meta_info": meta}


def loads_json(running: int, waiting: int, used_tokens: int, total_tokens: int, max_running: int) -> Json:
    """Return the reply to /v1/loads."""
    usage = used_tokens / total_tokens
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used_tokens,
        "max_total_num_tokens": total_tokens,
        "token_usage": usage,
        "max_running_requests": max_running,
        "cache_hit_rate": 0.0,
        "utilization": running / max_running,
    }
    return {
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": usage,
            "avg_utilization": running / max_running,
        },
    }
