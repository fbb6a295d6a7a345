"""Routes for commands of one sandbox: exec, and spawned processes by their spawn_id."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from headrace.sandboxes.base import Feature, TerminalSize
from headrace.sandboxes.errors import Unsupported
from headrace.serve.exec.bodies import Exec, Signal, Size, Spawn, Stdin, read_body, whole_number
from headrace.serve.exec.processes import LONGEST_POLL_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from headrace.sandboxes.base import ExecResult, Process, Sandbox
    from headrace.serve.exec.processes import BufferedProcess, ProcessTable
    from headrace.serve.exec.registry import LeasedSandbox, Registry

    Work = Callable[[web.Request, LeasedSandbox, Sandbox], Coroutine[Any, Any, Any]]
    Wrap = Callable[[Work], Callable[[web.Request], Awaitable[web.StreamResponse]]]

_EXEC: Final = "/v1/sandboxes/{id}/exec"
_PROCESSES: Final = "/v1/sandboxes/{id}/processes"
_PROCESS: Final = _PROCESSES + "/{spawn_id}"


class CommandRoutes:
    """Handlers of the routes for commands."""

    def __init__(self, registry: Registry, processes: ProcessTable) -> None:
        self._registry = registry
        self._processes = processes

    def routes(self, on: Wrap) -> list[web.RouteDef]:
        return [
            web.post(_EXEC, on(self._exec)),
            web.post(_PROCESSES, on(self._spawn)),
            web.get(f"{_PROCESS}/output", on(self._output)),
            web.get(f"{_PROCESS}/end", on(self._end)),
            web.post(f"{_PROCESS}/stdin", on(self._stdin)),
            web.delete(f"{_PROCESS}/stdin", on(self._close_stdin)),
            web.post(f"{_PROCESS}/signal", on(self._signal)),
            web.post(f"{_PROCESS}/size", on(self._resize)),
        ]

    async def _exec(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Exec)
        if body.exec_id is None:
            return _result(await sandbox.exec(**body.model_dump()))
        if Feature.EXEC_ID not in self._registry.provider.features:
            raise Unsupported("the server's provider does not support exec_id: omit it, and do not repeat the request")
        # A repeated request waits for the first run, which continues without its client.
        return _result(await asyncio.shield(self._registry.tasks.share(sandbox.exec(**body.model_dump()))))

    async def _spawn(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Spawn)

        async def start() -> Process:
            size = body.terminal
            terminal = None if size is None else TerminalSize(rows=size.rows, columns=size.columns)
            return await sandbox.spawn(
                body.command,
                user=body.user,
                env=body.env,
                cwd=body.cwd,
                stdin=body.stdin,
                terminal=terminal,
                timeout_s=body.timeout_s,
            )

        kept = await self._processes.spawn(row.id, body.spawn_id, start)
        return {"pid": kept.process.pid}

    async def _find(self, request: web.Request, row: LeasedSandbox) -> BufferedProcess:
        return await self._processes.find(row.id, request.match_info["spawn_id"])

    async def _output(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        after = whole_number(request, "after", 1 << 60)
        pieces, ended = await (await self._find(request, row)).window.after(after, LONGEST_POLL_S)
        encoded = [[piece.stream.value, base64.b64encode(piece.data).decode()] for piece in pieces]
        return {"pieces": encoded, "ended": ended}

    async def _end(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        return {"exit_code": await (await self._find(request, row)).wait(LONGEST_POLL_S)}

    async def _stdin(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Stdin)
        kept = await self._find(request, row)
        # A cancelled write could not be continued, because the number of written bytes would be unknown.
        return {"taken": await asyncio.shield(self._registry.tasks.share(kept.write_stdin(body.offset, body.data)))}

    async def _close_stdin(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        await (await self._find(request, row)).process.close_stdin()
        return {}

    async def _signal(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Signal)
        await (await self._find(request, row)).process.signal(body.number)
        return {}

    async def _resize(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Size)
        await (await self._find(request, row)).process.resize(TerminalSize(rows=body.rows, columns=body.columns))
        return {}


def _result(result: ExecResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "stdout": base64.b64encode(result.stdout).decode(),
        "stderr": base64.b64encode(result.stderr).decode(),
        "truncated": result.truncated,
        "duration_s": result.duration_s,
    }
