"""One process of a gateway in several: how it is started, replaced and watched.

Invariants:
- It has a port, a folder of sessions and a view of the engines of its own, and keeps port and folder when it is
  replaced: its sessions go on, and the base URLs of their agents stay valid.
- A process that ends by itself is started again, after `RESTARTS_S` at the longest.
- A replacement is loaded before the old process stops, and the old process stops between two turns if there is such a
  moment within `DRAIN_S`. In between, its port refuses connections for as long as it takes to read its sessions.
- It ends with its parent, also if that is killed with -9.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from typing import Any, Final

import orjson
import uvloop
from pydantic import TypeAdapter

from headrace.policies.errors import PolicyError
from headrace.policies.processes.parent_death import die_with_parent
from headrace.sandboxes.host.child_environment import child_environment
from headrace.serve.gateway.errors import OptionRefused, ServeError
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.options import StandaloneOptions
from headrace.serve.gateway.http.standalone import serve_one
from headrace.serve.gateway.rendering.template_renderer import load_renderer

logger = logging.getLogger(__name__)

START_S: Final = 120.0
DRAIN_S: Final = 60.0
STOP_S: Final = 10.0
RESTARTS_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_OPTIONS: Final = TypeAdapter(StandaloneOptions)
_PROGRAM: Final = f"import sys; from {__name__} import main; main(int(sys.argv[1]), sys.argv[2])"


class Member:
    """Handle of one process, in the parent."""

    def __init__(self, options: StandaloneOptions) -> None:
        self.options = options
        self.url = ""
        self.serving = asyncio.Event()
        """Set while the process accepts requests."""
        self._replace = asyncio.Event()
        self._replaced = asyncio.Event()
        self._process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises OptionRefused with what it says."""
        self._process = await self._loaded()
        await self._serve(self._process)

    async def replace(self) -> None:
        """Replace the process by a new one, between two turns."""
        self._replaced.clear()
        self._replace.set()
        await self._replaced.wait()

    async def watch(self) -> None:
        """Keep the process running, for ever."""
        while True:
            ended = asyncio.create_task(self._process.wait())
            asked = asyncio.create_task(self._replace.wait())
            try:
                await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    logger.error("gateway process %d ended with %d", self.options.place, ended.result())
                    await self._restart()
                else:
                    await self._hand_over()
            finally:
                ended.cancel()
                asked.cancel()

    async def stop(self) -> None:
        """Stop the process."""
        await self._end(self._process, timeout_s=STOP_S)

    async def _restart(self) -> None:
        self.serving.clear()
        failures = 0
        while True:
            await asyncio.sleep(RESTARTS_S[min(failures, len(RESTARTS_S) - 1)])
            try:
                await self.start()
            except (OptionRefused, OSError, TimeoutError) as error:
                failures += 1
                logger.error("gateway process %d cannot start: %s", self.options.place, error)
            else:
                return

    async def _hand_over(self) -> None:
        """Start a process in place of the running one, which goes on if that fails."""
        try:
            fresh = await self._loaded()
        except (OptionRefused, OSError, TimeoutError) as error:
            logger.error("gateway process %d is not replaced: %s", self.options.place, error)
        else:
            old, self._process = self._process, fresh
            # Requests that come through the front wait for the new process.
            self.serving.clear()
            await self._end(old, timeout_s=DRAIN_S + STOP_S, drain=True)
            try:
                await self._serve(fresh)
            except (OptionRefused, OSError, TimeoutError) as error:
                logger.error("gateway process %d: %s", self.options.place, error)
        finally:
            self._replace.clear()
            self._replaced.set()

    async def _loaded(self) -> asyncio.subprocess.Process:
        """Start a process, and wait until it has loaded all it needs."""
        given = _OPTIONS.dump_json(self.options).decode()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, str(os.getpid()), given),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            # An interrupt from the terminal is for the parent.
            start_new_session=True,
        )
        await self._told(process)
        return process

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(b"serve\n")
        self.url = (await self._told(process))["url"]
        self.serving.set()

    async def _told(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """Return the next document of a process. Raises OptionRefused with its error, TimeoutError."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await self._end(process, timeout_s=0.0)
            raise
        document: dict[str, Any] = orjson.loads(line) if line else {"error": "it ended; see its log"}
        if "error" in document:
            await self._end(process, timeout_s=STOP_S)
            raise OptionRefused(document["error"])
        return document

    async def _end(self, process: asyncio.subprocess.Process, *, timeout_s: float, drain: bool = False) -> None:
        """End a process: between two turns if it is to `drain`."""
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(b"drain\n" if drain else b"stop\n")
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main(parent_pid: int, given: str) -> None:
    """Run one process. It says on standard output that it has loaded, its URL, or an error; it reads `serve`, `drain`
    and `stop` from standard input."""
    die_with_parent(parent_pid)
    try:
        uvloop.run(_serve(_OPTIONS.validate_json(given)))
    except (ServeError, PolicyError, OSError) as error:
        _tell({"error": str(error)})
        sys.exit(1)


async def _serve(options: StandaloneOptions) -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    load_renderer(options.tokenizer)
    _tell({"loaded": True})
    if await commands.readline() != b"serve\n":
        return

    async def until(gateway: Gateway) -> None:
        # The end of the input is an order to stop, too.
        if await commands.readline() == b"drain\n":
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await gateway.idle()

    await serve_one(options, lambda url: _tell({"url": url}), until)


def _tell(document: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(document)}\n")
    sys.stdout.flush()
