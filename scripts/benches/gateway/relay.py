"""A relay to compare the gateway with: what any proxy between an agent and an engine has to do, in one process.

Invariants:
- It renders and tokenizes only what is new in a request, translates the answer, and streams it. It holds each
  conversation's ids in memory.
- It captures nothing: no log, no log-probabilities, no versions, no tree, no budgets, no checks of what a request
  repeats.
- It uses the same event loop, HTTP library, tokenizer and JSON library as the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

import aiohttp
import orjson
import psutil
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

from benches.gateway.process import raise_open_files

_START_S: Final = 60.0
_END: Final = "<|im_end|>"
_PARTS: Final = re.compile(r"(?:<think>\n(.*?)\n</think>\n\n)?(.*?)(?:\n?<tool_call>\n(.*)\n</tool_call>)?", re.DOTALL)


class Relay:
    """Serves Anthropic Messages for any number of conversations; the path names one."""

    def __init__(self, tokenizer: Tokenizer, engine_url: str, http: aiohttp.ClientSession) -> None:
        self._tokenizer = tokenizer
        self._engine_url = engine_url
        self._http = http
        self._heads: dict[str, array[int]] = {}
        self._ids: defaultdict[str, array[int]] = defaultdict(lambda: array("i"))
        self._seen: defaultdict[str, int] = defaultdict(int)
        self._numbers = count()

    async def messages(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = orjson.loads(await request.read())
        name = request.match_info["name"]
        ids = self._ids[name]
        if not ids:
            lead = "".join(block["text"] for block in body["system"])
            tools = "".join(f"\n{orjson.dumps(tool).decode()}" for tool in body["tools"])
            text = f"<|im_start|>system\n{lead}\n\n# Tools\n<tools>{tools}\n</tools>{_END}\n"
            # Many conversations begin alike.
            if text not in self._heads:
                self._heads[text] = self._encode(text)
            ids.extend(self._heads[text])
        for message in body["messages"][self._seen[name] :]:
            if message["role"] == "user":
                said = message["content"]
                if not isinstance(said, str):
                    said = "\n".join(f"<tool_response>\n{block['content']}\n</tool_response>" for block in said)
                ids.extend(self._encode(f"<|im_start|>user\n{said}{_END}\n"))
        self._seen[name] = len(body["messages"])
        ids.extend(self._encode("<|im_start|>assistant\n"))
        prompt_tokens = len(ids)
        sampling = {"temperature": 1.0, "max_new_tokens": body["max_tokens"], "skip_special_tokens": False}
        asked = {"rid": f"{name}-{next(self._numbers)}", "input_ids": ids.tolist(), "sampling_params": sampling}
        async with self._http.post(f"{self._engine_url}/generate", data=orjson.dumps(asked)) as response:
            reply: dict[str, Any] = orjson.loads(await response.read())
        ids.extend(reply["output_ids"])
        ids.extend(self._encode("\n"))
        stream = self._stream(reply, prompt_tokens)
        return web.Response(body=stream, headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    def _encode(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _stream(self, reply: dict[str, Any], prompt_tokens: int) -> bytes:
        found = _PARTS.fullmatch(reply["text"].removesuffix(_END))
        reasoning, text, call = found.groups() if found else (None, reply["text"], None)
        message = {"id": "msg", "type": "message", "role": "assistant", "content": [], "model": "policy"}
        usage = {"input_tokens": prompt_tokens, "output_tokens": len(reply["output_ids"])}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": message | {"usage": usage}}]
        blocks: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if reasoning:
            thinking = {"type": "thinking_delta", "thinking": reasoning}
            blocks.append(({"type": "thinking", "thinking": "", "signature": "s"}, thinking))
        if text:
            blocks.append(({"type": "text", "text": ""}, {"type": "text_delta", "text": text}))
        if call:
            made = orjson.loads(call)
            start = {"type": "tool_use", "id": f"call{next(self._numbers)}", "name": made["name"], "input": {}}
            arguments = orjson.dumps(made["arguments"]).decode()
            blocks.append((start, {"type": "input_json_delta", "partial_json": arguments}))
        for index, (start, delta) in enumerate(blocks):
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
            events.append({"type": "content_block_stop", "index": index})
        ends = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
        events.append({"type": "message_delta", "delta": ends, "usage": usage})
        events.append({"type": "message_stop"})
        return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in events)


class RelayProcess:
    """Handle of the process of a relay."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self._process = psutil.Process(process.pid)

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads since the start."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def relay_process(tokenizer_dir: str, engine_url: str) -> AsyncIterator[RelayProcess]:
    """Run a relay in front of an engine during the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.gateway.relay", "--tokenizer", tokenizer_dir, "--engine", engine_url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            url = (await process.stdout.readline()).decode().strip()
        yield RelayProcess(url, process)
    finally:
        process.kill()
        await process.wait()


async def _serve(tokenizer_dir: str, engine_url: str) -> None:
    """Serve until standard input ends."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as http:
        relay = Relay(Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json"), engine_url, http)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/s/{name}/v1/messages", relay.messages)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        asked = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
        await asked.read()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="Relay of the gateway bench")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--engine", required=True)
    options = parser.parse_args()
    raise_open_files()
    # As in the gateway.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    uvloop.run(_serve(options.tokenizer, options.engine))


if __name__ == "__main__":
    main()
