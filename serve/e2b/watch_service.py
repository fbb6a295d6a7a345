"""The methods of `filesystem.Filesystem` that watch folders: WatchDir, and watchers whose events are polled."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from aiohttp import web

from headrace.serve.e2b.connect_protocol import read_single
from headrace.serve.e2b.filesystem_service import path_of, run
from headrace.serve.e2b_sandboxes.errors import Code, RpcError
from headrace.serve.e2b_sandboxes.watchers import Watcher, start_scans

if TYPE_CHECKING:
    from headrace.sandboxes.remote.tasks import ServerTasks
    from headrace.serve.e2b.connect_protocol import Message, ResponseStream
    from headrace.serve.e2b.envd import Call, Envd

_MAX_WATCHES: Final = 64
_IS_FOLDER: Final = """[ -e "$1" ] || fail 41 "path not found: $1"
[ -d "$1" ] || fail 40 "path is not a directory: $1"
"""


class WatchService:
    """Handlers of the methods."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks

    def routes(self, envd: Envd) -> list[web.RouteDef]:
        base = "/filesystem.Filesystem"
        return [
            web.post(f"{base}/WatchDir", envd.streaming(self._watch)),
            web.post(f"{base}/CreateWatcher", envd.unary(self._create)),
            web.post(f"{base}/GetWatcherEvents", envd.unary(self._events)),
            web.post(f"{base}/RemoveWatcher", envd.unary(self._remove)),
        ]

    async def _begin(self, call: Call, message: Message) -> tuple[Watcher, asyncio.Task[None]]:
        """Start a watcher and wait for its first scan. Returns it with its task. Raises RpcError, SandboxError."""
        # A watcher that has ended has its events until it is removed.
        if max(len(call.live.watching), len(call.live.watchers)) >= _MAX_WATCHES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"a sandbox has at most {_MAX_WATCHES} concurrent watches")
        path = await path_of(call, message)
        await run(call, _IS_FOLDER, path)
        recursive = message.get("recursive") is True
        process = await start_scans(call.live.handle, await call.account(), path, recursive=recursive)
        with_entry = message.get("includeEntry") is True
        watcher = Watcher(process, path, call.live.row.id, with_entry=with_entry)
        task = self._tasks.start(watcher.run())
        call.live.watching.add(task)
        task.add_done_callback(call.live.watching.discard)
        try:
            await watcher.ready.wait()
        except BaseException:
            task.cancel()
            raise
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
