"""envd's service `filesystem.Filesystem`, in which each call runs a small script in the sandbox, and its watchers.

Invariants: paths are passed to the script quoted, as positional parameters, and are resolved inside the sandbox by a
process run as the user, never on the host. The image needs bash, coreutils and findutils.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from typing import Any, Final

from aiohttp import web

from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b.connect_protocol import Message, ResponseStream, read_single
from headrace.serve.sandbox_servers.e2b.envd import Call, Envd
from headrace.serve.sandbox_servers.e2b.file_metadata import add_metadata
from headrace.serve.sandbox_servers.e2b_state.entries import FORMAT, parse_entries
from headrace.serve.sandbox_servers.e2b_state.errors import Code, RpcError
from headrace.serve.sandbox_servers.e2b_state.watchers import (
    SANDBOX_SCAN_BYTES,
    SERVER_SCAN_BYTES,
    ScanBudget,
    Watcher,
    start_scans,
)

_TIMEOUT_S: Final = 120.0
_MAX_LISTING_BYTES: Final = 32 << 20
_MAX_DEPTH: Final = 1000
_INVALID, _MISSING, _EXISTS = 40, 41, 42
_CODES: Final = {_INVALID: Code.INVALID_ARGUMENT, _MISSING: Code.NOT_FOUND, _EXISTS: Code.ALREADY_EXISTS}

_HEAD: Final = f"""export LC_ALL=C
fail() {{ echo "$2" >&2; exit "$1"; }}
show() {{ exec find "$@" -printf '{FORMAT}'; }}
"""
_STAT: Final = f"""[ -e "$1" ] || [ -L "$1" ] || fail {_MISSING} "file not found: $1"
show "$1" -maxdepth 0"""
_LIST: Final = f"""[ -e "$1" ] || fail {_MISSING} "path not found: $1"
[ -d "$1" ] || fail {_INVALID} "path is not a directory: $1"
show -H "$1" -mindepth 1 -maxdepth "$2\""""
_MAKE: Final = f"""[ -d "$1" ] && fail {_EXISTS} "directory already exists: $1"
[ -e "$1" ] || [ -L "$1" ] && fail {_INVALID} "path already exists but it is not a directory: $1"
mkdir -p -- "$1" || exit 1
show "$1" -maxdepth 0"""
_MOVE: Final = f"""[ -e "$1" ] || [ -L "$1" ] || fail {_MISSING} "source file not found: $1"
mkdir -p -- "$(dirname -- "$2")" && mv -fT -- "$1" "$2" || exit 1
show "$2" -maxdepth 0"""
_REMOVE: Final = 'rm -rf -- "$1"'


class FilesystemService:
    """Handlers for the service, except for its watchers."""

    def routes(self, envd: Envd) -> list[web.RouteDef]:
        methods = {"Stat": _stat, "ListDir": _list, "MakeDir": _make, "Move": _move, "Remove": _remove}
        return [web.post(f"/filesystem.Filesystem/{name}", envd.unary(method)) for name, method in methods.items()]


async def _stat(call: Call, message: Message) -> Message:
    return {"entry": await stat(call, await path_of(call, message))}


async def stat(call: Call, path: str) -> dict[str, Any]:
    """Return the entry at an absolute path. Raises RpcError, SandboxError."""
    return await _one(call, await run(call, _STAT, path))


async def _list(call: Call, message: Message) -> Message:
    depth = message.get("depth", 0)
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise RpcError(Code.INVALID_ARGUMENT, "depth: must be a whole number of at least 0")
    path = await path_of(call, message)
    output = await run(call, _LIST, path, str(min(max(1, depth), _MAX_DEPTH)))
    return {"entries": await _shown(call, output)}


async def _make(call: Call, message: Message) -> Message:
    return {"entry": await _one(call, await run(call, _MAKE, await path_of(call, message)))}


async def _move(call: Call, message: Message) -> Message:
    source = await path_of(call, message, "source")
    target = await path_of(call, message, "destination")
    return {"entry": await _one(call, await run(call, _MOVE, source, target))}


async def _remove(call: Call, message: Message) -> Message:
    await run(call, _REMOVE, await path_of(call, message))
    return {}


async def _shown(call: Call, output: bytes) -> list[dict[str, Any]]:
    """Convert the output of `find`, and add the files' metadata. Raises RpcError for any other output, because an agent
    may have replaced `find`, and SandboxError."""
    try:
        entries = [entry.to_json() for entry in parse_entries(output)]
        await add_metadata(call.live, (await call.account()).name, entries)
        return entries
    except ValueError as error:
        text = "unexpected file metadata from the sandbox: `find` in its image may have been replaced"
        raise RpcError(Code.INTERNAL, text) from error


async def _one(call: Call, output: bytes) -> dict[str, Any]:
    """Return the only entry of the output. Raises RpcError, SandboxError."""
    entries = await _shown(call, output)
    if len(entries) != 1:
        raise RpcError(Code.INTERNAL, f"unexpected file metadata from the sandbox: {len(entries)} entries for one file")
    return entries[0]


async def path_of(call: Call, message: Message, name: str = "path") -> str:
    """Return the absolute path in a field of the message. Raises RpcError."""
    value = message.get(name, "")
    if not isinstance(value, str):
        raise RpcError(Code.INVALID_ARGUMENT, f"{name}: not a string")
    return (await call.account()).resolve(value)


async def run(call: Call, script: str, *arguments: str) -> bytes:
    """Return the output of a script. Raises RpcError (from its exit code and message), SandboxError."""
    command = f"set -- {shlex.join(arguments)}\n{_HEAD}{script}"
    account = await call.account()
    result = await call.live.handle.exec(
        command, user=account.name, cwd="/", timeout_s=_TIMEOUT_S, max_output_bytes=_MAX_LISTING_BYTES
    )
    if result.exit_code != 0:
        text = result.stderr.decode(errors="replace").strip()
        raise RpcError(_CODES.get(result.exit_code) or code_of(text), text or f"exit code {result.exit_code}")
    if result.truncated:
        text = f"the listing is larger than {_MAX_LISTING_BYTES} bytes: list a smaller folder or use a smaller depth"
        raise RpcError(Code.RESOURCE_EXHAUSTED, text)
    return result.stdout


def code_of(text: str) -> Code:
    """Return the code for an error message of a coreutils program in the C locale."""
    for words, code in (
        ("Permission denied", Code.PERMISSION_DENIED),
        ("Operation not permitted", Code.PERMISSION_DENIED),
        ("Read-only file system", Code.PERMISSION_DENIED),
        ("No space left on device", Code.RESOURCE_EXHAUSTED),
        ("Not a directory", Code.INVALID_ARGUMENT),
        ("File name too long", Code.INVALID_ARGUMENT),
        ("Is a directory", Code.INVALID_ARGUMENT),
        ("No such file or directory", Code.NOT_FOUND),
    ):
        if words in text:
            return code
    return Code.INTERNAL


_MAX_WATCHES: Final = 64
_IS_FOLDER: Final = """[ -e "$1" ] || fail 41 "path not found: $1"
[ -d "$1" ] || fail 40 "path is not a directory: $1"
"""


class WatchService:
    """Handlers for the service's watcher methods."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._budget = ScanBudget(SERVER_SCAN_BYTES)

    def routes(self, envd: Envd) -> list[web.RouteDef]:
        base = "/filesystem.Filesystem"
        return [
            web.post(f"{base}/WatchDir", envd.streaming(self._watch)),
            web.post(f"{base}/CreateWatcher", envd.unary(self._create)),
            web.post(f"{base}/GetWatcherEvents", envd.unary(self._events)),
            web.post(f"{base}/RemoveWatcher", envd.unary(self._remove)),
        ]

    async def _begin(self, call: Call, message: Message) -> tuple[Watcher, asyncio.Task[None]]:
        """Start a watcher and wait for its first scan. Return the watcher and its task. Raises RpcError,
        SandboxError."""
        # A watcher that has ended has its events until it is removed.
        if max(len(call.live.watching), len(call.live.watchers)) >= _MAX_WATCHES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"a sandbox has at most {_MAX_WATCHES} concurrent watches")
        path = await path_of(call, message)
        await run(call, _IS_FOLDER, path)
        recursive = message.get("recursive") is True
        process = await start_scans(call.live.handle, await call.account(), path, recursive=recursive)
        with_entry = message.get("includeEntry") is True
        if call.live.scans is None:
            call.live.scans = ScanBudget(SANDBOX_SCAN_BYTES, self._budget)
        watcher = Watcher(process, path, call.live.row.id, call.live.scans, with_entry=with_entry)
        task = self._tasks.start(watcher.run())
        call.live.watching.add(task)
        task.add_done_callback(call.live.watching.discard)
        try:
            await watcher.ready.wait()
        except BaseException:
            task.cancel()
            raise
        if watcher.failure is not None:
            raise watcher.failure
        return watcher, task

    async def _watch(self, call: Call, stream: ResponseStream) -> None:
        watcher, task = await self._begin(call, await read_single(call.request))
        try:
            await stream.open()
            await stream.send({"start": {}})
            async with asyncio.timeout(call.timeout_s):
                while (events := await watcher.next(call.keepalive_s)) is not None:
                    for event in events:
                        await stream.send({"filesystem": event})
                    if not events:
                        await stream.send({"keepalive": {}})
        finally:
            task.cancel()

    async def _create(self, call: Call, message: Message) -> Message:
        watcher, task = await self._begin(call, message)
        name = f"w{secrets.token_hex(8)}"
        call.live.watchers[name] = (watcher, task)
        return {"watcherId": name}

    async def _events(self, call: Call, message: Message) -> Message:
        watcher, _ = call.live.watchers[_name(call, message)]
        return {"events": watcher.take()}

    async def _remove(self, call: Call, message: Message) -> Message:
        _, task = call.live.watchers.pop(_name(call, message))
        task.cancel()
        return {}


def _name(call: Call, message: Message) -> str:
    name = message.get("watcherId", "")
    if not isinstance(name, str):
        raise RpcError(Code.INVALID_ARGUMENT, "watcherId: not a string")
    if name not in call.live.watchers:
        raise RpcError(Code.NOT_FOUND, f"watcher {name!r} not found")
    return name
