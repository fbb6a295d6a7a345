"""Server of SGLang's /generate and /abort_request, whose answers come from a script.

What it samples is tokenized unlike any tokenizer would do it, as a policy does: whoever renders a sampled turn again
from its text gets other ids, and is found out.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web
from tokenizers import Tokenizer

from headrace.serve.gateway.capture.rows import SessionReport
from support.loopback import on_loopback

PIECE_CHARACTERS = 5


class Fault(StrEnum):
    """Fault of the engine instead of an answer."""

    ERROR = "error"
    """500."""
    CUT = "cut"
    """The connection ends without an answer."""
    HANG = "hang"
    """Nothing until it is aborted; then the first token and finish `abort`."""
    ABORT = "abort"
    """An abort of its own after one token."""
    TOO_LONG = "too long"
    """400, with SGLang's sentence for a prompt beyond its context."""
    GRAMMAR_REFUSED = "grammar refused"
    """400, with SGLang's sentence for a schema that it cannot compile, if the request has a grammar."""
    NO_GRAMMAR = "no grammar"
    """400, with SGLang's sentence of a server without a grammar backend, if the request has a grammar."""
    GARBAGE = "garbage"
    """A body without ids."""


@dataclass(frozen=True)
class Ask:
    """A request: its prompt as text, with special tokens as they are spelled, and the how manyth it is."""

    prompt: str
    number: int


@dataclass(frozen=True)
class Sampled:
    """Answer of the engine."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    prompt: str
    text: str
    logprobs: tuple[float, ...] = ()


@dataclass
class ScriptedEngine:
    """Engine whose `script` determines the samples. Every answer is in `sampled`, every body in `requests`."""

    tokenizer: Tokenizer
    stop_id: int
    script: Callable[[Ask], str | Fault]
    version: str = "1.4"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    aborted: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    held_aborts: dict[str, asyncio.Event] = field(default_factory=dict)
    """Aborts that are answered when these are set."""
    refused_aborts: set[str] = field(default_factory=set)
    """Aborts that are answered with 500."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    traceparents: list[str] = field(default_factory=list)
    """Trace contexts of the generations, where they have one."""

    @classmethod
    def of(cls, tokenizer_dir: Path, stop: str, script: Callable[[Ask], str | Fault]) -> Self:
        """With the tokenizer of a model directory and the spelling of its end token."""
        tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        stop_id = tokenizer.token_to_id(stop)
        assert stop_id is not None
        return cls(tokenizer, stop_id, script)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, cut into pieces that are tokenized one by one; special tokens stay whole."""
        added = (token.content for token in self.tokenizer.get_added_tokens_decoder().values())
        special = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        pieces = re.findall(f"{special}|(?:(?!{special}).){{1,{PIECE_CHARACTERS}}}", text, re.DOTALL)
        assert "".join(pieces) == text
        return [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False).ids]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.traceparents += request.headers.getall("traceparent", [])
        self.asked.set()
        prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        answer = self.script(Ask(prompt, len(self.requests)))
        match answer:
            case Fault.ERROR:
                return web.json_response({"error": {"message": "scripted"}}, status=500)
            case Fault.TOO_LONG:
                sentence = "The input (9 tokens) is longer than the model's context length (8 tokens)."
                return web.json_response({"error": {"message": sentence}}, status=400)
            case Fault.GRAMMAR_REFUSED | Fault.NO_GRAMMAR:
                if not {"json_schema", "structural_tag"} & body["sampling_params"].keys():
                    answer = "free"
                elif answer is Fault.GRAMMAR_REFUSED:
                    sentence = "Failed to compile json grammar: schema of {'weights': 'partially updated'}"
                    return web.json_response({"error": {"message": sentence}}, status=400)
                else:
                    sentence = "Grammar-based generation (json_schema, regex, ...) is not supported when the server ..."
                    return web.json_response({"error": {"message": sentence}}, status=400)
            case Fault.GARBAGE:
                return web.json_response({"text": "no ids"})
            case Fault.CUT:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            case Fault.HANG | Fault.ABORT:
                if answer is Fault.HANG:
                    await self.aborted[body["rid"]].wait()
                return self._reply(body, prompt, "", [self.stop_id - 1], {"type": "abort", "message": "Aborted"})
        ids = [*self.encode(answer), self.stop_id]
        most = body["sampling_params"]["max_new_tokens"]
        finish = {"type": "stop", "matched": self.stop_id} if len(ids) <= most else {"type": "length", "length": most}
        return self._reply(body, prompt, answer, ids[:most], finish)

    def _reply(
        self, body: dict[str, Any], prompt: str, text: str, ids: list[int], finish: Mapping[str, Any]
    ) -> web.Response:
        # Each position of each turn has its own, which float32 represents exactly.
        logprobs = [-(1 + (37 * len(self.sampled) + index) % 251) / 64 for index in range(len(ids))]
        self.sampled.append(Sampled(tuple(body["input_ids"]), tuple(ids), prompt, text, tuple(logprobs)))
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "num_retractions": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def abort_request(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted[rid].set()
        if (held := self.held_aborts.get(rid)) is not None:
            await held.wait()
        return web.Response(status=500 if rid in self.refused_aborts else 200)


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """Serve the engine on a loopback port during the block."""
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort_request)
    async with on_loopback(app) as engine.url:
        yield engine


class Parts:
    """A script of several parts: a prompt plays the first part whose mark stands in it; the mark "" fits all.

    Each new prompt gets the part's next line, the same prompt again gets the same; past the end the last line is said
    for ever."""

    def __init__(self, parts: Mapping[str, Sequence[str | Fault]]) -> None:
        self._parts = {mark: list(lines) for mark, lines in parts.items()}
        self._said: dict[str, dict[str, str | Fault]] = {mark: {} for mark in parts}

    def __call__(self, ask: Ask) -> str | Fault:
        mark = next(mark for mark in self._parts if mark in ask.prompt)
        said, lines = self._said[mark], self._parts[mark]
        if ask.prompt not in said:
            said[ask.prompt] = lines[min(len(said), len(lines) - 1)]
        return said[ask.prompt]

    def played(self) -> dict[str, int]:
        """How many lines of each part were said."""
        return {mark: len(said) for mark, said in self._said.items()}


def check_exact(report: SessionReport, engines: Sequence[ScriptedEngine]) -> None:
    """Every trained turn of every row stands there with the very prompt that the engine sampled it from, which begins
    with prompt and output of the turn before it in that row; every sampled token is trained once, or masked for one of
    the five reasons."""
    sampled = [answer for engine in engines for answer in engine.sampled]
    assert report.sampled_tokens == sum(len(answer.output_ids) for answer in sampled)
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert set(report.masked) <= {"aborted", "abandoned", "side", "sampling", "truncated"}
    left = [(answer.prompt_ids, answer.output_ids) for answer in sampled]
    for row in report.trajectory.rows if report.trajectory else ():
        tokens = tuple(row.tokens_T.tolist())
        before: tuple[int, ...] = ()
        for start, end in segments(row.loss_mask_T):
            while start < end:
                # A turn that an engine gave up was gone on with, from its tokens.
                found = next(one for one in left if _stands_at(one, tokens[:end], start))
                left.remove(found)
                prompt, output = found
                assert prompt[: len(before)] == before
                before = prompt + output
                start += len(output)
    assert sum(len(output) for _, output in left) == sum(report.masked.values())


def lineages(engines: Sequence[ScriptedEngine]) -> int:
    """Return the number of conversations according to the engines: answers that no later prompt begins with."""
    sampled = [answer for engine in engines for answer in engine.sampled]
    wholes = [(*answer.prompt_ids, *answer.output_ids) for answer in sampled]
    return sum(all(answer.prompt_ids[: len(whole)] != whole for answer in sampled) for whole in wholes)


def _stands_at(answer: tuple[tuple[int, ...], tuple[int, ...]], tokens: tuple[int, ...], start: int) -> bool:
    prompt, output = answer
    return prompt == tokens[:start] and output == tokens[start : start + len(output)]


def segments(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """Where the trained turns of a row begin and end: the engine's end tokens and bridges keep them apart."""
    found: list[tuple[int, int]] = []
    for position in mask_T.nonzero()[0].tolist():
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
