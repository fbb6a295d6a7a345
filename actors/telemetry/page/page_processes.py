"""Pages of runs for a server that has its own listener and its own keys, such as the control API: a process serves each
page, and is started when somebody asks for it.

Invariants:
- The server that asks never reads a run itself: a large run is read by the page's process, at low priority.
- The process listens on loopback, with a token that only its parent has. It ends with its parent, and after `IDLE_S`
  without a request; at most `MAX_PAGES` exist, and the one that was asked longest ago makes room.
- An answer has at most `MAX_ANSWER_BYTES`. A stream of events is answered as soon as it has told something, and ends;
  browsers come again with the last number that they saw.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from yarl import URL

from headrace.actors.errors import ConfigError, RunError
from headrace.actors.telemetry.page.access import HEADERS, PageAnswer
from headrace.actors.telemetry.page.server import ObserveOptions, observe
from headrace.policies.processes.parent_death import die_with_parent

EVENTS: Final = "events"
IDLE_S: Final = 600.0
MAX_PAGES: Final = 8
START_S: Final = 60.0
"""Time for a page's process to start."""
ANSWER_S: Final = 60.0
"""Time limit of a request; streams of events say something after 10 s."""
MAX_ANSWER_BYTES: Final = 16 << 20
NICE: Final = 10
KEPT: Final = frozenset(
    {*(name.lower() for name in HEADERS), "content-type", "cache-control", "etag", "retry-after", "x-accel-buffering"}
)
"""Headers of an answer that are passed on."""
_PROGRAM: Final = f"import sys; from {__name__} import main; main(int(sys.argv[1]), sys.argv[2])"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A GET request below a page. `headers` are those of the browser that the page knows."""

    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Page:
    process: asyncio.subprocess.Process
    url: URL
    token: str
    idle: asyncio.TimerHandle | None = None

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    def used(self) -> None:
        """Note that a request needs the process."""
        if self.idle is not None:
            self.idle.cancel()

    def rests(self, idle_s: float) -> None:
        """End the process after this time without a request."""
        self.used()
        self.idle = asyncio.get_running_loop().call_later(idle_s, self.end)

    def end(self) -> None:
        self.used()
        # It may have ended by itself.
        with suppress(ProcessLookupError):
            self.process.kill()


class MountedPages:
    """Pages of runs by the folder of the run. `close` ends all processes."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._pages: OrderedDict[Path, _Page] = OrderedDict()
        self._starting: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._client: aiohttp.ClientSession | None = None

    async def get(self, run_dir: Path, request: PageRequest) -> PageAnswer:
        """Return the page's answer to a request. Raises RunError if its process does not start or answer."""
        page = await self._page(run_dir)
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            self._client = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        url = page.url.with_path(f"/{request.path}").with_query(request.query)
        headers = {**request.headers, "Authorization": f"Bearer {page.token}"}
        try:
            async with self._client.get(url, headers=headers, allow_redirects=False) as response:
                body = await (_first_event(response) if request.path == EVENTS else _whole(response))
                kept = {name: value for name, value in response.headers.items() if name.lower() in KEPT}
                return PageAnswer(status=response.status, headers=kept, body=body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RunError(f"the page of this run does not answer ({type(error).__name__}): try again") from error
        finally:
            page.rests(self._idle_s)

    async def close(self) -> None:
        """End all processes."""
        for page in self._pages.values():
            page.end()
        await asyncio.gather(*(page.process.wait() for page in self._pages.values()))
        self._pages.clear()
        if self._client is not None:
            await self._client.close()

    async def _page(self, run_dir: Path) -> _Page:
        """Return the living page of a run, which has been asked for just now."""
        # Requests that come meanwhile wait for the same start.
        async with self._starting[run_dir]:
            page = self._pages.get(run_dir)
            if page is None or not page.is_alive:
                page = self._pages[run_dir] = await self._start(run_dir)
        self._pages.move_to_end(run_dir)
        page.used()
        while len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)[1].end()
        return page

    async def _start(self, run_dir: Path) -> _Page:
        # The kernel watches the thread that starts the process: that of the event loop, which lasts.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, str(os.getpid()), str(run_dir)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
        except BaseException as error:
            process.kill()
            if isinstance(error, TimeoutError):
                raise RunError(f"the page of this run did not start within {START_S:.0f} s") from error
            raise
        url, found, token = line.partition("#token=")
        if not found:
            await process.wait()
            raise RunError(f"this run has no page: {line or 'its process ended without a word'}")
        return _Page(process, URL(url), token)


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.read(0)
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise RunError(f"the page's answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return body


async def _first_event(response: aiohttp.ClientResponse) -> bytes:
    """Return a stream of events up to its first event, or up to the second word that there is none: the first comes at
    once."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        whole, end, _ = body.rpartition(b"\n\n")
        if end and (b"\ndata:" in whole or whole.count(b"\n:") > 1):
            return whole + end
    return body


def main(parent_pid: int, run_dir: str) -> None:
    """Serve the page until the parent ends. The first line of standard output is its URL with the token, or why there
    is none."""
    die_with_parent(parent_pid)
    os.nice(NICE)

    def announce(url: str) -> None:
        _tell(url)
        # Nobody reads on.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)

    try:
        asyncio.run(observe(Path(run_dir), ObserveOptions(), announce))
    except (RunError, ConfigError, OSError) as error:
        _tell(str(error))
        sys.exit(1)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
