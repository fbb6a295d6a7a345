"""Checks a played session against what the engine has sampled. Shares no code with the gateway: it reads the report as
JSON, the requests that the engine got, and the requests that the agent sent.

- Each row is what the engine was sent and answered, token for token; its trained tokens are whole outputs, each with
  the very prompt that it was sampled from.
- Each sampled token is trained once or masked once, with the log-probability and version of the engine.
- The words of each prompt are exactly those of one request, whichever ids they carried.
- The agent was served the words that were sampled for its request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from support.replays.player import Played
from support.scripted_engine import Sampled, segments

WORDS = re.compile(r"mk\d+x")


def violations(played: Played, sampled: Sequence[Sampled], report: dict[str, Any], *, version: str) -> list[str]:
    """Return what is wrong; nothing if all is well. `report` is that of `POST /sessions/ID/finish`."""
    return [
        *_wrong_rows(sampled, report, version),
        *_wrong_sums(sampled, report),
        *_wrong_prompts(played, sampled),
        *_wrong_answers(played, sampled),
    ]


def _wrong_rows(sampled: Sequence[Sampled], report: dict[str, Any], version: str) -> Iterator[str]:
    left = list(sampled)
    wholes = {one.prompt_ids + one.output_ids for one in sampled}
    for number, row in enumerate(report["rows"]):
        tokens = tuple(row["tokens"])
        if tokens not in wholes:
            yield f"row {number} is not what the engine was sent and answered"
        for start, end in segments(np.array(row["loss_mask"])):
            at = start
            while at < end:
                # Two outputs without a token between them are one run.
                fits = (one for one in left if _stands_at(one, row, at))
                if (found := next(fits, None)) is None:
                    yield f"row {number} trains tokens from {at} on that were not sampled there, or a second time"
                    break
                left.remove(found)
                at += len(found.output_ids)
        if any(row["logprobs"][at] for at, mask in enumerate(row["loss_mask"]) if not mask):
            yield f"row {number} has log-probabilities of tokens that it does not train"
        spans = [position for start, end, *_ in row["versions"] for position in range(start, end)]
        if sorted(spans) != sorted(set(spans)) or {each[2] for each in row["versions"]} - {version}:
            yield f"row {number} has versions that are not the engine's"
        if {position for position, mask in enumerate(row["loss_mask"]) if mask} - set(spans):
            yield f"row {number} trains tokens without a version"


def _stands_at(one: Sampled, row: dict[str, Any], at: int) -> bool:
    """Return whether a row has an output at a position, after its prompt and with its log-probabilities."""
    end = at + len(one.output_ids)
    stands: tuple[list[Any], ...] = (row["tokens"][:at], row["tokens"][at:end], row["logprobs"][at:end])
    return stands == (list(one.prompt_ids), list(one.output_ids), list(one.logprobs))


def _wrong_sums(sampled: Sequence[Sampled], report: dict[str, Any]) -> Iterator[str]:
    tokens = sum(len(one.output_ids) for one in sampled)
    trained = sum(sum(row["loss_mask"]) for row in report["rows"])
    if report["sampled_tokens"] != tokens:
        yield f"{report['sampled_tokens']} sampled tokens are reported, and the engine sampled {tokens}"
    if report["trained_tokens"] != trained:
        yield f"{report['trained_tokens']} trained tokens are reported, and the rows have {trained}"
    if tokens != trained + sum(report["masked"].values()):
        yield f"{tokens} sampled tokens are not {trained} trained and {report['masked']} masked ones"
    if report["failures"]:
        yield f"failures: {report['failures']}"


def _wrong_prompts(played: Played, sampled: Sequence[Sampled]) -> Iterator[str]:
    """Each prompt must have the words of one request, each word as often."""
    asked = Counter(tuple(sorted(_words_of(body))) for body in played.bodies)
    for one in sampled:
        words = tuple(sorted(WORDS.findall(one.prompt)))
        if not asked[words]:
            nearest = min(asked, key=lambda request: len(set(request) ^ set(words)))
            extra, missing = sorted(set(words) - set(nearest)), sorted(set(nearest) - set(words))
            yield f"a prompt is no request's: beside the nearest one it has {extra} and lacks {missing}"
        asked[words] -= 1


def _words_of(body: dict[str, Any]) -> list[str]:
    return [word for text in _texts(body) for word in WORDS.findall(text)]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a request, but not reasoning."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict) and value.get("type") not in ("thinking", "reasoning"):
        for key, entry in value.items():
            if key not in ("reasoning_content", "reasoning"):
                yield from _texts(entry)


def _wrong_answers(played: Played, sampled: Sequence[Sampled]) -> Iterator[str]:
    outputs = Counter(tuple(WORDS.findall(one.text)) for one in sampled)
    for number, reply in enumerate(played.replies):
        shown = [reply.text, *(json.dumps(given, ensure_ascii=False) for _, _, given in reply.calls)]
        words = {word for text in shown for word in WORDS.findall(text)}
        served = next((output for output in outputs if outputs[output] and set(output) == words), None)
        if served is None:
            yield f"step {number} was served {sorted(words)}, which was not sampled, or not for it"
        else:
            outputs[served] -= 1
