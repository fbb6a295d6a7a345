# ruff: noqa: ASYNC110, ASYNC240 - small local files; the end of a lease has no event
"""Contract of every sandbox provider (sandboxes/base.py), tested with each provider that this machine can run."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.base import (
    ExecResult,
    Feature,
    FrozenMount,
    Network,
    Sandbox,
    SandboxId,
    SandboxProvider,
    SandboxSpec,
)
from headrace.sandboxes.e2b.provider import E2bConfig, E2bProvider
from headrace.sandboxes.errors import (
    ExecTimeout,
    FrozenPathRefused,
    ImageUnknown,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
    Unsupported,
)
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer

pytestmark = pytest.mark.namespaces


@pytest.fixture(scope="module")
def exec_server() -> Iterator[str]:
    """URL of one server for all tests of this module; each test closes its provider, which empties the server."""
    headrace = str(Path(sys.executable).with_name("headrace"))
    command = [headrace, "serve", "sandbox", "--api", "exec"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            assert process.wait(60) == 0


E2B_LACKS = {
    "test_exec_uses_the_default_user_and_folder": "E2B adds variables of its own",
    "test_users_are_resolved_by_name_and_number": "E2B takes no group beside the user, and has a default user",
    "test_unwritable_files_raise_sandbox_file_error": "E2B writes through links, and takes relative paths",
    "test_aclose_terminates_all_sandboxes": "the sandboxes are the account's: its other programs use them too",
    "test_the_size_of_the_file_layer_is_limited": "the template of a sandbox fixes its limits",
    "test_processes_are_limited": "the template of a sandbox fixes its limits",
    "test_a_clean_sandbox_can_read_frozen_data": "the files are copied: test_e2b_provider.py",
    "test_a_paused_sandbox_makes_no_progress": "commands of a paused sandbox are refused: test_e2b_provider.py",
}
"""Parts of the contract that E2B's API cannot fulfil."""


@pytest.fixture(
    params=["local", pytest.param("remote", marks=pytest.mark.whole), pytest.param("e2b", marks=pytest.mark.whole)]
)
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    if request.param == "e2b" and (reason := E2B_LACKS.get(request.node.originalname)):
        pytest.skip(reason)
    match request.param:
        case "local":
            async with LocalProvider() as local:
                yield local
        case "remote":
            url = request.getfixturevalue("exec_server")
            async with RemoteProvider(RemoteConfig(url=url)) as remote:
                yield remote
        case "e2b":
            key = tmp_path_factory.mktemp("e2b") / "key"
            key.write_text("e2b_0000")
            async with LocalProvider() as local, E2bServer(local) as server:
                config = E2bConfig(api_url=server.url, api_key_file=key)
                async with E2bProvider(config) as e2b:
                    yield e2b


async def run(sandbox: Sandbox, command: str, *, user: str = "root", timeout_s: float = 60.0) -> ExecResult:
    return await sandbox.exec(command, user=user, timeout_s=timeout_s)


async def output(sandbox: Sandbox, command: str, *, user: str = "root") -> str:
    result = await run(sandbox, command, user=user)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Commands


async def test_exec_passes_input_and_returns_output(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "cat; echo err >&2; echo $NAME; pwd; exit 7",
        env={"NAME": "value with 'quotes'"},
        cwd="/tmp",
        stdin=b"in\n",
        timeout_s=60,
    )
    assert result.exit_code == 7
    assert result.stdout == b"in\nvalue with 'quotes'\n/tmp\n"
    assert result.stderr == b"err\n"
    assert not result.truncated
    assert result.duration_s > 0


async def test_exec_uses_the_default_user_and_folder(sandbox: Sandbox) -> None:
    assert await output(sandbox, "pwd; read -r line; echo [$line]; ulimit -c; echo $HOME") == "/workspace\n[]\n0\n/root"
    names = {line.split("=")[0] for line in (await output(sandbox, "env")).splitlines()}
    assert names == {"PATH", "HOME", "USER", "LOGNAME", "LANG", "PWD", "SHLVL", "_"}


async def test_death_by_a_signal_is_reported_as_an_exit_code(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "kill -9 $$")).exit_code == 137
    assert (await run(sandbox, "kill -TERM $$")).exit_code == 143
    assert (await run(sandbox, "yes | head -1")).stdout == b"y\n"


async def test_a_command_that_cannot_run_exits_with_126_and_a_message(sandbox: Sandbox) -> None:
    missing_folder = await sandbox.exec("true", cwd="/missing", timeout_s=60)
    assert missing_folder.exit_code == 126
    assert b"/missing" in missing_folder.stderr
    stranger = await run(sandbox, "true", user="stranger")
    assert stranger.exit_code == 126
    assert b"stranger" in stranger.stderr


async def test_users_are_resolved_by_name_and_number(sandbox: Sandbox) -> None:
    assert (await output(sandbox, "id -u; id -g; echo $HOME; echo $USER", user="agent")).split() == [
        *("1000", "1000", "/home/agent", "agent")
    ]
    await output(sandbox, "echo 'u2:x:1002:1003::/tmp:/bin/bash' >> /etc/passwd")
    assert (await output(sandbox, "id -u; id -g; echo $HOME", user="u2")).split() == ["1002", "1003", "/tmp"]
    assert (await output(sandbox, "id -u; id -g", user="1234:55")).split() == ["1234", "55"]
    assert (await run(sandbox, "true", user="")).exit_code == 126
    assert (await run(sandbox, "touch /etc/planted", user="agent")).exit_code != 0


async def test_root_in_the_sandbox_can_chown_but_has_few_capabilities(sandbox: Sandbox) -> None:
    await output(sandbox, "touch f && chown agent f && chmod 600 f")
    assert await output(sandbox, "test -O /workspace/f && echo mine", user="agent") == "mine"
    devices = "mknod /tmp/disk b 8 0; head -c 1 /tmp/disk | grep -q ."
    for attempt in (devices, "mount -t tmpfs none /mnt", "touch /usr/bin/planted", "chroot / true"):
        assert (await run(sandbox, attempt)).exit_code != 0, attempt


async def test_the_network_is_unreachable(sandbox: Sandbox) -> None:
    reached = "(exec 3<>/dev/tcp/8.8.8.8/53) 2>/dev/null && echo REACHED; echo done"
    assert await output(sandbox, reached) == "done"


async def test_output_above_the_limit_is_discarded(sandbox: Sandbox) -> None:
    command = "head -c 50000000 /dev/zero; echo end >&2"
    result = await sandbox.exec(command, timeout_s=100, max_output_bytes=1000)
    assert result.stdout == bytes(1000)
    assert result.stderr == b"end\n"
    assert result.truncated
    assert result.exit_code == 0


async def test_a_timeout_kills_the_whole_tree(sandbox: Sandbox) -> None:
    """F2."""
    script = """
    (sleep 1001 &)
    setsid sleep 1002 &
    setsid bash -c 'setsid bash -c "sleep 1003 & sleep 1004" &' &
    trap '' TERM HUP INT
    sleep 1005
    """
    with pytest.raises(ExecTimeout):
        await run(sandbox, script, timeout_s=1.5)
    await output(sandbox, "while pgrep sleep; do sleep 0.05; done > /dev/null")


async def test_a_timeout_does_not_kill_other_commands(sandbox: Sandbox) -> None:
    other = asyncio.create_task(
        run(sandbox, "touch /tmp/up; until test -e /tmp/go; do sleep 0.05; done; echo survived")
    )
    await output(sandbox, "until test -e /tmp/up; do sleep 0.05; done")
    with pytest.raises(ExecTimeout):
        await run(sandbox, "sleep 1000", timeout_s=0.5)
    await output(sandbox, "touch /tmp/go")
    assert (await other).stdout == b"survived\n"


async def test_a_daemon_that_keeps_the_output_open_does_not_delay_exec(sandbox: Sandbox) -> None:
    result = await run(sandbox, "echo said; (sleep 1000 &)", timeout_s=60)
    assert result.stdout == b"said\n"
    assert await output(sandbox, "until pgrep sleep > /dev/null; do :; done; pgrep -c sleep") == "1"


async def test_a_cancelled_command_is_killed(sandbox: Sandbox) -> None:
    task = asyncio.create_task(run(sandbox, "touch /tmp/up; sleep 1000", timeout_s=600))
    await output(sandbox, "until test -e /tmp/up; do sleep 0.05; done")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await output(sandbox, "while pgrep sleep; do sleep 0.05; done > /dev/null")


async def test_no_process_in_the_sandbox_can_terminate_it(sandbox: Sandbox) -> None:
    await run(sandbox, "kill -9 -1")
    await run(sandbox, "kill -9 1; kill -TERM 1")
    assert await output(sandbox, "echo alive") == "alive"


async def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    await output(sandbox, "for n in 1 2 3 4 5; do (setsid sleep 0.01 &); done")
    living = "while pgrep sleep; do sleep 0.05; done > /dev/null"
    zombies = "for f in /proc/[0-9]*/stat; do read -r a b c d < $f && [[ $c == Z ]] && echo zombie; done"
    await output(sandbox, f"{living}; while [[ -n $({zombies}) ]]; do sleep 0.05; done 2> /dev/null")


# Files


async def test_files_with_any_content_round_trip(sandbox: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    await sandbox.write("/workspace/a b/c'd/file", data)
    assert await sandbox.read("/workspace/a b/c'd/file", max_bytes=len(data)) == data
    await sandbox.write("/workspace/a b/c'd/file", b"")
    assert await sandbox.read("/workspace/a b/c'd/file", max_bytes=10) == b""
    (tmp_path / "host").write_bytes(data)
    await sandbox.write("/workspace/from-host", tmp_path / "host")
    assert await sandbox.read("/workspace/from-host", max_bytes=len(data)) == data
    await sandbox.write_many({"/workspace/x": b"1", "/workspace/y/z": b"2"})
    assert await output(sandbox, "cat x y/z; stat -c %a x") == "12644"


async def test_files_belong_to_their_user(sandbox: Sandbox) -> None:
    await sandbox.write("/workspace/mine", b"x", user="agent")
    assert await output(sandbox, "test -O /workspace/mine && echo mine", user="agent") == "mine"
    await sandbox.write("/root/secret", b"x")
    with pytest.raises(SandboxFileError):
        await sandbox.read("/root/secret", user="agent", max_bytes=10)
    with pytest.raises(SandboxFileError):
        await sandbox.write("/etc/passwd", b"x", user="agent")


async def test_unreadable_files_raise_sandbox_file_error(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo pipe; ln -s /etc/passwd link; mkdir folder; printf 12345 > five")
    for path in ("/workspace/missing", "/workspace/pipe", "/workspace/link", "/workspace/folder", "/dev/zero"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path, max_bytes=10)
    with pytest.raises(SandboxFileError):
        await sandbox.read("/workspace/five", max_bytes=4)
    assert await sandbox.read("/workspace/five", max_bytes=5) == b"12345"


async def test_unwritable_files_raise_sandbox_file_error(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo pipe; ln -s /workspace/target link; mkdir folder; echo > file")
    inside = ("/workspace/pipe", "/workspace/link", "/workspace/folder", "/workspace/file/x")
    for path in (*inside, "relative", "/dev/full"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")
    assert await output(sandbox, "test -e target || echo none") == "none"


async def test_links_and_dots_cannot_escape_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "witness").write_text("host")
    await output(sandbox, f"ln -s {tmp_path} out; ln -s / root")
    for path in ("/workspace/out/witness", f"/workspace/root{tmp_path}/witness", f"/../../../..{tmp_path}/witness"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path, max_bytes=10)
    await sandbox.write(f"/../../..{tmp_path}/planted", b"x")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["witness"]


# Life


async def test_an_idempotency_key_creates_only_one_sandbox(provider: SandboxProvider) -> None:
    spec = SandboxSpec(idempotency_key="key-1", labels={"a": "b"})
    refs = await asyncio.gather(*(provider.create(spec) for _ in range(3)))
    assert len({ref.id for ref in refs}) == 1
    (info,) = await provider.list()
    assert (info.id, info.state, info.idempotency_key) == (refs[0].id, "running", "key-1")
    assert dict(info.labels) == {"a": "b"}
    assert 0 < info.expires_in_s <= spec.ttl_s
    await (await provider.attach(refs[0])).kill()
    assert (await provider.create(spec)).id != refs[0].id


async def test_a_pickled_ref_is_enough_to_attach(provider: SandboxProvider) -> None:
    ref = await provider.create(SandboxSpec())
    assert "secret" not in repr(ref)
    copy = await provider.attach(pickle.loads(pickle.dumps(ref)))
    assert await output(copy, "echo hi") == "hi"
    wrong = await provider.attach(replace(ref, secret="0" * len(ref.secret)))
    with pytest.raises(SecretRefused):
        await run(wrong, "true")


async def test_sandboxes_do_not_see_each_other(provider: SandboxProvider) -> None:
    first = await provider.attach(await provider.create(SandboxSpec()))
    second = await provider.attach(await provider.create(SandboxSpec()))
    await first.write("/workspace/secret", b"first")
    await run(first, "sleep 1000 > /dev/null 2>&1 &")
    assert await output(second, "echo /workspace/*") == "/workspace/*"
    assert await output(second, "pgrep -c sleep || true") == "0"


async def test_kill_terminates_every_process_and_is_idempotent(provider: SandboxProvider) -> None:
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    running = asyncio.create_task(run(sandbox, "touch /tmp/up; sleep 1000", timeout_s=600))
    await output(sandbox, "until test -e /tmp/up; do sleep 0.05; done")
    await sandbox.kill()
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await running
    for call in (run(sandbox, "true"), sandbox.read("/etc/passwd", max_bytes=1), sandbox.renew(10)):
        with pytest.raises(SandboxGone):
            await call
    assert [info.id for info in await provider.list()] == []


async def test_a_sandbox_ends_when_its_lease_is_not_renewed(provider: SandboxProvider) -> None:
    kept = await provider.attach(await provider.create(SandboxSpec(ttl_s=3600)))
    ref = await provider.create(SandboxSpec(ttl_s=3600))
    sandbox = await provider.attach(ref)
    waiting = asyncio.create_task(run(sandbox, "touch /tmp/up; sleep 1000", timeout_s=600))
    await output(sandbox, "until test -e /tmp/up; do sleep 0.05; done")
    await kept.renew(3600)
    short = await provider.create(SandboxSpec(ttl_s=0.2))
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await waiting
    gone = await provider.attach(short)
    async with asyncio.timeout(60):
        while short.id in {info.id for info in await provider.list()}:
            await asyncio.sleep(0.05)
    with pytest.raises(SandboxGone):
        await run(gone, "true")
    assert await output(kept, "echo alive") == "alive"


async def test_aclose_terminates_all_sandboxes(provider: SandboxProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await provider.aclose()
    with pytest.raises(SandboxGone):
        await run(sandbox, "true")


async def test_the_size_of_the_file_layer_is_limited(provider: SandboxProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(disk_bytes=4 << 20)))
    result = await run(sandbox, "head -c 8000000 /dev/zero > /workspace/big")
    assert result.exit_code != 0
    assert int(await output(sandbox, "stat -c %s big || wc -c < big")) < 8000000


async def test_processes_are_limited(provider: SandboxProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(pids=40)))
    script = "for n in {1..100}; do sleep 1000 & done 2>/dev/null; exit 0"
    with pytest.raises(ExecTimeout):
        await run(sandbox, f"{script[:-6]} wait", timeout_s=3, user="agent")
    await output(sandbox, "while pgrep sleep; do sleep 0.05; done > /dev/null")


# What providers may lack


def needs(provider: SandboxProvider, feature: Feature) -> None:
    if feature not in provider.features:
        pytest.skip(f"{type(provider).__name__} has no {feature.value}")


async def test_a_clean_sandbox_can_read_frozen_data(provider: SandboxProvider) -> None:
    needs(provider, Feature.FREEZE)
    agent = await provider.attach(await provider.create(SandboxSpec()))
    await output(agent, "mkdir -p data/sub; echo result > data/sub/file; ln -s /etc/passwd data/link; ln -s /etc away")
    await run(agent, "sleep 1000 > /dev/null 2>&1 &")
    await agent.freeze()
    await agent.freeze()
    with pytest.raises(SandboxGone):
        await run(agent, "true")
    mount = FrozenMount(source=agent.id, path="/workspace/data", target="/frozen/data")
    checker = await provider.attach(await provider.create(SandboxSpec(mounts=(mount,))))
    assert await output(checker, "cat /frozen/data/sub/file") == "result"
    assert (await run(checker, "touch /frozen/data/new")).exit_code != 0
    assert (await run(checker, "chmod 777 /frozen/data/sub")).exit_code != 0
    states = {info.id: info.state for info in await provider.list()}
    assert states == {agent.id: "frozen", checker.id: "running"}
    for path in ("/workspace/away", "/workspace/missing", "/workspace/away/passwd"):
        with pytest.raises(FrozenPathRefused):
            await provider.create(SandboxSpec(mounts=(replace(mount, path=path),)))
    for target in ("/proc/x", "/usr/x", "relative", "/a/../etc", "/"):
        with pytest.raises(SpecRefused):
            await provider.create(SandboxSpec(mounts=(replace(mount, target=target),)))
    await agent.renew(100)
    await agent.kill()
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(mounts=(mount,)))


async def test_only_frozen_sandboxes_can_be_mount_sources(provider: SandboxProvider) -> None:
    needs(provider, Feature.FREEZE)
    running = await provider.create(SandboxSpec())
    for source in (running.id, SandboxId("missing")):
        mount = FrozenMount(source=source, path="/workspace", target="/frozen")
        with pytest.raises(SpecRefused):
            await provider.create(SandboxSpec(mounts=(mount,)))


async def collected(process: Any) -> dict[str, bytes]:
    streams: dict[str, bytes] = {}
    async for piece in process.output():
        assert 0 < len(piece.data) <= 1 << 16
        streams[piece.stream.value] = streams.get(piece.stream.value, b"") + piece.data
    return streams


async def test_a_spawned_command_streams_and_returns_its_exit_code(provider: SandboxProvider, sandbox: Sandbox) -> None:
    needs(provider, Feature.SPAWN)
    process = await sandbox.spawn("cat; echo err >&2; id -u; pwd; exit 7", user="agent", cwd="/tmp", stdin=True)
    assert process.pid > 1
    data = b"0123456789" * 30_000
    async with asyncio.TaskGroup() as group:
        group.create_task(write_all(process, data))
        streams = group.create_task(collected(process))
    assert streams.result() == {"stdout": data + b"1000\n/tmp\n", "stderr": b"err\n"}
    assert await process.wait() == 7
    assert await process.wait() == 7
    await process.signal(15)
    with pytest.raises(SandboxFileError):
        await process.write_stdin(b"x")


async def write_all(process: Any, data: bytes) -> None:
    await process.write_stdin(data)
    await process.close_stdin()
    await process.close_stdin()


async def test_a_spawned_program_gets_its_arguments_unchanged(provider: SandboxProvider, sandbox: Sandbox) -> None:
    needs(provider, Feature.SPAWN)
    process = await sandbox.spawn(["printf", "%s|", "a b", "$HOME", ""], env={"X": "y"})
    assert await collected(process) == {"stdout": b"a b|$HOME||"}
    assert await process.wait() == 0


async def test_a_spawned_command_receives_signals_and_is_killed_at_its_timeout(
    provider: SandboxProvider, sandbox: Sandbox
) -> None:
    needs(provider, Feature.SPAWN)
    process = await sandbox.spawn("trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.05; done")
    pieces = process.output()
    assert (await anext(pieces)).data == b"up\n"
    await process.signal(15)
    assert [piece.data async for piece in pieces] == [b"told\n"]
    assert await process.wait() == 3
    tree = await sandbox.spawn("setsid sleep 1000 & sleep 1000")
    await tree.signal(9)
    assert await tree.wait() == 137
    late = await sandbox.spawn("setsid sleep 1000 & sleep 1000", timeout_s=0.5)
    with pytest.raises(ExecTimeout):
        await late.wait()
    await output(sandbox, "while pgrep sleep; do sleep 0.05; done > /dev/null")
    last = await sandbox.spawn("sleep 1000")
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await last.wait()


async def test_a_paused_sandbox_makes_no_progress(provider: SandboxProvider, sandbox: Sandbox) -> None:
    needs(provider, Feature.PAUSE)
    await sandbox.resume()
    await sandbox.pause()
    await sandbox.pause()
    waiting = asyncio.create_task(run(sandbox, "echo went on"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await sandbox.resume()
    assert (await waiting).stdout == b"went on\n"
    await sandbox.pause()
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await run(sandbox, "true")


async def test_usage_reports_current_consumption(provider: SandboxProvider, sandbox: Sandbox) -> None:
    needs(provider, Feature.USAGE)
    await output(sandbox, "head -c 3000000 /dev/urandom > big; (sleep 1000 > /dev/null 2>&1 &)")
    usage = await sandbox.usage()
    assert usage.cpu_s > 0
    assert usage.memory_bytes > 3_000_000
    assert 3_000_000 <= usage.disk_bytes < (usage.disk_limit_bytes or 0)
    assert usage.processes >= 2
    assert usage.oom_kills == 0


async def test_a_missing_feature_raises_unsupported(provider: SandboxProvider, sandbox: Sandbox) -> None:
    calls = {
        Feature.USAGE: lambda: sandbox.usage(),
        Feature.PAUSE: lambda: sandbox.pause(),
        Feature.SNAPSHOT: lambda: sandbox.snapshot(),
        Feature.SPAWN: lambda: sandbox.spawn("true"),
        Feature.EXEC_ID: lambda: sandbox.exec("true", timeout_s=10, exec_id="one"),
    }
    for feature, call in calls.items():
        if feature not in provider.features:
            with pytest.raises(Unsupported):
                await call()
    assert await output(sandbox, "echo alive") == "alive"


# Bad input


async def test_invalid_specs_are_refused_by_every_provider(provider: SandboxProvider) -> None:
    with pytest.raises(ImageUnknown):
        await provider.create(SandboxSpec(image="/missing/image"))
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(network=Network.HOST))
    assert await provider.list() == []
