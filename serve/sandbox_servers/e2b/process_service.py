"""envd's service `process.Process`, which starts commands, follows their output, writes to them and ends them.

Invariants: a command ends on its own, because of a signal, at the `Connect-Timeout-Ms` of its Start request, or with
its sandbox, but not when its client disconnects. A slow client slows only the command whose output it follows.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
from typing import Any, Final

from aiohttp import web

from headrace.sandboxes.base import Stream, TerminalSize
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b.connect_protocol import Message, ResponseStream, read_frames, read_single
from headrace.serve.sandbox_servers.e2b.envd import Call, Envd
from headrace.serve.sandbox_servers.e2b_state.bodies import check_environment
from headrace.serve.sandbox_servers.e2b_state.errors import Code, RpcError
from headrace.serve.sandbox_servers.e2b_state.processes import CommandRequest, OutputReader, RunningCommand

_CHECK_TIMEOUT_S: Final = 30.0
_FIELDS: Final = {Stream.STDOUT: "stdout", Stream.STDERR: "stderr", Stream.TERMINAL: "pty"}
_SIGNALS: Final = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
_KEEPALIVE: Final[Message] = {"event": {"keepalive": {}}}
_MAX_SIDE: Final = 4096


class ProcessService:
    """Handlers for the service."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks

    def routes(self, envd: Envd) -> list[web.RouteDef]:
        def route(name: str, handler: Any) -> web.RouteDef:
            return web.post(f"/process.Process/{name}", handler)

        return [
            route("Start", envd.streaming(self._start)),
            route("Connect", envd.streaming(self._connect)),
            route("StreamInput", envd.streaming(self._stream_input)),
            route("List", envd.unary(self._list)),
            route("SendInput", envd.unary(self._send_input)),
            route("SendSignal", envd.unary(self._send_signal)),
            route("CloseStdin", envd.unary(self._close_stdin)),
            route("Update", envd.unary(self._update)),
        ]

    async def _start(self, call: Call, stream: ResponseStream) -> None:
        until = None if call.timeout_s is None else asyncio.get_running_loop().time() + call.timeout_s
        message = await read_single(call.request)
        command = parse_command(message)
        account = await call.account()
        folder = (call.live.row.folder or account.folder) if command.cwd is None else account.resolve(command.cwd)
        if command.cwd is not None:
            check = f"test -d {shlex.quote(folder)}"
            found = await call.live.handle.exec(check, user=account.name, cwd="/", timeout_s=_CHECK_TIMEOUT_S)
            if found.exit_code != 0:
                raise RpcError(Code.INVALID_ARGUMENT, f"cwd {folder!r} does not exist")
        process = await call.live.handle.spawn(
            [command.program, *command.arguments],
            user=account.name,
            env={**call.live.row.base_env, **call.live.row.env, **command.env},
            cwd=folder,
            stdin=not command.terminal and message.get("stdin") is not False,
            terminal=_size(message["pty"]) if command.terminal else None,
            timeout_s=call.timeout_s,
        )
        if process.pid == 0:
            text = b"".join([piece.data async for piece in process.output()]).decode(errors="replace").strip()
            raise RpcError(Code.RESOURCE_EXHAUSTED, text or "the sandbox could not start a process")
        running = RunningCommand(command, process, call.live.row.id)
        call.live.processes.add(running)
        call.live.note(f"process {running.pid} started: {command.program[:200]} {' '.join(command.arguments)[:200]}")
        async with running.log.reader() as reader, asyncio.timeout_at(until):
            self._tasks.start(self._follow(call, running))
            await stream.open()
            await self._send_events(call, stream, running, reader)

    async def _follow(self, call: Call, running: RunningCommand) -> None:
        await running.follow()
        dropped = f", {running.log.dropped_bytes} bytes of output unread" if running.log.dropped_bytes else ""
        how = running.failure.message if running.failure else f"exit code {running.exit_code}"
        call.live.note(f"process {running.pid} ended: {how}{dropped}")

    async def _connect(self, call: Call, stream: ResponseStream) -> None:
        message = await read_single(call.request)
        running = call.live.processes.find(message.get("process"), ended=True)
        await stream.open()
        async with asyncio.timeout(call.timeout_s), running.log.reader() as reader:
            await self._send_events(call, stream, running, reader)

    async def _send_events(
        self, call: Call, stream: ResponseStream, running: RunningCommand, reader: OutputReader
    ) -> None:
        await stream.send({"event": {"start": {"pid": running.pid}}})
        while True:
            try:
                async with asyncio.timeout(call.keepalive_s):
                    piece = await reader.next()
            except TimeoutError:
                await stream.send(_KEEPALIVE)
                continue
            if piece is None:
                break
            data = base64.b64encode(piece.data).decode("ascii")
            await stream.send({"event": {"data": {_FIELDS[piece.stream]: data}}})
        if running.failure is not None:
            raise running.failure
        await stream.send({"event": {"end": running.end_event()}})

    async def _list(self, call: Call, message: Message) -> Message:
        return {
            "processes": [
                {"config": one.command.to_json(), "pid": one.pid, **({"tag": tag} if (tag := one.command.tag) else {})}
                for one in call.live.processes.running()
            ]
        }

    async def _send_input(self, call: Call, message: Message) -> Message:
        running = call.live.processes.find(message.get("process"))
        await _write(running, message.get("input"))
        return {}

    async def _stream_input(self, call: Call, stream: ResponseStream) -> None:
        running: RunningCommand | None = None
        async with asyncio.timeout(call.timeout_s):
            async for message in read_frames(call.request):
                if (start := message.get("start")) is not None:
                    running = call.live.processes.find(_object(start).get("process"))
                elif (data := message.get("data")) is not None:
                    if running is None:
                        raise RpcError(Code.INVALID_ARGUMENT, "the stream must begin with a start event")
                    await _write(running, _object(data).get("input"))
        await stream.open()
        await stream.send({})

    async def _send_signal(self, call: Call, message: Message) -> Message:
        name = message.get("signal", 0)
        if not isinstance(name, str | int):
            raise RpcError(Code.INVALID_ARGUMENT, "signal: must be a name or a number")
        number = _SIGNALS.get(name)
        if number is None:
            raise RpcError(Code.UNIMPLEMENTED, f"signal {name!r}: only SIGTERM and SIGKILL are supported")
        await call.live.processes.find(message.get("process")).signal(number)
        return {}

    async def _close_stdin(self, call: Call, message: Message) -> Message:
        running = call.live.processes.find(message.get("process"))
        if running.command.terminal:
            raise RpcError(Code.FAILED_PRECONDITION, "cannot close stdin of a terminal: send Ctrl+D (0x04) instead")
        await running.process.close_stdin()
        return {}

    async def _update(self, call: Call, message: Message) -> Message:
        running = call.live.processes.find(message.get("process"))
        if (pty := message.get("pty")) is not None:
            if not running.command.terminal:
                raise RpcError(Code.FAILED_PRECONDITION, "this process has no terminal")
            await running.process.resize(_size(pty))
        return {}


def parse_command(message: Message) -> CommandRequest:
    """Parse the command of a StartRequest. Raises RpcError."""
    config = _object(message.get("process"))
    program, arguments, env, cwd = (config.get(name) for name in ("cmd", "args", "envs", "cwd"))
    tag = message.get("tag")
    if not isinstance(program, str) or not program:
        raise RpcError(Code.INVALID_ARGUMENT, "process.cmd: must be the name of a program")
    if not isinstance(arguments or [], list) or not _all_texts(arguments or []):
        raise RpcError(Code.INVALID_ARGUMENT, "process.args: must be a list of strings without NUL bytes")
    if not isinstance(env or {}, dict) or not _all_texts([*(env or {}), *(env or {}).values()]):
        raise RpcError(Code.INVALID_ARGUMENT, "process.envs: must be an object with strings without NUL bytes")
    try:
        check_environment(env or {})
    except ValueError as error:
        raise RpcError(Code.INVALID_ARGUMENT, f"process.envs: {error}") from error
    if not isinstance(cwd, str | None) or not isinstance(tag, str | None):
        raise RpcError(Code.INVALID_ARGUMENT, "process.cwd and tag: must be strings")
    return CommandRequest(
        program=program,
        arguments=tuple(arguments or ()),
        env=dict(env or {}),
        cwd=cwd or None,
        tag=tag,
        terminal=message.get("pty") is not None,
    )


def _all_texts(values: Any) -> bool:
    return all(isinstance(value, str) and "\0" not in value for value in values)


def _object(value: object) -> Message:
    if not isinstance(value, dict):
        raise RpcError(Code.INVALID_ARGUMENT, "a part of the message is missing or not an object")
    return value


def _size(pty: object) -> TerminalSize:
    size = _object(_object(pty).get("size"))
    rows, columns = size.get("rows", 24), size.get("cols", 80)
    if not all(isinstance(side, int) and 1 <= side <= _MAX_SIDE for side in (rows, columns)):
        raise RpcError(Code.INVALID_ARGUMENT, f"pty.size: rows and cols must be from 1 to {_MAX_SIDE}")
    return TerminalSize(rows=rows, columns=columns)


async def _write(running: RunningCommand, value: object) -> None:
    wanted = "pty" if running.command.terminal else "stdin"
    given = _object(value)
    if wanted not in given:
        raise RpcError(Code.FAILED_PRECONDITION, f"input for this process goes to {wanted}")
    try:
        data = base64.b64decode(given[wanted], validate=True)
    except (TypeError, ValueError) as error:
        raise RpcError(Code.INVALID_ARGUMENT, f"input.{wanted}: not base64") from error
    await running.process.write_stdin(data)
