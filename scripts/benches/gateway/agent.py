"""The measured agent of the gateway bench, which streams Anthropic's API at minimal cost: its history is growing JSON.

Invariants:
- It echoes answers as Claude Code does: arguments parsed and written again, id and signature unchanged.
- An answer that is not a complete turn with a call ends the measurement.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp


class MeasurementBroken(Exception):
    """The gateway gave an invalid answer, so that the figures of this run are meaningless."""


class MeasuredAgent:
    """Conversation with the API at `url`. `prompt_tokens` and `sampled_tokens` are those of the last answer; `seed`
    determines the texts of its tools."""

    def __init__(self, http: aiohttp.ClientSession, url: str, head: Mapping[str, Any], task: str, *, seed: int) -> None:
        self.seed = seed
        self._http = http
        self._url = f"{url}/v1/messages"
        self._head = orjson.dumps({**head, "messages": []}).removesuffix(b"]}")
        self._messages = [orjson.dumps({"role": "user", "content": task})]
        self.prompt_tokens = 0
        self.sampled_tokens = 0

    async def turn(self, output: str) -> float:
        """Take a turn and append the `output` of its tool call; return the seconds from the request to the last byte of
        the answer. Raises MeasurementBroken."""
        data = b"%b%b]}" % (self._head, b",".join(self._messages))
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        started = time.perf_counter()
        async with self._http.post(self._url, data=data, headers=headers) as response:
            body, status = await response.read(), response.status
        latency_s = time.perf_counter() - started
        if status != 200:
            raise MeasurementBroken(f"the gateway answered {status}: {body[:500].decode(errors='replace')}")
        blocks: list[dict[str, Any]] = []
        for line in body.splitlines():
            if not line.startswith(b"data: "):
                continue
            match orjson.loads(line[6:]):
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(block)
                case {"delta": {"type": "text_delta", "text": text}}:
                    blocks[-1]["text"] = text
                case {"delta": {"type": "thinking_delta", "thinking": text}}:
                    blocks[-1]["thinking"] = text
                case {"delta": {"type": "signature_delta", "signature": text}}:
                    blocks[-1]["signature"] = text
                case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                    blocks[-1]["input"] = orjson.loads(text)
                case {"type": "message_start", "message": {"usage": usage}}:
                    self.prompt_tokens = usage["input_tokens"]
                case {"type": "message_delta", "usage": usage}:
                    self.sampled_tokens = usage["output_tokens"]
        if b"event: message_stop" not in body or not blocks or blocks[-1]["type"] != "tool_use":
            raise MeasurementBroken(f"not a complete turn with a call: {body[-500:].decode(errors='replace')}")
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": output}
        self._messages.append(orjson.dumps({"role": "assistant", "content": blocks}))
        self._messages.append(orjson.dumps({"role": "user", "content": [result]}))
        return latency_s
