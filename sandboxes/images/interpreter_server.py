"""The code interpreter's server, which runs inside a sandbox and speaks the routes of E2B's SDKs on port 49999.

It is copied into an image and run by that image's Python with ipykernel and its dependencies (tornado, jupyter_client);
nothing of headrace is there.

Invariants:
- A context is one kernel. Its executions run one after another; each streams its messages as lines of JSON.
- An execution whose client leaves is interrupted, so that the next one does not wait for it.
- A kernel that dies ends its execution with an error, and is started again for the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import tornado.iostream
import tornado.web
from jupyter_client.manager import AsyncKernelManager

PORT = 49999
DEFAULT = "default"
HOME = os.environ.get("HOME", "/")
MAX_CONTEXTS = 32
MAX_BODY_BYTES = 32 << 20
START_S = 60.0
LOOK_S = 0.5
LANGUAGES = ("python", "python3")
# Fields of a result by the type of its data; other types are in `extra`.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
SET_VARIABLES = """import os as _os
_before = {name: _os.environ.get(name) for name in %(names)r}
_os.environ.update(%(values)r)
"""
RESTORE_VARIABLES = """for _name, _value in _before.items():
    _os.environ.pop(_name, None) if _value is None else _os.environ.update({_name: _value})
del _before
"""


class Refused(Exception):
    """A request that is refused with a status and a text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Context:
    """One kernel with its client."""

    def __init__(self, context_id: str, cwd: str) -> None:
        self.id = context_id
        self.cwd = cwd
        self._manager: Any = None
        self._client: Any = None
        self._turn = asyncio.Lock()

    def to_json(self) -> dict[str, str]:
        return {"id": self.id, "language": "python", "cwd": self.cwd}

    async def start(self) -> None:
        self._manager = AsyncKernelManager(kernel_name="python3")
        await self._manager.start_kernel(cwd=self.cwd)
        await self._connect()

    async def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        await self._client.wait_for_ready(timeout=START_S)

    async def restart(self) -> None:
        """Start the kernel anew; a running execution ends with an error."""
        client, self._client = self._client, None
        if client is not None:
            client.stop_channels()
        await self._manager.restart_kernel(now=True)
        await self._connect()

    async def stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        await self._manager.shutdown_kernel(now=True)

    async def execute(self, code: str, variables: dict[str, str], send: Any, left: asyncio.Event) -> None:
        """Run code; `send(message)` gets each message. Once `left` is set, nobody wants the rest: the code is
        interrupted before the next execution has its turn."""
        async with self._turn:
            if left.is_set():
                return
            if not await self._manager.is_alive():
                await self.restart()
            if variables:
                await self._quietly(SET_VARIABLES % {"names": list(variables), "values": variables})
            try:
                await self._run(code, send, left)
            finally:
                if variables and self._client is not None and await self._manager.is_alive():
                    await self._quietly(RESTORE_VARIABLES)

    async def _quietly(self, code: str) -> None:
        done = self._client.execute(code, silent=True, store_history=False)
        while (await self._client.get_shell_msg(timeout=START_S))["parent_header"].get("msg_id") != done:
            pass

    async def _run(self, code: str, send: Any, left: asyncio.Event) -> None:
        client, interrupted = self._client, False
        asked = client.execute(code, store_history=True, allow_stdin=False)
        while True:
            if left.is_set() and not interrupted:
                interrupted = True
                await self._manager.interrupt_kernel()
            try:
                message = await client.get_iopub_msg(timeout=LOOK_S)
            except Exception:  # noqa: BLE001 - the queue's own Empty, or a channel that a restart has closed
                if self._client is not client or not await self._manager.is_alive():
                    await send(
                        {"type": "error", "name": "KernelDied", "value": "the kernel has ended", "traceback": ""}
                    )
                    return
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                stamp = int(message["header"]["date"].timestamp() * 1e9)
                await send({"type": content["name"], "text": content["text"], "timestamp": stamp})
            elif kind in ("execute_result", "display_data"):
                await send(result(content["data"], is_main=kind == "execute_result"))
            elif kind == "error":
                traceback = "\n".join(content["traceback"])
                named = {"name": content["ename"], "value": content["evalue"], "traceback": traceback}
                await send({"type": "error", **named})
            elif kind == "execute_input":
                await send({"type": "number_of_executions", "execution_count": content["execution_count"]})
            elif kind == "status" and content["execution_state"] == "idle":
                return


def result(data: dict[str, Any], *, is_main: bool) -> dict[str, Any]:
    """A result message: its data by field."""
    found: dict[str, Any] = {"type": "result", "is_main_result": is_main}
    extra = {kind: value for kind, value in data.items() if kind not in FIELDS}
    found.update({FIELDS[kind]: value for kind, value in data.items() if kind in FIELDS})
    text = found.get("text")
    # A string's representation is shown without its quotes, as by E2B.
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == "'":
        found["text"] = text[1:-1]
    return {**found, "extra": extra} if extra else found


class Contexts:
    """All contexts; the default one is started with the server."""

    def __init__(self) -> None:
        self._contexts: dict[str, Context] = {}

    async def create(self, context_id: str, language: str, cwd: str) -> Context:
        if language not in LANGUAGES:
            raise Refused(400, f"language {language[:40]!r} is unsupported by this server: it has python only")
        if not await asyncio.to_thread(Path(cwd).is_dir):
            raise Refused(400, f"cwd {cwd[:200]!r} does not exist")
        if len(self._contexts) >= MAX_CONTEXTS:
            raise Refused(429, f"{MAX_CONTEXTS} contexts exist: remove one")
        context = self._contexts[context_id] = Context(context_id, cwd)
        try:
            await context.start()
        except BaseException:
            del self._contexts[context_id]
            raise
        return context

    def get(self, context_id: str) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise Refused(404, f"Context {context_id[:100]} not found")
        return context

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    async def remove(self, context_id: str) -> None:
        context = self.get(context_id)
        del self._contexts[context_id]
        await context.stop()


class Handler(tornado.web.RequestHandler):  # type: ignore[misc]
    """Base of all handlers: refusals are texts with a status."""

    def initialize(self, contexts: Contexts) -> None:
        self.contexts = contexts

    def body(self) -> dict[str, Any]:
        try:
            found = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise Refused(400, "the body is not a JSON object")
        return found

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, Refused):
            self.set_status(error.status)
        self.finish(str(error) if isinstance(error, Refused) else "internal error of the code interpreter")


class Health(Handler):
    def get(self) -> None:
        self.finish('"OK"')


class Execute(Handler):
    def initialize(self, contexts: Contexts) -> None:
        super().initialize(contexts)
        self.left = asyncio.Event()

    async def post(self) -> None:
        body = self.body()
        code, variables = body.get("code"), body.get("env_vars") or {}
        if not isinstance(code, str) or not isinstance(variables, dict):
            raise Refused(400, "code: must be a string, and env_vars an object")
        language = body.get("language") or "python"
        if language not in LANGUAGES:
            raise Refused(400, f"language {str(language)[:40]!r} is unsupported by this server: it has python only")
        context = self.contexts.get(str(body.get("context_id") or DEFAULT))
        self.set_header("Content-Type", "application/x-ndjson")

        async def send(message: dict[str, Any]) -> None:
            if not self.left.is_set():
                try:
                    self.write(json.dumps(message) + "\n")
                    await self.flush()
                except tornado.iostream.StreamClosedError:
                    self.left.set()

        variables = {str(name): str(value) for name, value in variables.items()}
        await context.execute(code, variables, send, self.left)

    def on_connection_close(self) -> None:
        self.left.set()


class AllContexts(Handler):
    async def get(self) -> None:
        self.finish(json.dumps([context.to_json() for context in self.contexts.all()]))

    async def post(self) -> None:
        body = self.body()
        language, cwd = str(body.get("language") or "python"), str(body.get("cwd") or HOME)
        context = await self.contexts.create(str(uuid.uuid4()), language, cwd)
        self.finish(json.dumps(context.to_json()))


class OneContext(Handler):
    async def delete(self, context_id: str) -> None:
        await self.contexts.remove(context_id)
        self.set_status(204)


class Restart(Handler):
    async def post(self, context_id: str) -> None:
        await self.contexts.get(context_id).restart()
        self.set_status(204)


async def main() -> None:
    contexts = Contexts()
    await contexts.create(DEFAULT, "python", HOME)
    shared = {"contexts": contexts}
    application = tornado.web.Application(
        [
            ("/health", Health, shared),
            ("/execute", Execute, shared),
            ("/contexts", AllContexts, shared),
            ("/contexts/([^/]+)", OneContext, shared),
            ("/contexts/([^/]+)/restart", Restart, shared),
        ]
    )
    application.listen(PORT, "127.0.0.1", max_body_size=MAX_BODY_BYTES)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    for context in contexts.all():
        await context.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
