"""Builds request bodies and parses replies. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

import numpy as np
import orjson

from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason, GenerateRequest, RequestId
from headrace.policies.errors import EngineReplyInvalid


def wire_id(request_id: RequestId) -> str:
    """Return the id that is sent to the server. No other id begins with it, because SGLang aborts all requests whose id
    begins with the given one."""
    return f"{request_id}/"


NEUTRAL: Final[Mapping[str, float]] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Sampling parameters at which the log-probabilities are those of the model. They are sent by value: a server started
with `--preferred-sampling-params` has others for what a request leaves out."""


def generate_body(request: GenerateRequest) -> dict[str, object]:
    """Return the /generate body of one request."""
    namespace = {} if request.cache_namespace is None else {"extra_key": request.cache_namespace}
    grammar = {} if request.grammar is None else {request.grammar.kind.value: request.grammar.text}
    return {
        **namespace,
        "rid": wire_id(request.request_id),
        "input_ids": np.asarray(request.input_ids, dtype=np.int32),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **NEUTRAL,
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
            **grammar,
        },
    }


def parse_completion(
    reply: dict[str, Any], foreign_version: str | None = None, *, expects_spans: bool = True
) -> Completion:
    """Parse a /generate reply; the reply to a request aborted in the queue lacks some keys. `expects_spans` is False
    for a dialect that labels a whole reply with one version. Raises EngineReplyInvalid."""
    meta = read(reply, "meta_info", dict)
    ids = tuple(read(reply, "output_ids", list))
    if not {*map(type, ids)} <= {int}:
        raise EngineReplyInvalid(f"/generate: output_ids are not all whole numbers: {ids[:8]}")
    try:
        logprobs = tuple(map(float, map(itemgetter(0), read(meta, "output_token_logprobs", list))))
        finish = FinishReason(read(meta, "finish_reason", dict)["type"])
        if "weight_versions" in meta or (foreign_version is None and expects_spans):
            spans = tuple(
                VersionSpan(
                    start=int(span["start"]),
                    end=int(span["end"]),
                    version=read_version(span["version"], foreign_version),
                )
                for span in read(meta, "weight_versions", list)
                # A version that was replaced before it sampled a token.
                if span["start"] != span["end"]
            )
        else:
            label = read(meta, "weight_version", str) if foreign_version is None else foreign_version
            whole = VersionSpan(start=0, end=len(ids), version=read_version(label, foreign_version))
            spans = (whole,) if ids else ()
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineReplyInvalid(f"/generate: {error!r} in meta_info") from error
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)) or not covers(spans, len(ids)):
        raise EngineReplyInvalid(
            f"/generate: ids, logprobs and spans do not match: {len(ids)}, {len(logprobs)}, {spans}"
        )
    return Completion(
        output_ids=ids,
        logprobs=logprobs,
        spans=spans,
        finish=finish,
        text=read(reply, "text", str),
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        retractions=_count(meta, "num_retractions"),
        queue_s=_seconds(meta.get("queue_time")),
        prefill_s=_between(meta, "forward_entry_time", "prefill_finished_time"),
        total_s=_seconds(meta.get("e2e_latency")),
    )


def _count(meta: dict[str, Any], key: str) -> int:
    """Return the number under a key; 0 if the key is missing."""
    return 0 if meta.get(key) is None else int(read(meta, key, int))


def covers(spans: tuple[VersionSpan, ...], length: int) -> bool:
    """Return True if the spans follow one another from 0 to `length`."""
    edges = [0, *(span.end for span in spans)]
    follow = all(span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False))
    return follow and edges[-1] == length


def mark_stale(completion: Completion, cache_namespace: str | None) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion with `stale_kv` set, for pushes in place.

    Every request carries, as its cache namespace, the version that its engine had when the request was sent. If that is
    the version of the first token, all keys and values were computed by it. Otherwise all tokens are stale, even
    without cached prefixes, because the prompt may have been computed in parts with a push in between. Tokens after a
    change of version are always stale."""
    spans = completion.spans
    stale = bool(spans) and cache_namespace != str(spans[0].version)
    marked = []
    for span in spans:
        stale = stale or span.version != spans[0].version
        marked.append(replace(span, stale_kv=stale))
    return tuple(marked)


def read_version(text: str, foreign_version: str | None = None) -> PolicyVersion:
    """Parse a version label. Raises EngineReplyInvalid for one that is not `epoch.step`, unless `foreign_version`
    replaces it."""
    try:
        return PolicyVersion.parse(text)
    except (ValueError, AttributeError) as error:
        if foreign_version is not None:
            return PolicyVersion.parse(foreign_version)
        raise EngineReplyInvalid(
            f"weight_version {text!r} is not epoch.step: start the server with --weight-version 1.0"
        ) from error


def read(source: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """Return `source[key]`. Raises EngineReplyInvalid if it is missing or not of this type."""
    value = source.get(key) if isinstance(source, dict) else None
    if not isinstance(value, kind):
        raise EngineReplyInvalid(f"the reply lacks {key} of type {kind.__name__}")
    return value


def parse_object(path: str, payload: bytes) -> dict[str, Any]:
    """Parse the JSON object of a reply. Raises EngineReplyInvalid."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise EngineReplyInvalid(f"{path} did not return JSON: {payload[:200]!r}") from error
    if not isinstance(body, dict):
        raise EngineReplyInvalid(f"{path} did not return a JSON object: {payload[:200]!r}")
    return body


def _seconds(value: object) -> float | None:
    """Return a reported duration in seconds; None if the server did not report a usable one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def _between(meta: dict[str, Any], begin: str, end: str) -> float | None:
    """Return the time between two reported moments, in seconds. Servers without `--enable-metrics` report none."""
    began_s, ended_s = _seconds(meta.get(begin)), _seconds(meta.get(end))
    # 0 is SGLang's value for a moment that the request did not reach.
    return _seconds(ended_s - began_s) if began_s and ended_s else None


def error_text(payload: bytes) -> str:
    """Return the message of an error reply, in any of the known formats."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return payload[:500].decode(errors="replace")
    if isinstance(body, dict):
        inner = body.get("error")
        message = inner.get("message") if isinstance(inner, dict) else body.get("message")
        return str(message if message is not None else body)[:500]
    return str(body)[:500]
