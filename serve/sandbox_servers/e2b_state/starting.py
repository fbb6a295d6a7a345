"""Start command of a template, which runs when a sandbox of the template has booted.

Invariant: the start command is a command like a client's: it is listed, its output can be followed, and it ends with
its sandbox.
"""

from __future__ import annotations

import asyncio

from headrace.sandboxes.errors import BootTimeout, ExecTimeout
from headrace.sandboxes.images.builder import is_check, wait_until_ready
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b_state.errors import RpcError
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox
from headrace.serve.sandbox_servers.e2b_state.processes import CommandRequest, RunningCommand


async def start_template(live: LiveSandbox, tasks: ServerTasks, ready_s: float) -> None:
    """Run the start command and wait until the ready command succeeds, unless that only sleeps. Raises BootTimeout if
    it does not within `ready_s`, SandboxError."""
    row = live.row
    try:
        account = await live.accounts.find("")
    except RpcError as error:
        raise BootTimeout(f"the template's user: {error.message}") from error
    folder, env = row.folder or account.folder, {**row.base_env, **row.env}
    if row.start_command:
        command = CommandRequest(program="/bin/bash", arguments=("-l", "-c", row.start_command), tag="start_cmd")
        words = [command.program, *command.arguments]
        process = await live.handle.spawn(words, user=account.name, env=env, cwd=folder)
        running = RunningCommand(command, process, row.id)
        live.processes.add(running)
        live.note(f"start command started: {row.start_command[:200]}")
        tasks.start(running.follow())
    if is_check(row.ready_command):
        try:
            async with asyncio.timeout(ready_s):
                await wait_until_ready(live.handle, row.ready_command, ready_s, user=account.name, env=env, cwd=folder)
        except (TimeoutError, ExecTimeout) as error:
            text = f"the template's ready command did not succeed within {ready_s:g} s: {row.ready_command[:200]}"
            raise BootTimeout(text) from error
