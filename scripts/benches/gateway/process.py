"""The gateway process of the gateway bench, which reports its processor time, memory and longest callback.

Invariants:
- Only the gateway and, on request, a probe run in that process.
- It uses uvloop, as the gateway does; with `watch`, it uses asyncio's own loop, because uvloop's callbacks cannot be
  timed.
- A callback's time is the processor time of the loop's thread from its start to its end, including garbage collection
  and system calls, excluding other threads and processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
import uvloop

from headrace.policies.engine import EngineId
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.gateway.http.standalone import portioned_collections
from headrace.serve.tracing.telemetry import TelemetryConfig, configure

ADMIN_TOKEN: Final = "the measured gateway's own"
_START_S: Final = 60.0
_PROBE_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measurement of the process. `cpu_s` is the processor time of all threads and of the processes that render, since
    the start; `memory_mb` is the resident memory of the gateway's own process after a full garbage collection. The
    others cover the time since the last probe: the longest callback of the loop (thread time) and the longest garbage
    collection of any thread (wall time)."""

    cpu_s: float
    memory_mb: float
    callback_ms: float
    collection_ms: float


class GatewayProcess:
    """Handle of the gateway process."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def probe(self) -> Probe:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return Probe(**await _line(self._process, _PROBE_S))


@asynccontextmanager
async def gateway_process(
    tokenizer_dir: Path, log_dir: Path, engine_url: str, *, watch: bool = False, spans_dir: Path | None = None
) -> AsyncIterator[GatewayProcess]:
    """Start a gateway in front of one engine. `watch` times every callback, which adds a few microseconds to each. With
    `spans_dir` it writes spans, as the gateway of a run does."""
    raise_open_files()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.gateway.process", "--tokenizer", str(tokenizer_dir),
        "--log", str(log_dir), "--engine", engine_url, *(["--watch"] if watch else []),
        *([] if spans_dir is None else ["--spans", str(spans_dir)]),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield GatewayProcess((await _line(process, _START_S))["url"], process)
        # At the end of its input it ends by itself, with complete files.
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(_PROBE_S):
            await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(timeout_s):
        document: dict[str, Any] = orjson.loads(await process.stdout.readline())
    return document


def raise_open_files() -> None:
    """Raise the limit of open files: 2,000 agents need 4,000 connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Watch:
    """Records the longest callback and the longest garbage collection."""

    def __init__(self) -> None:
        self.callback_s = 0.0
        self.collection_s = 0.0
        self._collecting_since = 0.0

    def collections(self) -> None:
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self.collection_s = max(self.collection_s, time.perf_counter() - self._collecting_since)

    def callbacks(self) -> None:
        """Time every callback of asyncio's own loop, including task steps."""
        run = asyncio.Handle._run  # noqa: SLF001 - all callbacks run through this method

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            run(handle)
            self.callback_s = max(self.callback_s, time.thread_time() - started)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]  # noqa: SLF001

    def probe(self) -> Probe:
        # Of the processes that render, ended ones included.
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        cpu_s = time.process_time() + ended.ru_utime + ended.ru_stime
        cpu_s += sum(times.user + times.system for times in running)
        seen = self.callback_s, self.collection_s
        gc.collect()
        self.callback_s = self.collection_s = 0.0
        return Probe(
            cpu_s=cpu_s,
            memory_mb=psutil.Process().memory_info().rss / 2**20,
            callback_ms=1000 * seen[0],
            collection_ms=1000 * seen[1],
        )


async def _serve(options: argparse.Namespace) -> None:
    """Serve until standard input ends; each line on it requests a probe."""
    watch = _Watch()
    watch.collections()
    if options.watch:
        watch.callbacks()
    config = GatewayConfig(tokenizer_dir=options.tokenizer, session_log_dir=options.log)
    tracing = configure(
        TelemetryConfig(enabled=options.spans is not None),
        process="gateway",
        spans_dir=options.spans,
        run_id="bench",
    )
    gateway = Gateway(config, ADMIN_TOKEN, tracer=tracing.tracer("gateway"))
    url = await gateway.start()
    async with gateway, portioned_collections():
        route = EngineRoute(engine_id=EngineId("scripted"), url=options.engine)
        await gateway.set_engines(RoutingTable(version=1, engines=(route,)))
        asked = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
        _write({"url": url})
        while await asked.readline():
            _write(asdict(watch.probe()))
    tracing.shutdown()


def _write(document: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.buffer.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Gateway process of the gateway bench")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--spans", type=Path)
    raise_open_files()
    options = parser.parse_args(arguments)
    (asyncio if options.watch else uvloop).run(_serve(options))


if __name__ == "__main__":
    main()
