"""Processes that render for a gateway: long texts occupy neither its event loop nor its interpreter lock.

Invariants:
- A work has `cpu_s` of processor time, which the kernel counts. A process that exceeds it, or does not answer within
  `WALL_FACTOR` times as long, is replaced, and the work fails; that of others is not affected.
- Replies say how a process ends: others may take its exit status (workers of Ray do).
- A process that dies otherwise (out of memory) is replaced, and its work is done once more.
- Of those who wait, the owner whose works took the least time comes first. With several processes one is kept for
  works of at most `SMALL_BYTES`, so that they never wait for a large one.
- A process in which a work leaves more than `SPARE_BYTES` behind ends, and is replaced when there is work. (What the
  caches keep of a work is far less.)
- Processes are started when there is work for them. They end with their parent, and nobody waits for one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import pickle
import resource
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from headrace.policies.processes.parent_death import die_with_parent
from headrace.serve.gateway.errors import BadRequest, GatewayBroken
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from headrace.serve.gateway.rendering.work import Work

logger = logging.getLogger(__name__)

SMALL_BYTES: Final = 256 << 10
SPARE_BYTES: Final = 32 << 20
WALL_FACTOR: Final = 20
START_S: Final = 120.0
MAX_OWNERS: Final = 4096
"""Owners whose time is remembered; the times of all others are forgotten when there are more."""
LARGE_BYTES: Final = 1 << 20
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_HEAD: Final = 8
_PROGRAM: Final = f"import sys; from {__name__} import main; main(sys.argv[1:])"

T = TypeVar("T")


def return_large_blocks() -> None:
    """Let the C library of this process return each block of `LARGE_BYTES` to the system when it is freed. Otherwise it
    keeps such blocks once it has seen one (mallopt(3), M_MMAP_THRESHOLD), and small ones that are left between them
    keep hundreds of megabytes. Other libraries than glibc have no such setting."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, LARGE_BYTES)


@dataclass(slots=True, eq=False)
class _Job:
    """A work as bytes, and who waits for its result."""

    owner: str
    data: bytes
    result: asyncio.Future[Any]
    repeated: bool = False


@dataclass(slots=True, eq=False)
class _Process:
    """A process that has said that it is ready; `takes_large` is false for the one that is kept for small works."""

    process: asyncio.subprocess.Process
    takes_large: bool

    async def ask(self, data: bytes) -> tuple[bool, Any, bool]:
        """Return whether a work succeeded, its result or exception, and whether the process goes on. Raises EOFError if
        it has ended."""
        reader, writer = self.process.stdout, self.process.stdin
        assert reader is not None
        assert writer is not None
        try:
            writer.write(len(data).to_bytes(_HEAD, "big"))
            writer.write(data)
            await writer.drain()
            head = await reader.readexactly(_HEAD)
            reply: tuple[bool, Any, bool] = pickle.loads(await reader.readexactly(int.from_bytes(head, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        return reply

    async def end(self) -> None:
        """Kill it, and close its pipes."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.communicate()


class RenderProcesses:
    """`processes` renderers of one tokenizer. `aclose` ends them."""

    def __init__(self, tokenizer_dir: Path, *, token_kinds: bool, processes: int, cpu_s: float) -> None:
        self._arguments = (str(tokenizer_dir), str(int(token_kinds)), repr(cpu_s))
        self._most = processes
        self._wall_s = WALL_FACTOR * cpu_s
        self._waiting: list[_Job] = []
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()
        self._starting: dict[asyncio.Task[None], bool] = {}
        """Tasks that start a process, and whether it takes large works."""
        self._serving: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that end a process; never cancelled, so that no process stays behind."""
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._closed = False

    async def run(self, owner: str, work: Work[T]) -> T:
        """Return the result of a work for this owner. Raises what the work raises; BadRequest if it takes too much
        time, GatewayBroken if no process can do it."""
        if self._closed:
            raise GatewayBroken("the gateway is stopping")
        job = _Job(owner, pickle.dumps(work), asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._dispatch()
        found: T = await job.result
        return found

    def forget(self, owner: str) -> None:
        """Forget the time that an owner took."""
        self._used_s.pop(owner, None)

    async def aclose(self) -> None:
        """End all processes. Works that have not ended are cancelled."""
        self._closed = True
        tasks = {*self._starting, *self._serving}
        for task in tasks:
            task.cancel()
        for job in self._waiting:
            job.result.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in (*self._idle, *self._running):
            self._end(process)
        await asyncio.gather(*self._ending)

    def _dispatch(self) -> None:
        """Give waiting works to idle processes, and start a process if one of them has none."""
        self._waiting = [job for job in self._waiting if not job.result.done()]
        for process in tuple(self._idle):
            fitting = [job for job in self._waiting if process.takes_large or len(job.data) <= SMALL_BYTES]
            if fitting:
                job = min(fitting, key=lambda job: self._used_s.get(job.owner, 0.0))
                self._waiting.remove(job)
                self._idle.remove(process)
                self._running.add(process)
                self._keep(self._serving, asyncio.ensure_future(self._serve(process, job)))
        if self._waiting and not self._closed and len(self._starting) < len(self._waiting):
            kinds = [*(process.takes_large for process in (*self._idle, *self._running)), *self._starting.values()]
            if len(kinds) < self._most:
                # The first one takes everything, as does the only one; the second is kept for small works.
                takes_large = self._most == 1 or not any(kinds) or False in kinds
                task = asyncio.ensure_future(self._start(takes_large=takes_large))
                self._starting[task] = takes_large
                task.add_done_callback(self._starting.pop)

    def _end(self, process: _Process) -> None:
        self._keep(self._ending, asyncio.ensure_future(process.end()))

    @staticmethod
    def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _start(self, *, takes_large: bool) -> None:
        """Start a process. If it fails, those who wait get the reason."""
        process = None
        try:
            # The kernel watches the thread that starts the process: that of the event loop, which lasts.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _PROGRAM, str(os.getpid()), *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                await process.stdout.readexactly(_HEAD)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if process is not None:
                self._end(_Process(process, takes_large))
            logger.error("a process that renders does not start: %r", error)
            waiting, self._waiting = self._waiting, []
            for job in waiting:
                if not job.result.done():
                    job.result.set_exception(GatewayBroken(f"a process that renders does not start: {error!r}"))
            return
        except asyncio.CancelledError:
            if process is not None:
                self._end(_Process(process, takes_large))
            raise
        self._idle.append(_Process(process, takes_large))
        # Called once the task no longer counts as starting.
        asyncio.get_running_loop().call_soon(self._dispatch)

    async def _serve(self, process: _Process, job: _Job) -> None:
        """Let a process do a work, and replace it if it fails to answer."""
        now = asyncio.get_running_loop().time
        began_s, goes_on = now(), False
        try:
            async with asyncio.timeout(self._wall_s):
                succeeded, result, goes_on = await process.ask(job.data)
            if not succeeded:
                self._fail(job, result)
            elif not job.result.done():
                job.result.set_result(result)
        except TimeoutError:
            self._fail(job, GatewayBroken(f"a render process did not answer within {self._wall_s:g} s"))
        except EOFError:
            self._died(job)
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        finally:
            self._running.discard(process)
            self._used_s[job.owner] += now() - began_s
            if len(self._used_s) > MAX_OWNERS:
                self._used_s.clear()
            if goes_on:
                self._idle.append(process)
            else:
                self._end(process)
            self._dispatch()

    def _died(self, job: _Job) -> None:
        if job.repeated:
            logger.error("a render process died twice over the same work")
            self._fail(job, GatewayBroken("a render process died twice over the same work"))
        else:
            logger.warning("a render process died; its work is done once more")
            job.repeated = True
            self._waiting.insert(0, job)

    @staticmethod
    def _fail(job: _Job, error: BaseException) -> None:
        if not job.result.done():
            job.result.set_exception(error)


def main(arguments: list[str]) -> None:
    """Do works from standard input until it ends: pickled, each after its length in 8 bytes. The first 8 bytes on
    standard output say that the process is ready; replies have the form of works."""
    parent_pid, tokenizer_dir, token_kinds, cpu_s = arguments
    die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return_large_blocks()
    source, replies = sys.stdin.buffer, _Replies(os.dup(1), float(cpu_s))
    # What a library prints must not be taken for a reply.
    os.dup2(2, 1)
    renderer = load_renderer(Path(tokenizer_dir), token_kinds=token_kinds == "1")
    gc.collect()
    gc.freeze()
    replies.ready()
    while len(head := source.read(_HEAD)) == _HEAD:
        before = resident_bytes()
        data = source.read(int.from_bytes(head, "big"))
        with replies.timed():
            succeeded, result = _done(data, renderer)
        del data
        goes_on = resident_bytes() <= before + SPARE_BYTES
        replies.write(_pickled(succeeded, result, goes_on=goes_on))
        if not goes_on:
            return
        del result


class _Replies:
    """Writes replies. A work that exceeds its processor time gets its reply from a thread, which ends the process: the
    tokenizer, in which no signal is handled, lets threads run."""

    def __init__(self, descriptor: int, cpu_s: float) -> None:
        self._sink = os.fdopen(descriptor, "wb")
        self._cpu_s = cpu_s
        self._working = threading.Lock()
        """Held by the thread from when the time is over."""
        self._is_timed = False
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGPROF, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(signals,), daemon=True).start()

    def ready(self) -> None:
        self._sink.write(bytes(_HEAD))
        self._sink.flush()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Give the block the time of one work."""
        self._is_timed = True
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            with self._working:
                self._is_timed = False

    def write(self, reply: bytes) -> None:
        self._sink.write(len(reply).to_bytes(_HEAD, "big") + reply)
        self._sink.flush()

    def _watch(self, signals: int) -> None:
        while os.read(signals, 1):
            with self._working:
                if self._is_timed:
                    message = f"This request takes more than {self._cpu_s:g} s to render. Please make it shorter."
                    self.write(_pickled(False, BadRequest(message, "messages"), goes_on=False))
                    os._exit(1)


def _done(data: bytes, renderer: Renderer) -> tuple[bool, Any]:
    """Do one work; return whether it succeeded, and its result or exception."""
    # Millions of young objects, among which there are no cycles.
    gc.disable()
    try:
        return True, pickle.loads(data)(renderer)
    except Exception as error:  # noqa: BLE001 - raised in the gateway
        return False, error
    finally:
        gc.enable()


def _pickled(succeeded: bool, result: Any, *, goes_on: bool) -> bytes:
    try:
        return pickle.dumps((succeeded, result, goes_on), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - pickling runs code of the result
        return pickle.dumps((False, GatewayBroken(f"a work failed: {result!r}"), goes_on))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
