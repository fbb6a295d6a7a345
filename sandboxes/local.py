"""Local sandboxes on Linux namespaces: the provider that owns a launcher, and the sandbox any process attaches to.

Invariants:
- One launcher per provider, started by it and dead with it. One that died took its sandboxes with it; whoever asked at
  that moment gets LauncherGone (transient), and the next question to the provider starts a new one.
- A launcher that does not answer in time hangs: it is killed, so that it is a dead one.
- Output is captured in the client, by pipes that lead straight from the command to it.
- A create that is cancelled leaves nothing: the launcher is told to discard it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.sandboxes.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    ExecResult,
    Feature,
    ImageRef,
    Network,
    SandboxId,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    SandboxUsage,
)
from headrace.sandboxes.capture import OutputCapture, memory_file
from headrace.sandboxes.client import LauncherConnections, open_null
from headrace.sandboxes.commands import EXIT_FILE_ERROR
from headrace.sandboxes.errors import (
    ExecTimeout,
    LauncherGone,
    NamespacesUnavailable,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SpecRefused,
    Unsupported,
)
from headrace.sandboxes.exposed import is_below, relay
from headrace.sandboxes.images import ImageStore, default_image_folder
from headrace.sandboxes.local_images import LocalImages
from headrace.sandboxes.local_process import OUTPUT_GRACE_S, LocalProcess
from headrace.sandboxes.partial import PartialSandbox
from headrace.sandboxes.stdlib_process import stdlib_command
from headrace.sandboxes.wire import close_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

    from headrace.sandboxes.base import HostPort, TerminalSize
    from headrace.sandboxes.client import LauncherClient
    from headrace.sandboxes.wire import Message

logger = logging.getLogger(__name__)

PROVIDER: Final = "local"
_MAX_PARENT_BYTES: Final = 70
"""sun_path holds 107 bytes (unix(7)); the rest is `/<pid>-<random>/socket`."""
_START_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 30.0
_FILE_TIMEOUT_S: Final = 60.0
_LEAST_MEMORY_BYTES: Final = 16 << 20
_ANSWER_GRACE_S: Final = 20.0


class LocalSandboxConfig(BaseModel):
    """Limits of one launcher and of each of its sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sandboxes: int = Field(default=512, ge=1, le=16_000)
    """Live and frozen sandboxes at once; above it create raises CapacityExceeded."""
    layer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a sandbox's file layer in memory, where its spec names no `disk_bytes`; what exceeds it gets ENOSPC."""
    memory_bytes: int | None = Field(default=2 << 30, ge=16 << 20)
    """Memory of a sandbox, its file layer included, where its spec names no `memory_bytes`; None for no limit. Kept
    only where control groups are (headrace doctor)."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors of a sandbox, where its spec names no `cpu`; None for a fair share."""
    pids: int = Field(default=512, ge=8)
    """Processes of one user in a sandbox, where its spec names no `pids`."""
    open_files: int = Field(default=4096, ge=64)
    """Descriptors of one process in a sandbox."""
    boot_timeout_s: float = Field(default=20.0, gt=0)
    """A sandbox that is not ready by then is killed: BootTimeout."""
    answer_timeout_s: float = Field(default=20.0, gt=0)
    """A launcher that answers nothing for so long (beyond the boot, where one is asked for) is killed and replaced."""
    image_folder: Path | None = None
    """Where images are unpacked, on ext4, xfs, btrfs or tmpfs; by default below the user's cache folder."""
    image_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Above it images that nobody uses go, least recently used first."""
    max_images: int = Field(default=64, ge=1)
    """Images that a launcher holds ready to boot."""
    label: str = ""
    """Shown in the command line of the launcher and its sandboxes: `leftovers.run_label(run directory)`."""
    runtime_folder: Path | None = None
    """Where socket folders are made; by default below the system's folder for temporary files."""


class LocalProvider:
    """Starts a launcher and asks it for sandboxes. An async context manager; `aclose` ends every sandbox."""

    features = frozenset(Feature)

    def __init__(self, config: LocalSandboxConfig | None = None) -> None:
        self._config = config or LocalSandboxConfig()
        self._admin_secret = secrets.token_hex(16)
        self._connections = LauncherConnections()
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._images: LocalImages | None = None
        self._started = False
        self._starting = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """Path of the launcher's socket."""
        if self._folder is None:
            raise LauncherGone("the provider is not started: use `async with` or `await provider.start()`")
        return str(self._folder / "socket")

    @property
    def launcher_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the launcher. Raises NamespacesUnavailable with the kernel's reason, LauncherGone."""
        async with self._starting:
            await self._start()
            self._started = True

    async def _start(self) -> None:
        parent = self._config.runtime_folder or Path(tempfile.gettempdir()) / f"headrace-sandboxes-{os.getuid()}"
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            raise SpecRefused(f"{parent} is too long for a unix socket: set runtime_folder to a shorter path")
        self._folder = await asyncio.to_thread(_make_socket_folder, parent)
        try:
            await self._start_launcher()
        except BaseException:
            await self._end()
            raise

    async def _restart_if_dead(self) -> None:
        async with self._starting:
            if self._started and (self._process is None or self._process.returncode is not None):
                await self._end()
                await self._start()

    async def _start_launcher(self) -> None:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._spawn_launcher()
        except TimeoutError as error:
            raise LauncherGone(f"the launcher did not start in {_START_TIMEOUT_S} s") from error
        except OSError as error:
            raise LauncherGone(f"the launcher could not be started: {error}") from error

    async def _spawn_launcher(self) -> None:
        environment = {"LD_LIBRARY_PATH": path} if (path := os.environ.get("LD_LIBRARY_PATH")) else {}
        # A session of its own: Ctrl-C at the terminal is for the owner, which then closes in order.
        self._process = process = await asyncio.create_subprocess_exec(
            *stdlib_command("launcher"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(self._launcher_settings()).encode() + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise LauncherGone("the launcher ended while it started: see its standard error")
        if "error" in (answer := json.loads(line)):
            raise NamespacesUnavailable(str(answer["error"]))
        store = ImageStore(self._config.image_folder or default_image_folder(), self._config.image_bytes)
        self._images = LocalImages(store, self._ask, process.pid, self._config.max_images)
        for controller, reason in answer["missing"].items():
            logger.warning("sandboxes have no %s control group: %s", controller, reason)

    def _launcher_settings(self) -> dict[str, Any]:
        return {
            "admin_secret": self._admin_secret,
            "owner_pid": os.getpid(),
            "socket_path": self.endpoint,
            "max_sandboxes": self._config.max_sandboxes,
            "layer_bytes": self._config.layer_bytes,
            "memory_bytes": self._config.memory_bytes,
            "cpus": self._config.cpus,
            "processes": self._config.pids,
            "open_files": self._config.open_files,
            "boot_timeout_s": self._config.boot_timeout_s,
            "label": self._config.label,
        }

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox, or return the one with the same idempotency key.

        Raises ImageUnknown, SpecRefused, FrozenPathRefused, CapacityExceeded, BootFailed, BootTimeout, LauncherGone.
        """
        _check_spec(spec)
        await self._restart_if_dead()
        if self._images is None:
            raise LauncherGone("the provider is not started: use `async with` or `await provider.start()`")
        image = await self._images.provide(spec.image)
        # A key of our own lets a cancelled create be found and discarded.
        key = spec.idempotency_key or f"once-{secrets.token_hex(8)}"
        message = {
            "op": "create",
            "key": key,
            "image": image,
            "ttl_s": spec.ttl_s,
            "labels": dict(spec.labels),
            "disk_bytes": spec.disk_bytes,
            "pids": spec.pids,
            "memory_bytes": spec.memory_bytes,
            "cpus": spec.cpu,
            "mounts": [(mount.source, mount.path, mount.target) for mount in spec.mounts],
        }
        discard = {"op": "discard", "secret": self._admin_secret, "key": key}
        answer = await self._admin(message, if_cancelled=discard, extra_s=self._config.boot_timeout_s)
        return SandboxRef(
            provider=PROVIDER, id=SandboxId(answer["sandbox"]), endpoint=self.endpoint, secret=answer["secret"]
        )

    async def attach(self, ref: SandboxRef) -> LocalSandbox:
        return LocalSandbox(ref, self._connections)

    async def list(self) -> list[SandboxInfo]:
        answer = await self._admin({"op": "list"})
        return [
            SandboxInfo(
                id=SandboxId(row["id"]),
                state=row["state"],
                expires_in_s=row["expires_in_s"],
                labels=row["labels"],
                idempotency_key=row["key"],
            )
            for row in answer["sandboxes"]
        ]

    async def cpu_s(self) -> float:
        """CPU seconds, user and system, of the launcher and of all its sandboxes that have ended."""
        return float((await self._admin({"op": "usage"}))["cpu_s"])

    async def images(self) -> tuple[ImageRef, ...]:
        """What the launcher has ready to boot beside `host`: digests, and snapshots by what `snapshot` returned."""
        return tuple(ImageRef(name) for name in (await self._admin({"op": "images"}))["images"])

    async def drop_image(self, image: ImageRef) -> bool:
        """Forget a snapshot, or an image that the launcher holds ready. False while sandboxes use it. Idempotent."""
        return bool((await self._admin({"op": "drop_image", "name": image}))["dropped"])

    async def _ask(self, message: Message, descriptors: Sequence[int]) -> Message:
        try:
            client = await self._connections.get(self.endpoint)
        except LauncherGone:
            close_all(descriptors)
            raise
        return await client.request({**message, "secret": self._admin_secret}, descriptors)

    async def _admin(self, message: Message, *, if_cancelled: Message | None = None, extra_s: float = 0.0) -> Message:
        """Ask the launcher, which is started again if it died. Raises its typed error, LauncherGone."""
        await self._restart_if_dead()
        process = self._process
        client = await self._connections.get(self.endpoint)
        patience_s = self._config.answer_timeout_s + extra_s
        try:
            return await client.request({**message, "secret": self._admin_secret}, patience_s=patience_s)
        except asyncio.CancelledError:
            if if_cancelled is not None:
                client.post(if_cancelled)
            raise
        except TimeoutError as error:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            raise LauncherGone("the launcher hung and was killed, and its sandboxes with it") from error

    async def aclose(self) -> None:
        """End every sandbox and the launcher. Idempotent."""
        self._started = False
        await self._end()

    async def _end(self) -> None:
        self._connections.close()
        images, self._images = self._images, None
        if images is not None:
            await images.release()
        process, self._process = self._process, None
        if process is not None:
            await _end_process(process)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """The end of its standard input tells the launcher to kill its sandboxes and to go."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _check_spec(spec: SandboxSpec) -> None:
    if spec.network is not Network.NONE:
        raise SpecRefused(f"network {spec.network.value!r}: the local provider has only `none`")
    for name, least in (("cpu", 0.01), ("memory_bytes", _LEAST_MEMORY_BYTES), ("disk_bytes", 1 << 16), ("pids", 8)):
        value = getattr(spec, name)
        if value is not None and not least <= value < 1 << 62:
            raise SpecRefused(f"{name}={value}: must be at least {least}")
    if not 0 < spec.ttl_s < 1e9:
        raise SpecRefused(f"ttl_s={spec.ttl_s}: must be a number of seconds above 0")


def _make_socket_folder(parent: Path) -> Path:
    """A private folder `<owner pid>-<random>`; those whose owner is dead and where nobody listens are removed."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SandboxError(f"{parent} must belong to this user with mode 700: remove it or set runtime_folder")
    for folder in parent.iterdir():
        owner = folder.name.partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and not _listens(folder / "socket"):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


class _Done(NamedTuple):
    answer: Message
    stdout: bytes
    stderr: bytes
    truncated: bool


def _kept_result(answer: Message) -> _Done:
    """What the first caller of an exec_id left: its standard output and error in one file."""
    [descriptor] = answer["descriptors"]
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        stdout = file.read(answer["stdout_bytes"])
        return _Done(answer, stdout, file.read(), truncated=answer["truncated"])


class LocalSandbox(PartialSandbox):
    """A sandbox of some launcher on this host, by its ref. Every method raises SandboxGone once it is dead."""

    def __init__(self, ref: SandboxRef, connections: LauncherConnections) -> None:
        self._ref = ref
        self._connections = connections

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    async def exec(
        self,
        command: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        exec_id: str | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`. A command whose daemon holds its output returns 0.2 s after the command's own end."""
        message = {"op": "exec", "command": command, "user": user, "env": dict(env or {}), "cwd": cwd}
        if exec_id is not None:
            message["exec_id"] = exec_id
        done = await self._run(message, stdin, timeout_s, max_output_bytes)
        if exec_id is not None:
            done = await self._share(exec_id, done)
        if done.answer["timed_out"]:
            raise ExecTimeout(f"command ran longer than timeout_s={timeout_s} and was killed: {command[:200]!r}")
        return ExecResult(
            exit_code=done.answer["exit_code"],
            stdout=done.stdout,
            stderr=done.stderr,
            truncated=done.truncated,
            duration_s=done.answer["duration_s"],
        )

    async def _share(self, exec_id: str, done: _Done) -> _Done:
        """Leave the result with the launcher for whoever names the id again; or it is such a result already."""
        if "stdout_bytes" in done.answer:
            return _kept_result(done.answer)
        kept = {**done.answer, "stdout_bytes": len(done.stdout), "truncated": done.truncated}
        with suppress(SandboxGone):
            output = memory_file(done.stdout + done.stderr)
            await self._request({"op": "keep", "exec_id": exec_id, "result": kept}, (output,))
        return done

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        timeout_s: float | None = None,
    ) -> LocalProcess:
        """See `Sandbox.spawn`."""
        program = command if isinstance(command, str) else list(command)
        message = {"op": "spawn", "command": program, "user": user, "env": dict(env or {}), "cwd": cwd}
        client = await self._client()
        named = self._named({**message, "timeout_s": timeout_s})
        return await LocalProcess.start(client, named, stdin=stdin, terminal=terminal)

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        message = {"op": "read", "path": path, "user": user, "max_bytes": max_bytes}
        return await self._file_operation(message, None, max_bytes)

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        if isinstance(data, bytes):
            await self.write_many({path: data}, user=user)
            return
        with await asyncio.to_thread(data.open, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            await self._file_operation({"op": "write", "files": [(path, size)], "user": user}, file.fileno(), 4096)

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        sizes = [(path, len(data)) for path, data in files.items()]
        await self._file_operation({"op": "write", "files": sizes, "user": user}, b"".join(files.values()), 4096)

    async def _file_operation(self, message: Message, stdin: bytes | int | None, max_bytes: int) -> bytes:
        done = await self._run(message, stdin, _FILE_TIMEOUT_S, max(max_bytes, 4096))
        exit_code = done.answer["exit_code"]
        if done.answer["timed_out"]:
            raise SandboxFileError(f"file operation took longer than {_FILE_TIMEOUT_S} s")
        if exit_code == EXIT_FILE_ERROR:
            raise SandboxFileError(done.stderr.decode(errors="replace").strip())
        if exit_code != 0:
            raise SandboxFileError(f"file operation ended with {exit_code}")
        return done.stdout

    async def _run(self, message: Message, stdin: bytes | int | None, timeout_s: float, max_output_bytes: int) -> _Done:
        """`stdin` may be an open file, which stays the caller's."""
        async with OutputCapture(max_output_bytes) as out, OutputCapture(max_output_bytes) as err:
            match stdin:
                case None:
                    source = open_null()
                case bytes():
                    source = memory_file(stdin)
                case descriptor:
                    source = os.dup(descriptor)
            descriptors = (source, out.write_end, err.write_end)
            answer = await self._timed_request({**message, "timeout_s": timeout_s}, descriptors, timeout_s)
            stdout = await out.finish(OUTPUT_GRACE_S)
            stderr = await err.finish(OUTPUT_GRACE_S if not out.held else 0)
        return _Done(answer, stdout, stderr, truncated=out.truncated or err.truncated)

    async def _timed_request(self, message: Message, descriptors: tuple[int, ...], timeout_s: float) -> Message:
        """The deadline is kept inside the sandbox; one that does not answer even then is killed as a whole, unless it
        was paused meanwhile."""
        answering = asyncio.ensure_future(self._request(message, descriptors))
        try:
            seen_s = 0.0
            while not (await asyncio.wait((answering,), timeout=timeout_s + _ANSWER_GRACE_S))[0]:
                state = await self._request({"op": "state"})
                if state["state"] != "paused" and state["paused_s"] == seen_s:
                    await self.kill()
                    text = f"sandbox {self.id} did not answer after timeout_s={timeout_s} and was killed"
                    raise ExecTimeout(text)
                seen_s = state["paused_s"]
            return await answering
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.wait((answering,))
            elif not answering.cancelled():
                # Retrieved here where nobody asks for it any more.
                answering.exception()

    async def freeze(self) -> None:
        await self._request({"op": "freeze"})

    @asynccontextmanager
    async def expose(self, port: int, target: HostPort, prefix: str) -> AsyncIterator[None]:
        """See `Sandbox.expose`."""
        if not prefix.startswith("/") or not is_below(prefix, prefix):
            raise SpecRefused(f"prefix {prefix!r}: a plain URL path that begins with /")
        answer = await self._request({"op": "listen", "port": port})
        with socket.socket(fileno=answer["descriptors"][0]) as listener:
            async with relay(listener, target, prefix):
                yield

    async def snapshot(self) -> ImageRef:
        """See `Sandbox.snapshot`. The image lives in memory, as long as its launcher or until `drop_image`."""
        return ImageRef((await self._request({"op": "snapshot"}))["image"])

    async def pause(self) -> None:
        await self._request({"op": "pause"})

    async def resume(self) -> None:
        await self._request({"op": "resume"})

    async def usage(self) -> SandboxUsage:
        """Raises Unsupported where control groups do not count memory, processor time or processes."""
        state = await self._request({"op": "state"})
        try:
            return SandboxUsage(
                cpu_s=state["cpu_s"],
                memory_bytes=state["memory_bytes"],
                memory_limit_bytes=state["limits"]["memory_bytes"],
                disk_bytes=state["disk_bytes"],
                disk_limit_bytes=state["disk_limit_bytes"],
                processes=state["processes"],
                cpus=state["limits"]["cpus"],
                oom_kills=state["oom_kills"],
            )
        except KeyError as error:
            raise Unsupported(f"usage: this machine does not count {error}; see headrace doctor") from error

    async def renew(self, ttl_s: float) -> None:
        await self._request({"op": "renew", "ttl_s": ttl_s})

    async def kill(self) -> None:
        with suppress(SandboxGone):
            await self._request({"op": "kill"})

    async def _request(self, message: Message, descriptors: tuple[int, ...] = ()) -> Message:
        try:
            client = await self._client()
        except SandboxGone:
            close_all(descriptors)
            raise
        try:
            return await client.request(self._named(message), descriptors)
        except LauncherGone as error:
            raise SandboxGone(str(error)) from error

    def _named(self, message: Message) -> Message:
        return {**message, "sandbox": self._ref.id, "secret": self._ref.secret}

    async def _client(self) -> LauncherClient:
        try:
            return await self._connections.get(self._ref.endpoint)
        except LauncherGone as error:
            raise SandboxGone(str(error)) from error
