"""Scenarios of a user of the e2b SDK, as a program: `python e2b_scenarios.py URL sync|async FEATURES`.

It runs under any version of the SDK on its path, with the blocking or the asyncio client, and prints one JSON object:
for each scenario "ok", "absent" (this SDK has no such call), or the traceback of what went wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import e2b
import httpcore
import httpx

Scenario = Callable[["Client"], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


class AbsentError(Exception):
    """This version of the SDK lacks the call."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


async def done(value: Any) -> Any:
    """Return the result of a call of either client."""
    return await value if inspect.isawaitable(value) else value


class Client:
    """One of the two clients, connected to the server."""

    def __init__(self, url: str, mode: str, features: set[str]) -> None:
        self.url = url
        self.blocking = mode == "sync"
        self.features = features
        self.kind = e2b.Sandbox if self.blocking else e2b.AsyncSandbox
        self.options = {"api_url": url, "sandbox_url": url, "api_key": "e2b_" + "0" * 40}
        self.made: list[Any] = []

    async def create(self, **settings: Any) -> Any:
        sandbox = await done(self.kind.create(**settings, **self.options))
        self.made.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.made:
            await done(sandbox.kill())


async def refused(call: Any, *kinds: type[BaseException]) -> Any:
    """Return the error of a call that must fail with one of `kinds`."""
    try:
        result = await done(call() if callable(call) else call)
    except kinds as error:
        return error
    raise AssertionError(f"no error, but {result!r}")


def same(found: object, wanted: object) -> None:
    assert found == wanted, f"{found!r} is not {wanted!r}"


@scenario
async def created_sandbox_tells_about_itself(client: Client) -> None:
    sandbox = await client.create(metadata={"team": "a b&c=d", "n": "1"}, envs={"A": "1"}, timeout=120)
    info = await done(sandbox.get_info())
    same(info.sandbox_id, sandbox.sandbox_id)
    same(info.metadata, {"team": "a b&c=d", "n": "1"})
    same(info.state, e2b.SandboxState.RUNNING)
    same(round((info.end_at - info.started_at).total_seconds()), 120)
    same(await done(sandbox.is_running()), True)


@scenario
async def commands_run(client: Client) -> None:
    sandbox = await client.create(envs={"A": "1", "B": "2"})
    result = await done(sandbox.commands.run('echo "$A$B$C"; echo oops >&2; pwd; id -un', envs={"B": "x", "C": "3"}))
    same(result.stdout.split("\n"), ["1x3", "/home/user", "user", ""])
    same((result.stderr, result.exit_code, result.error or None), ("oops\n", 0, None))
    result = await done(sandbox.commands.run("id -un; pwd", user="root", cwd="/tmp"))
    same(result.stdout, "root\n/tmp\n")
    error = await refused(lambda: sandbox.commands.run("echo bad >&2; exit 3"), e2b.CommandExitException)
    same((error.exit_code, error.stderr), (3, "bad\n"))
    await refused(lambda: sandbox.commands.run("true", user="nobody-such"), e2b.AuthenticationException)
    await refused(lambda: sandbox.commands.run("true", cwd="/no/such"), e2b.InvalidArgumentException)
    result = await done(sandbox.commands.run("printf 'äöü€\\n'; head -c 3000000 /dev/zero | tr '\\0' x"))
    same((result.stdout[:5], len(result.stdout)), ("äöü€\n", 3000005))


@scenario
async def output_arrives_while_the_command_runs(client: Client) -> None:
    sandbox = await client.create()
    seen: list[str] = []
    command = "echo first; read line < /tmp/go; echo second >&2"
    await done(sandbox.commands.run("mkfifo /tmp/go"))
    if client.blocking:
        handle = sandbox.commands.run(command, background=True)
        for out, err, _ in handle:
            seen.append(out or err)
            if out == "first\n":
                sandbox.commands.run("echo > /tmp/go")
    else:
        arrived = asyncio.Event()

        def on_out(text: str) -> None:
            seen.append(text)
            arrived.set()

        handle = await sandbox.commands.run(command, background=True, on_stdout=on_out, on_stderr=seen.append)
        async with asyncio.timeout(20):
            await arrived.wait()
        await sandbox.commands.run("echo > /tmp/go")
    same((await done(handle.wait())).exit_code, 0)
    same(seen, ["first\n", "second\n"])


@scenario
async def background_commands_are_listed_and_killed(client: Client) -> None:
    sandbox = await client.create()
    handle = await done(sandbox.commands.run("sleep 61", background=True))
    [process] = await done(sandbox.commands.list())
    same((process.pid, process.cmd, process.args), (handle.pid, "/bin/bash", ["-l", "-c", "sleep 61"]))
    same(await done(sandbox.commands.kill(handle.pid)), True)
    error = await refused(lambda: handle.wait(), e2b.CommandExitException)
    same((error.exit_code, error.error), (-1, "signal: killed"))
    same(await done(sandbox.commands.kill(handle.pid)), False)
    same(await done(sandbox.commands.list()), [])
    same(await done(handle.kill()), False)
    left = await done(sandbox.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 6[1]' || true"))
    same(left.stdout, "0\n")


@scenario
async def standard_input_is_written_and_closed(client: Client) -> None:
    sandbox = await client.create()
    handle = await done(sandbox.commands.run("cat; echo end", background=True, stdin=True))
    await done(sandbox.commands.send_stdin(handle.pid, "one\n"))
    await done(sandbox.commands.send_stdin(handle.pid, "two\n"))
    if not hasattr(sandbox.commands, "close_stdin"):
        raise AbsentError
    await done(sandbox.commands.close_stdin(handle.pid))
    same((await done(handle.wait())).stdout, "one\ntwo\nend\n")
    await refused(lambda: sandbox.commands.send_stdin(handle.pid, "late"), e2b.NotFoundException)
    silent = await done(sandbox.commands.run("cat; echo empty"))
    same(silent.stdout, "empty\n")


@scenario
async def standard_input_is_streamed(client: Client) -> None:
    sandbox = await client.create()
    if not hasattr(sandbox.commands, "stream_input"):
        raise AbsentError
    handle = await done(sandbox.commands.run("head -n 500 | md5sum", background=True, stdin=True))
    lines = [f"line {number}\n" for number in range(500)]
    if client.blocking:
        sandbox.commands.stream_input(handle.pid, lines)
    else:
        async with sandbox.commands.stream_input(handle.pid) as stream:
            for line in lines:
                await stream.send(line)
    digest = hashlib.md5("".join(lines).encode(), usedforsecurity=False).hexdigest()
    same((await done(handle.wait())).stdout, f"{digest}  -\n")


@scenario
async def timeout_kills_the_whole_tree(client: Client) -> None:
    sandbox = await client.create()
    command = "(sleep 63 &) ; sleep 62"
    # 2.25's own timer may be quicker than the server's answer, and shows as its HTTP client's error.
    timeouts = (e2b.TimeoutException, httpcore.ReadTimeout)
    await refused(lambda: sandbox.commands.run(command, timeout=0.5), *timeouts)
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 6[23]' || true"
    async with asyncio.timeout(20):
        while (await done(sandbox.commands.run(look))).stdout != "0\n":
            continue
        while await done(sandbox.commands.list()):
            continue


@scenario
async def commands_outlive_their_client(client: Client) -> None:
    sandbox = await client.create()
    await done(sandbox.commands.run("mkfifo /tmp/go"))
    handle = await done(sandbox.commands.run("read x < /tmp/go; echo late; exit 5", background=True))
    await done(handle.disconnect())
    await done(sandbox.commands.run("echo > /tmp/go"))
    again = await done(sandbox.commands.connect(handle.pid))
    error = await refused(lambda: again.wait(), e2b.CommandExitException)
    same((error.exit_code, error.stdout), (5, "late\n"))
    await refused(lambda: sandbox.commands.connect(999_999), e2b.NotFoundException)


@scenario
async def exit_codes_are_kept_for_a_late_connect(client: Client) -> None:
    sandbox = await client.create()
    handle = await done(sandbox.commands.run("exit 7", background=True))
    async with asyncio.timeout(20):
        while await done(sandbox.commands.list()):
            continue
    again = await done(sandbox.commands.connect(handle.pid))
    same((await refused(lambda: again.wait(), e2b.CommandExitException)).exit_code, 7)


@scenario
async def files_are_written_and_read(client: Client) -> None:
    files = (sandbox := await client.create()).files
    info = await done(files.write("/tmp/a/b/c.txt", "text"))
    same((info.name, info.path), ("c.txt", "/tmp/a/b/c.txt"))
    same(await done(files.read("/tmp/a/b/c.txt")), "text")
    await done(files.write("bytes.bin", bytes(range(256))))
    same(bytes(await done(files.read("/home/user/bytes.bin", format="bytes"))), bytes(range(256)))
    await done(files.write("~/empty", ""))
    same(await done(files.read("/home/user/empty")), "")
    await done(files.write("/tmp/../tmp/ä €'\" .txt", "odd"))
    same(await done(files.read("/tmp/ä €'\" .txt")), "odd")
    written = await done(files.write_files([{"path": f"/tmp/many/{n}", "data": str(n)} for n in range(5)]))
    same([one.path for one in written], [f"/tmp/many/{n}" for n in range(5)])
    same(await done(files.read("/tmp/many/3")), "3")
    await done(files.write("/tmp/agents", "x", user="nobody"))
    same((await done(sandbox.commands.run("stat -c %U /tmp/agents"))).stdout, "nobody\n")
    missing = getattr(e2b, "FileNotFoundException", e2b.NotFoundException)
    await refused(lambda: files.read("/tmp/missing"), missing)
    await refused(lambda: files.read("/tmp/many"), e2b.InvalidArgumentException)
    await refused(lambda: files.write("/tmp/many", "x"), e2b.InvalidArgumentException)
    await refused(lambda: files.read("~other/x"), e2b.InvalidArgumentException)
    await refused(lambda: files.read("/etc/shadow", user="agent"), e2b.SandboxException)
    await refused(lambda: files.read("/tmp/agents", user="nobody-such"), e2b.AuthenticationException)


@scenario
async def large_files_are_streamed(client: Client) -> None:
    files = (await client.create()).files
    content = bytes(range(256)) * (12 << 12)
    await done(files.write("/tmp/large", io.BytesIO(content)))
    stream = await done(files.read("/tmp/large", format="stream"))
    digest = hashlib.sha256()
    if client.blocking:
        for part in stream:
            digest.update(part)
    else:
        async for part in stream:
            digest.update(part)
    same(digest.hexdigest(), hashlib.sha256(content).hexdigest())


@scenario
async def a_full_disk_is_told(client: Client) -> None:
    files = (await client.create()).files
    await refused(lambda: files.write("/tmp/huge", io.BytesIO(bytes(300 << 20))), e2b.NotEnoughSpaceException)


@scenario
async def signed_urls_open_one_file(client: Client) -> None:
    sandbox = await client.create()
    await done(sandbox.files.write("/tmp/signed", "content"))
    async with httpx.AsyncClient() as http:
        url = sandbox.download_url("/tmp/signed", use_signature_expiration=60)
        same((await http.get(url)).text, "content")
        same((await http.get(url.replace("signed", "other", 1))).status_code, 401)
        past = sandbox.download_url("/tmp/signed", use_signature_expiration=-60)
        same((await http.get(past)).status_code, 401)
        url = sandbox.upload_url("/tmp/up", user="agent")
        same((await http.post(url, files={"file": ("ignored", b"up")})).status_code, 200)
    same(await done(sandbox.files.read("/tmp/up")), "up")


@scenario
async def folders_are_listed_and_changed(client: Client) -> None:
    files = (sandbox := await client.create()).files
    same(await done(files.make_dir("/tmp/d/e")), True)
    same(await done(files.make_dir("/tmp/d/e")), False)
    await done(
        sandbox.commands.run("cd /tmp/d && printf 12345 > f && ln -s f link && chmod 640 f && printf x > e/deep")
    )
    entries = {entry.name: entry for entry in await done(files.list("/tmp/d"))}
    same(sorted(entries), ["e", "f", "link"])
    same((entries["e"].type, entries["f"].type), (e2b.FileType.DIR, e2b.FileType.FILE))
    same((entries["f"].size, entries["f"].mode, entries["f"].permissions), (5, 0o640, "-rw-r-----"))
    same((entries["f"].owner, entries["f"].group, entries["link"].symlink_target), ("user", "user", "f"))
    same([entry.path for entry in await done(files.list("/tmp/d", depth=2))][:2], ["/tmp/d/e", "/tmp/d/e/deep"])
    same((await done(files.get_info("/tmp/d/f"))).size, 5)
    same(await done(files.exists("/tmp/d/f")), True)
    same(await done(files.exists("/tmp/d/missing")), False)
    same((await done(files.rename("/tmp/d/f", "/tmp/new/g"))).path, "/tmp/new/g")
    await refused(lambda: files.rename("/tmp/d/f", "/tmp/new/g"), e2b.NotFoundException)
    await done(files.remove("/tmp/d"))
    await done(files.remove("/tmp/d"))
    same(await done(files.exists("/tmp/d")), False)
    await refused(lambda: files.list("/tmp/d"), e2b.NotFoundException)
    await refused(lambda: files.list("/tmp/new/g"), e2b.InvalidArgumentException)
    await refused(lambda: files.make_dir("/tmp/new/g"), e2b.InvalidArgumentException)
    await refused(lambda: files.make_dir("/usr/planted"), e2b.SandboxException)


@scenario
async def folders_are_watched(client: Client) -> None:
    files = (await client.create()).files
    await done(files.make_dir("/tmp/w/sub"))
    wanted = {("new", "create"), ("new", "write"), ("sub/deep", "create")}
    seen: set[tuple[str, str]] = set()
    if client.blocking:
        handle = files.watch_dir("/tmp/w", recursive=True)
    else:
        changed = asyncio.Event()

        def on_event(event: Any) -> None:
            seen.add((event.name, event.type.value))
            changed.set()

        handle = await files.watch_dir("/tmp/w", on_event=on_event, recursive=True)
    await done(files.write("/tmp/w/new", "x"))
    await done(files.make_dir("/tmp/w/sub/deep"))
    async with asyncio.timeout(20):
        while not wanted <= seen:
            if client.blocking:
                seen |= {(event.name, event.type.value) for event in handle.get_new_events()}
            else:
                await changed.wait()
                changed.clear()
    await done(handle.stop())
    await refused(lambda: files.watch_dir("/tmp/no", *([] if client.blocking else [print])), e2b.NotFoundException)


@scenario
async def terminals_work(client: Client) -> None:
    sandbox = await client.create()
    size = e2b.PtySize(rows=30, cols=100) if hasattr(e2b, "PtySize") else None
    if size is None:
        from e2b.sandbox.commands.command_handle import PtySize

        size = PtySize(rows=30, cols=100)
    seen = bytearray()
    question = b"stty size; echo $((40+2)).; tty >/dev/null && exit 9\n"
    if client.blocking:
        handle = sandbox.pty.create(size)
        sandbox.pty.send_stdin(handle.pid, question)
        for _, _, data in handle:
            seen += data or b""
        error = await refused(lambda: handle.wait(), e2b.CommandExitException)
    else:
        handle = await sandbox.pty.create(size, on_data=seen.extend)
        await sandbox.pty.send_stdin(handle.pid, question)
        error = await refused(lambda: handle.wait(), e2b.CommandExitException)
    same((error.exit_code, b"42." in seen, b"30 100" in seen), (9, True, True))
    handle = sandbox.pty.create(size) if client.blocking else await sandbox.pty.create(size, on_data=lambda _: None)
    await done(sandbox.pty.resize(handle.pid, type(size)(rows=10, cols=50)))
    terminal = (await done(sandbox.commands.run(f"until readlink /proc/{handle.pid}/fd/0; do :; done"))).stdout.strip()
    same((await done(sandbox.commands.run(f"stty size < {terminal}"))).stdout, "10 50\n")
    same(await done(sandbox.pty.kill(handle.pid)), True)


@scenario
async def sandboxes_are_listed_in_pages(client: Client) -> None:
    for number in range(3):
        await client.create(metadata={"page": f"{client.blocking} {version('e2b')}", "n": str(number)})
    query = e2b.SandboxQuery(metadata={"page": f"{client.blocking} {version('e2b')}"})
    pages = client.kind.list(query=query, limit=2, **client.options)
    found: list[str] = []
    sizes = []
    while pages.has_next:
        items = await done(pages.next_items())
        sizes.append(len(items))
        found += [item.sandbox_id for item in items]
    same(sizes, [2, 1])
    same(found, [sandbox.sandbox_id for sandbox in reversed(client.made)])
    query = e2b.SandboxQuery(metadata=query.metadata, state=[e2b.SandboxState.PAUSED])
    same(await done(client.kind.list(query=query, **client.options).next_items()), [])


@scenario
async def sandboxes_are_kept_and_killed(client: Client) -> None:
    sandbox = await client.create(timeout=60)
    await done(sandbox.set_timeout(600))
    info = await done(sandbox.get_info())
    same((info.end_at - info.started_at).total_seconds() >= 600, True)
    again = await done(client.kind.connect(sandbox.sandbox_id, timeout=60, **client.options))
    same((await done(again.commands.run("echo same"))).stdout, "same\n")
    same((await done(again.get_info())).end_at, info.end_at)
    same(await done(again.kill()), True)
    same(await done(sandbox.kill()), False)
    same(await done(sandbox.is_running()), False)
    await refused(lambda: sandbox.commands.run("true"), e2b.TimeoutException)
    await refused(lambda: sandbox.files.read("/tmp/x"), e2b.TimeoutException)
    await refused(lambda: sandbox.get_info(), e2b.NotFoundException)
    await refused(lambda: sandbox.set_timeout(10), e2b.NotFoundException)
    await refused(lambda: client.kind.connect(sandbox.sandbox_id, **client.options), e2b.NotFoundException)


@scenario
async def a_command_under_a_kill_ends(client: Client) -> None:
    sandbox = await client.create()
    handle = await done(sandbox.commands.run("sleep 64", background=True))
    await done(sandbox.kill())
    await refused(lambda: handle.wait(), e2b.TimeoutException)


@scenario
async def sandboxes_are_paused_and_resumed(client: Client) -> None:
    sandbox = await client.create(timeout=60)
    if "pause" not in client.features:
        error = await refused(lambda: sandbox.pause(), e2b.SandboxException)
        same("501" in str(error), True)
        return
    await done(sandbox.commands.run("sleep 65", background=True))
    await done(sandbox.pause())
    same((await done(sandbox.get_info())).state, e2b.SandboxState.PAUSED)
    same(await done(sandbox.is_running()), False)
    await refused(lambda: sandbox.commands.run("true"), e2b.TimeoutException)
    again = await done(client.kind.connect(sandbox.sandbox_id, timeout=60, **client.options))
    same(len(await done(again.commands.list())), 1)
    same((await done(again.commands.run("echo on"))).stdout, "on\n")


@scenario
async def metrics_are_told(client: Client) -> None:
    sandbox = await client.create()
    found = await done(sandbox.get_metrics())
    if "usage" not in client.features:
        same(found, [])
        return
    [metric] = found
    same((metric.mem_used > 0, metric.cpu_used_pct >= 0), (True, True))


@scenario
async def snapshots_boot_again(client: Client) -> None:
    sandbox = await client.create()
    await done(sandbox.files.write("/workspace/kept", "yes"))
    if "snapshot" not in client.features:
        error = await refused(lambda: sandbox.create_snapshot(), e2b.SandboxException)
        same("501" in str(error), True)
        return
    snapshot = await done(sandbox.create_snapshot())
    same(await done(sandbox.files.read("/workspace/kept")), "yes")
    clone = await client.create(template=snapshot.snapshot_id)
    same(await done(clone.files.read("/workspace/kept")), "yes")
    listed = await done(client.kind.list_snapshots(sandbox_id=sandbox.sandbox_id, **client.options).next_items())
    same([one.snapshot_id for one in listed], [snapshot.snapshot_id])
    same(await done(client.kind.delete_snapshot(snapshot.snapshot_id, **client.options)), True)
    same(await done(client.kind.delete_snapshot(snapshot.snapshot_id, **client.options)), False)


@scenario
async def one_key_makes_one_sandbox(client: Client) -> None:
    if "idempotency_key" not in inspect.signature(client.kind.create).parameters:
        raise AbsentError
    key = f"key-{client.blocking}".lower()
    first = await client.create(idempotency_key=key)
    same((await client.create(idempotency_key=key)).sandbox_id, first.sandbox_id)
    error = await refused(lambda: client.create(idempotency_key=key, metadata={"other": "1"}), e2b.SandboxException)
    same("422" in str(error), True)


@scenario
async def what_is_wrong_or_missing_is_refused(client: Client) -> None:
    error = await refused(lambda: client.create(template="no-such-template"), e2b.SandboxException)
    same("400" in str(error), True)
    error = await refused(lambda: client.create(timeout=-1), e2b.SandboxException)
    same("400" in str(error), True)
    sandbox = await client.create()
    error = await refused(lambda: sandbox.set_timeout(-1), e2b.SandboxException)
    same("400" in str(error), True)
    if hasattr(sandbox, "fork"):
        error = await refused(lambda: sandbox.fork(), e2b.SandboxException)
        same("501" in str(error), True)


async def run_all(url: str, mode: str, features: set[str]) -> dict[str, str]:
    results = {}
    for name, function in SCENARIOS.items():
        client = Client(url, mode, features)
        try:
            async with asyncio.timeout(60):
                await function(client)
            results[name] = "ok"
        except AbsentError:
            results[name] = "absent"
        except Exception:  # noqa: BLE001 - the result of this scenario
            results[name] = traceback.format_exc()
        finally:
            await client.close()
    return results


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run_all(sys.argv[1], sys.argv[2], set(filter(None, sys.argv[3].split(",")))))))
