"""Commands of local sandboxes beyond a plain exec: spawned commands, terminals, and commands with an `exec_id`."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.sandboxes.base import Process, Sandbox, SandboxSpec, Stream, TerminalSize
from headrace.sandboxes.errors import (
    ExecResultLost,
    ExecTimeout,
    SandboxFileError,
    SandboxGone,
    SpecRefused,
)
from headrace.sandboxes.local import process
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = pytest.mark.namespaces


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with LocalProvider() as provider:
        yield await provider.attach(await provider.create(SandboxSpec()))


async def everything(process: Process) -> dict[Stream, bytes]:
    found: dict[Stream, bytes] = {}
    async for piece in process.output():
        found[piece.stream] = found.get(piece.stream, b"") + piece.data
    return found


async def until(process: Process, text: bytes) -> bytes:
    """Read until `text` is printed; the rest of the output can be read afterwards."""
    found = b""
    async for piece in process.output():
        found += piece.data
        if text in found:
            break
    return found


async def test_a_program_and_its_arguments_need_no_quoting(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["printf", "%s|", "a b", "$HOME", "'"], user="agent")
    assert await everything(process) == {Stream.STDOUT: b"a b|$HOME|'|"}


async def test_a_missing_program_exits_with_126(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["no-such-program"])
    assert b"No such file" in (await everything(process))[Stream.STDERR]
    assert await process.wait() == 126


async def test_standard_input_can_be_written_interactively(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("while read line; do echo got $line; done; echo end", stdin=True)
    await process.write_stdin(b"one\n")
    assert await until(process, b"\n") == b"got one\n"
    await process.write_stdin(b"two\n")
    await process.close_stdin()
    await process.close_stdin()
    assert await everything(process) == {Stream.STDOUT: b"got two\nend\n"}
    with pytest.raises(SandboxFileError):
        await process.write_stdin(b"three\n")


async def test_standard_input_is_empty_by_default(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("cat; echo end")
    assert await everything(process) == {Stream.STDOUT: b"end\n"}


async def test_large_input_and_output_do_not_deadlock(sandbox: Sandbox) -> None:
    data = os.urandom(4 << 20)
    process = await sandbox.spawn(["cat"], stdin=True)

    async def feed() -> None:
        await process.write_stdin(data)
        await process.close_stdin()

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        output = group.create_task(everything(process))
    assert output.result()[Stream.STDOUT] == data


async def test_a_command_that_does_not_read_blocks_the_writer_until_it_ends(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("read -n 1; exit 3", stdin=True)
    with pytest.raises(SandboxFileError):
        await process.write_stdin(b"x" * (4 << 20))
    assert await process.wait() == 3


async def test_a_command_blocks_while_nobody_reads_its_output(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("head -c 10000000 /dev/zero; echo done > /tmp/done")
    assert (await sandbox.exec("cat /tmp/done", timeout_s=30)).exit_code != 0
    assert len((await everything(process))[Stream.STDOUT]) == 10_000_000
    assert await process.wait() == 0


async def test_signals_reach_the_command(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("trap 'echo caught; exit 5' USR1; echo ready; while :; do read -t 0.05 <> <(:); done")
    await until(process, b"ready\n")
    await process.signal(signal.SIGUSR1)
    assert await everything(process) == {Stream.STDOUT: b"caught\n"}
    assert await process.wait() == 5
    await process.signal(signal.SIGUSR1)


async def test_sigkill_kills_the_process_tree(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("setsid sleep 1000 & echo ready; wait")
    await until(process, b"ready\n")
    await process.signal(signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    await everything(process)
    assert (await sandbox.exec("while pgrep sleep; do :; done", timeout_s=30)).exit_code == 0
    with pytest.raises(SpecRefused):
        await (await sandbox.spawn("sleep 1000")).signal(1000)


async def test_a_daemon_delays_the_end_of_output_by_the_grace_period_only(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("setsid sleep 1000 & echo started")
    assert await everything(process) == {Stream.STDOUT: b"started\n"}
    assert (await sandbox.exec("pgrep sleep", timeout_s=30)).exit_code == 0


async def test_a_spawned_command_fails_when_its_sandbox_dies(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 1000")
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await process.wait()
    assert await everything(process) == {}
    with pytest.raises(SandboxGone):
        await sandbox.spawn("true")


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_descriptors_are_released(sandbox: Sandbox) -> None:
    async def once(*, stdin: bool, terminal: TerminalSize | None) -> None:
        process = await sandbox.spawn("echo something", stdin=stdin, terminal=terminal)
        await process.wait()

    await once(stdin=True, terminal=None)
    gc.collect()
    before = open_descriptors()
    for _ in range(5):
        await once(stdin=True, terminal=None)
        await once(stdin=False, terminal=TerminalSize())
    gc.collect()
    assert open_descriptors() <= before


async def test_a_terminal_can_be_written_read_and_resized(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["bash", "-i"], user="agent", terminal=TerminalSize(rows=33, columns=77))
    await process.write_stdin(b"tty; stty size; echo $TERM; echo mark-$((40 + 2))\n")
    shown = await until(process, b"mark-42")
    assert b"/dev/pts/" in shown
    assert b"33 77" in shown
    assert b"xterm" in shown
    await process.resize(TerminalSize(rows=11, columns=22))
    await process.write_stdin(b"stty size; echo mark-$((40 + 3))\n")
    assert b"11 22" in await until(process, b"mark-43")
    await process.write_stdin(b"sh -c 'echo mark-$((40 + 4)); exec cat'\n")
    await until(process, b"mark-44")
    # Ctrl-D goes to the foreground program: readline accepts it only while it waits for a line.
    await process.close_stdin()
    await process.write_stdin(b"sh -c 'echo mark-$((40 + 5)); exec sleep 1000'\n")
    await until(process, b"mark-45")
    await process.write_stdin(b"\x03")
    await until(process, b"$ ")
    await process.write_stdin(b"exit 9\n")
    await everything(process)
    assert await process.wait() == 9


async def test_one_sandbox_cannot_use_up_all_terminals() -> None:
    opening = "import os\nfor number in range(200): os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)"
    async with LocalProvider() as provider:
        greedy, other = [await provider.attach(await provider.create(SandboxSpec())) for _ in range(2)]
        result = await greedy.exec("python3 -", stdin=opening.encode(), user="agent", timeout_s=30)
        assert b"No space left" in result.stderr
        assert await (await other.spawn("true", terminal=TerminalSize())).wait() == 0


STOP_WHOEVER_COMES = """
import os, signal
os.fork()
print("ready", flush=True)
while True:
    with open("/proc/sys/kernel/ns_last_pid") as file:
        last = int(file.read())
    for pid in range(last, last + 8):
        try:
            os.kill(pid, signal.SIGSTOP)
        except OSError:
            pass
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="on one processor the attacker never runs while a command starts")
async def test_a_terminal_that_never_opens_does_not_block(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TERMINAL_TIMEOUT_S", 0.5)
    stopping = await sandbox.spawn(["python3", "-c", STOP_WHOEVER_COMES])
    await anext(stopping.output())
    async with asyncio.timeout(60):
        with pytest.raises(ExecTimeout):
            while True:
                await sandbox.spawn("true", terminal=TerminalSize())


async def test_a_pipe_cannot_be_resized(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("true")
    with pytest.raises(SpecRefused):
        await process.resize(TerminalSize())


# A command that runs once


async def test_the_same_exec_id_returns_the_first_result(sandbox: Sandbox) -> None:
    command = "echo run >> /tmp/runs; cat /tmp/runs; echo bad >&2; exit 4"
    first = await sandbox.exec(command, timeout_s=30, exec_id="a")
    again = await sandbox.exec(command, timeout_s=30, exec_id="a")
    assert again == first
    assert (first.exit_code, first.stdout, first.stderr) == (4, b"run\n", b"bad\n")
    other = await sandbox.exec(command, timeout_s=30, exec_id="b")
    assert other.stdout == b"run\nrun\n"


async def test_a_repeated_exec_id_waits_for_the_running_command(sandbox: Sandbox) -> None:
    async with LocalProvider() as elsewhere, asyncio.TaskGroup() as group:
        other = await elsewhere.attach(sandbox._ref)
        command = "echo run >> /tmp/runs; until [ -e /tmp/go ]; do read -t 0.01 <> <(:); done; cat /tmp/runs"
        first = group.create_task(sandbox.exec(command, timeout_s=30, exec_id="a"))
        while (await sandbox.exec("cat /tmp/runs", timeout_s=30)).exit_code != 0:
            pass
        second = group.create_task(other.exec(command, timeout_s=30, exec_id="a"))
        await other.exec("touch /tmp/go", timeout_s=30)
    assert first.result() == second.result()
    assert first.result().stdout == b"run\n"


async def test_a_cancelled_exec_id_is_not_run_again(sandbox: Sandbox) -> None:
    command = "echo run >> /tmp/runs; sleep 1000"
    running = asyncio.ensure_future(sandbox.exec(command, timeout_s=30, exec_id="a"))
    while (await sandbox.exec("cat /tmp/runs", timeout_s=30)).exit_code != 0:
        pass
    running.cancel()
    with pytest.raises(ExecResultLost):
        await sandbox.exec(command, timeout_s=30, exec_id="a")
    assert (await sandbox.exec("cat /tmp/runs", timeout_s=30)).stdout == b"run\n"


async def test_a_repeated_exec_id_returns_the_first_timeout(sandbox: Sandbox) -> None:
    for _ in range(2):
        with pytest.raises(ExecTimeout):
            await sandbox.exec("echo run >> /tmp/runs; sleep 1000", timeout_s=2, exec_id="a")
    assert (await sandbox.exec("cat /tmp/runs", timeout_s=30)).stdout == b"run\n"


async def test_a_repeated_exec_id_does_not_wait_for_a_cancelled_caller(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon holds the output, so that the first caller still waits when its command has ended."""
    monkeypatch.setattr("headrace.sandboxes.local.sandbox.OUTPUT_GRACE_S", 60)
    first = asyncio.create_task(sandbox.exec("sleep 1000 & echo > /tmp/ended", timeout_s=30, exec_id="one"))
    await sandbox.exec("until [ -e /tmp/ended ]; do :; done", timeout_s=30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ExecResultLost):
        await sandbox.exec("true", timeout_s=5, exec_id="one")
    assert (await sandbox.exec("true", timeout_s=5, exec_id="two")).exit_code == 0


async def test_commands_whose_old_results_were_dropped_are_never_run_again(sandbox: Sandbox) -> None:
    for number in range(40):
        await sandbox.exec("echo run >> /tmp/runs", timeout_s=30, exec_id=str(number))
    with pytest.raises(ExecResultLost):
        await sandbox.exec("echo run >> /tmp/runs", timeout_s=30, exec_id="0")
    await sandbox.exec("echo run >> /tmp/runs", timeout_s=30, exec_id="39")
    assert (await sandbox.exec("wc -l < /tmp/runs", timeout_s=30)).stdout == b"40\n"


async def test_a_large_file_is_written_from_disk(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(1 << 20) * 24)
    await sandbox.write("/tmp/deep/large", source, user="agent")
    expected = hashlib.sha256(source.read_bytes()).hexdigest()
    result = await sandbox.exec("sha256sum /tmp/deep/large; stat -c %U /tmp/deep/large", timeout_s=30)
    assert result.stdout.decode().split() == [expected, "/tmp/deep/large", "agent"]
