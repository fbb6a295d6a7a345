"""Bodies of requests and replies: what is sent for a generation, and how its reply is read. Pure.

Invariants:
- What the server says is believed only where the contract's keys are there; versions come from its spans.
"""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from headrace.buffer.types import VersionSpan
from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason
from headrace.policies.errors import EngineReplyInvalid

if TYPE_CHECKING:
    from headrace.policies.engine import GenerateRequest, RequestId


def wire_id(request_id: RequestId) -> str:
    """An id that no other begins with: SGLang's abort ends every running request whose id begins with the given one."""
    return f"{request_id}/"


def generate_body(request: GenerateRequest) -> dict[str, object]:
    """The /generate body of one request."""
    namespace = {} if request.cache_namespace is None else {"extra_key": request.cache_namespace}
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
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
        },
    }


def parse_completion(
    reply: dict[str, Any], foreign_version: str | None = None, *, spans_told: bool = True
) -> Completion:
    """A Completion from a /generate reply; a request aborted in the queue lacks some keys. `spans_told` is False for a
    dialect that labels a reply as a whole. Raises EngineReplyInvalid."""
    meta = read(reply, "meta_info", dict)
    ids = tuple(read(reply, "output_ids", list))
    if not {*map(type, ids)} <= {int}:
        raise EngineReplyInvalid(f"/generate: output_ids are not all whole numbers: {ids[:8]}")
    try:
        logprobs = tuple(map(float, map(itemgetter(0), read(meta, "output_token_logprobs", list))))
        finish = FinishReason(read(meta, "finish_reason", dict)["type"])
        spans = _read_spans(meta, len(ids), foreign_version, spans_told)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineReplyInvalid(f"/generate: {error!r} in meta_info") from error
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)) or not covers(spans, len(ids)):
        raise EngineReplyInvalid(f"/generate: ids, logprobs and spans do not fit: {len(ids)}, {len(logprobs)}, {spans}")
    return Completion(
        output_ids=ids,
        logprobs=logprobs,
        spans=spans,
        finish=finish,
        text=read(reply, "text", str),
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        retractions=_count(meta, "num_retractions"),
    )


def _count(meta: dict[str, Any], key: str) -> int:
    """A number that may be missing."""
    return 0 if meta.get(key) is None else int(read(meta, key, int))


def covers(spans: tuple[VersionSpan, ...], length: int) -> bool:
    """The spans follow one another from 0 to `length`."""
    edges = [0, *(span.end for span in spans)]
    follow = all(span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False))
    return follow and edges[-1] == length


def _read_spans(
    meta: dict[str, Any], length: int, foreign_version: str | None, spans_told: bool
) -> tuple[VersionSpan, ...]:
    """The server's own spans; where it has none to tell, one over the whole output."""
    if "weight_versions" not in meta and (foreign_version is not None or not spans_told):
        label = read(meta, "weight_version", str) if foreign_version is None else foreign_version
        return (VersionSpan(start=0, end=length, version=read_version(label, foreign_version)),)[: bool(length)]
    return tuple(
        VersionSpan(
            start=int(span["start"]), end=int(span["end"]), version=read_version(span["version"], foreign_version)
        )
        for span in read(meta, "weight_versions", list)
    )


def mark_stale(completion: Completion, cache_namespace: str | None) -> tuple[VersionSpan, ...]:
    """The spans where pushes arrive in place; every request then names its part of the cache after the version its
    engine had when it was sent. Only under the version that sampled the first token were all keys and values that it
    saw made by that version: another name, or none, flags everything, also where nothing was cached, for the prompt may
    have been computed in parts, with a push in between. What comes after a change of version is stale in any case."""
    spans = completion.spans
    stale = bool(spans) and cache_namespace != str(spans[0].version)
    marked = []
    for span in spans:
        stale = stale or span.version != spans[0].version
        marked.append(replace(span, stale_kv=stale))
    return tuple(marked)


def read_version(text: str, foreign_version: str | None = None) -> PolicyVersion:
    """Raises EngineReplyInvalid for a label that is not one of ours, unless `foreign_version` stands for those."""
    try:
        return PolicyVersion.parse(text)
    except (ValueError, AttributeError) as error:
        if foreign_version is not None:
            return PolicyVersion.parse(foreign_version)
        raise EngineReplyInvalid(
            f"weight_version {text!r} is not epoch.step: start the server with --weight-version 1.0"
        ) from error


def read(source: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """`source[key]` if it is there and of this type. Raises EngineReplyInvalid."""
    value = source.get(key) if isinstance(source, dict) else None
    if not isinstance(value, kind):
        raise EngineReplyInvalid(f"the reply lacks {key} of type {kind.__name__}")
    return value


def parse_object(path: str, payload: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise EngineReplyInvalid(f"{path} did not answer JSON: {payload[:200]!r}") from error
    if not isinstance(body, dict):
        raise EngineReplyInvalid(f"{path} did not answer one JSON object: {payload[:200]!r}")
    return body


def error_text(payload: bytes) -> str:
    """The message of an error body, in any of its forms."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return payload[:500].decode(errors="replace")
    if isinstance(body, dict):
        inner = body.get("error")
        message = inner.get("message") if isinstance(inner, dict) else body.get("message")
        return str(message if message is not None else body)[:500]
    return str(body)[:500]
