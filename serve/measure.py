"""What a turn costs the gateway: CPU of the gateway's process alone, over real HTTP on both sides.

Invariants:
- Agents and the engine they reach run in a child process: its CPU is not counted. The gateway's own process does
  nothing else.
- The engine answers at once, so what is measured is the gateway.

`python -m headrace.serve.measure --tokenizer DIR` writes one JSON object to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import orjson
from aiohttp import web

from headrace.policies.engine import EngineId
from headrace.serve.client import GatewayClient
from headrace.serve.gateway import Gateway, GatewayConfig
from headrace.serve.routing import EngineRoute, RoutingTable
from headrace.serve.rows import SessionReport
from headrace.serve.session import Budgets, SessionId, SessionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLY_TOKENS = 16
OBSERVATION = "total 8 -rw-r--r-- 1 root root 12 notes.txt " * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCost:
    """`cpu_ms_per_session` is opening and finishing one; `cpu_ms_per_turn` leaves it out. `turns_per_s` is with all
    else on the same machine."""

    sessions: int
    turns: int
    cpu_ms_per_turn: float
    cpu_ms_per_session: float
    turns_per_s: float
    tokens_per_row: float


async def measure(tokenizer_dir: Path, *, sessions: int = 32, turns: int = 20) -> GatewayCost:
    """Run `sessions` agents side by side for `turns` turns each."""
    admin_token = secrets.token_urlsafe(16)
    gateway = Gateway(GatewayConfig(tokenizer_dir=tokenizer_dir), admin_token)
    url = await gateway.start()
    async with gateway:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.serve.measure", "--child", "--turns", str(turns),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            return await _measure(gateway, url, admin_token, child, sessions, turns)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _measure(
    gateway: Gateway, url: str, admin_token: str, child: asyncio.subprocess.Process, sessions: int, turns: int
) -> GatewayCost:
    assert child.stdin is not None
    assert child.stdout is not None
    engine_url = orjson.loads(await child.stdout.readline())["engine_url"]
    route = EngineRoute(engine_id=EngineId("child"), url=engine_url)
    await gateway.set_engines(RoutingTable(version=1, engines=(route,)))
    budgets = Budgets(max_turns=turns, max_context_tokens=10**6)
    specs = [SessionSpec(session_id=SessionId(f"measure-{number}"), budgets=budgets) for number in range(sessions)]
    async with GatewayClient(url, admin_token) as client:
        started = time.process_time()
        opened = await client.open(specs)
        open_cpu_s = time.process_time() - started
        child.stdin.write(orjson.dumps([session.base_url for session in opened]) + b"\n")
        started, wall = time.process_time(), time.monotonic()
        await child.stdout.readline()
        turn_cpu_s, wall_s = time.process_time() - started, time.monotonic() - wall
        started = time.process_time()
        reports = await client.finish([spec.session_id for spec in specs])
        finish_cpu_s = time.process_time() - started
    rows = [r.trajectory.rows[0] for r in reports if isinstance(r, SessionReport) and r.trajectory]
    return GatewayCost(
        sessions=sessions,
        turns=turns,
        cpu_ms_per_turn=1000 * turn_cpu_s / (sessions * turns),
        cpu_ms_per_session=1000 * (open_cpu_s + finish_cpu_s) / sessions,
        turns_per_s=sessions * turns / wall_s,
        tokens_per_row=sum(len(row.tokens_T) for row in rows) / sessions,
    )


async def _child(turns: int) -> None:
    """Serve an instant engine, read the agents' URLs from standard input, run them, say when they are done."""
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", _generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _write({"engine_url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    urls: list[str] = orjson.loads(await asyncio.to_thread(sys.stdin.readline))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for url in urls:
            group.create_task(_agent(http, url, turns))
    _write({"done": True})
    await runner.cleanup()


async def _agent(http: aiohttp.ClientSession, url: str, turns: int) -> None:
    messages = [{"role": "user", "content": "write the last line of notes.txt to out.txt"}]
    for _ in range(turns):
        async with http.post(f"{url}/v1/chat/completions", json={"model": "policy", "messages": messages}) as response:
            response.raise_for_status()
            text = (await response.json())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": OBSERVATION}]


async def _generate(request: web.Request) -> web.Response:
    body = orjson.loads(await request.read())
    ids = list(range(97, 97 + REPLY_TOKENS))
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": REPLY_TOKENS},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": REPLY_TOKENS,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_version": "1.0",
        "weight_versions": [{"version": "1.0", "start": 0, "end": REPLY_TOKENS}],
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "output_token_logprobs_length": REPLY_TOKENS,
    }
    reply = {"text": "x" * REPLY_TOKENS, "output_ids": ids, "meta_info": meta}
    return web.Response(body=orjson.dumps(reply), content_type="application/json")


def _write(document: object) -> None:
    sys.stdout.write(orjson.dumps(document).decode() + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU cost of a turn in the gateway")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json and the chat template")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        asyncio.run(_child(options.turns))
        return
    if options.tokenizer is None:
        parser.error("--tokenizer DIR is needed")
    _write(asdict(asyncio.run(measure(options.tokenizer, sessions=options.sessions, turns=options.turns))))


if __name__ == "__main__":
    main()
