"""Local sandboxes on real namespaces: isolation, commands, files, freezing, leases."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benches import sandbox_costs as measure

from headrace.sandboxes import doctor
from headrace.sandboxes.base import ExecResult, FrozenMount, Network, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import (
    CapacityExceeded,
    ExecTimeout,
    FrozenPathRefused,
    ImageUnknown,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
)
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from support import image_kit as kit
from support import process_handles as processes

pytestmark = [pytest.mark.core, pytest.mark.namespaces]


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    async with LocalProvider() as provider:
        yield provider


async def run(sandbox: Sandbox, command: str, *, user: str = "root", timeout_s: float = 30.0) -> ExecResult:
    return await sandbox.exec(command, user=user, timeout_s=timeout_s)


async def output(sandbox: Sandbox, command: str, *, user: str = "root") -> str:
    result = await run(sandbox, command, user=user)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Isolation


async def test_nothing_on_the_host_is_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "host-file").write_text("host")
    top = set((await output(sandbox, "ls -A /")).split())
    system = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "dev", "proc", "etc"}
    assert top - system == {"home", "mnt", "opt", "root", "run", "srv", "tmp", "var", "workspace"}
    empty = "find /root /tmp /workspace /home /mnt /opt /srv /var -type f"
    assert await output(sandbox, empty) == ""
    assert (await run(sandbox, f"cat {tmp_path}/host-file")).exit_code != 0
    assert (await run(sandbox, f"cat /proc/1/root{tmp_path}/host-file")).exit_code != 0


async def test_commands_get_only_the_fixed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "leak")
    async with LocalProvider() as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        names = {line.split("=")[0] for line in (await output(sandbox, "env")).splitlines()}
        assert names == {"PATH", "HOME", "USER", "LOGNAME", "LANG", "PWD", "SHLVL", "_"}
        everywhere = await output(sandbox, "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'")
        assert "leak" not in everywhere
        assert str(Path(doctor.__file__).parent) not in everywhere


async def test_commands_have_the_users_identity_and_capabilities(sandbox: Sandbox) -> None:
    user, host_name, *id_map = (await output(sandbox, "id -u; hostname; cat /proc/self/uid_map")).split()
    assert (user, host_name, id_map[0], id_map[2]) == ("0", "sandbox", "0", "65536")
    assert int(id_map[1]) >= 100_000
    status = await output(sandbox, "grep -E 'CapBnd|CapEff|NoNewPrivs' /proc/self/status")
    assert status.split() == ["CapEff:", "00000000000000fb", "CapBnd:", "00000000000000fb", "NoNewPrivs:", "1"]
    agent = await output(sandbox, "id -u; grep CapEff /proc/self/status; echo $HOME", user="agent")
    assert agent.split() == ["1000", "CapEff:", "0000000000000000", "/home/agent"]


@pytest.mark.parametrize(
    "attempt",
    [
        "touch /usr/bin/planted",
        "touch /usr/local/planted",
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /usr",
        "umount /proc",
        "unshare --user --map-root-user true",
        "unshare --mount true",
        "mknod /tmp/disk b 8 0",
        "chroot / true",
        "dmesg",
        "hostname other",
        "echo c > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/hostname",
        "ip link set lo down || ifconfig lo down",
        "ls /proc/1/fd",
        "cat /proc/1/environ",
        "nsenter --target 1 --mount true",
        "kill -0 1 && kill -9 1 && sleep 0.1 && ! kill -0 1",
    ],
)
async def test_root_in_the_sandbox_cannot_perform_forbidden_operations(sandbox: Sandbox, attempt: str) -> None:
    assert (await run(sandbox, attempt)).exit_code != 0
    assert await output(sandbox, "echo alive") == "alive"


async def test_root_in_the_sandbox_can_perform_permitted_operations(sandbox: Sandbox) -> None:
    script = """
    set -e
    touch /workspace/f /data-at-root; chown agent /workspace/f; chmod 600 /workspace/f
    su agent -c 'test -O /workspace/f && id -un'
    echo 'u2:x:1002:1002::/home/u2:/bin/bash' >> /etc/passwd
    awk 'BEGIN { print 6*7 }'
    python3 -c 'import multiprocessing, ssl, sqlite3; print(multiprocessing.Lock() is not None)'
    python3 -c 'import pty; print(len(pty.openpty()))'
    echo gone > /dev/null; head -c 4 /dev/urandom | wc -c
    """
    assert (await output(sandbox, script)).split() == ["agent", "42", "True", "2", "4"]
    assert await output(sandbox, "id -u", user="u2") == "1002"


async def test_the_network_has_only_a_loopback_interface(sandbox: Sandbox) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host_port = listener.getsockname()[1]
        script = f"""
import errno, socket, threading
server = socket.create_server(("127.0.0.1", 80))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hi"), daemon=True).start()
with socket.create_connection(("127.0.0.1", 80), 5) as own:
    print(own.recv(2).decode())
for address in [("127.0.0.1", {host_port}), ("8.8.8.8", 53), ("169.254.169.254", 80), ("10.0.0.1", 80)]:
    try:
        socket.create_connection(address, 5)
        print("REACHED", address)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
        result = await sandbox.exec("python3 -", stdin=script.encode(), timeout_s=30)
    assert result.stdout.decode().split() == ["hi", "ECONNREFUSED", *["ENETUNREACH"] * 3]


async def test_abstract_unix_sockets_on_the_host_are_unreachable(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"headrace-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        probe = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        result = await sandbox.exec("python3 -", stdin=probe.encode(), timeout_s=30)
    assert b"ConnectionRefusedError" in result.stderr


async def test_the_system_call_filter_blocks_what_namespaces_leave_open(sandbox: Sandbox) -> None:
    probe = """
import ctypes, errno, socket
for family in (1, 2, 10, 16, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
        print(family, "open")
    except OSError as error:
        print(family, errno.errorcode[error.errno])
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(425, 8, ctypes.create_string_buffer(200)), errno.errorcode[ctypes.get_errno()])
"""
    result = await sandbox.exec("python3 -; python3 --version", stdin=probe.encode(), timeout_s=30)
    lines = result.stdout.decode().splitlines()
    expected = ["1 open", "2 open", "10 open", "16 open", "38 EAFNOSUPPORT", "40 EAFNOSUPPORT", "-1 EPERM"]
    assert lines[:-1] == expected, result
    assert lines[-1].startswith("Python 3")


async def test_sandboxes_do_not_see_each_other(provider: LocalProvider) -> None:
    first = await provider.attach(await provider.create(SandboxSpec()))
    second = await provider.attach(await provider.create(SandboxSpec()))
    await first.write("/workspace/secret", b"first")
    await run(first, "sleep 1000 > /dev/null 2>&1 &")
    assert await output(second, "ls /workspace") == ""
    assert "sleep" not in await output(second, "ps ax")
    assert await output(first, "cut -c1-60 /proc/self/uid_map") != await output(second, "cut -c1-60 /proc/self/uid_map")


# Commands


async def test_exec_uses_its_defaults_and_reports_commands_that_cannot_run(sandbox: Sandbox) -> None:
    assert await output(sandbox, "pwd; read -r line; echo [$line]; ulimit -c") == "/workspace\n[]\n0"
    assert (await run(sandbox, "kill -9 $$")).exit_code == 137
    assert (await run(sandbox, "yes | head -1")).stdout == b"y\n"
    missing = await sandbox.exec("true", cwd="/missing", timeout_s=30)
    assert (missing.exit_code, missing.stderr) == (
        126,
        b"cannot run the command: [Errno 2] No such file or directory: '/missing'\n",
    )
    for nobody in ("stranger", "9" * 30):
        refused = await run(sandbox, "true", user=nobody)
        assert (refused.exit_code, refused.stderr[:22]) == (126, b"cannot run the command")
    assert (await run(sandbox, "x" * 200_000)).exit_code == 126
    await run(sandbox, "rmdir /workspace")
    assert await output(sandbox, "pwd") == "/"


async def test_a_timeout_kills_a_daemon_that_disables_its_subreaper(sandbox: Sandbox) -> None:
    escape = """
import ctypes, os, time
ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""
    await sandbox.write("/workspace/escape.py", escape.encode())
    with pytest.raises(ExecTimeout):
        await run(sandbox, "exec python3 /workspace/escape.py", timeout_s=1.0)
    await output(sandbox, "while pgrep python3; do :; done")


async def test_a_timeout_kills_a_command_whose_first_thread_has_ended(sandbox: Sandbox) -> None:
    """It looks like a zombie, which needs no killing."""
    script = "import ctypes, threading as t; t.Thread(target=t.Event().wait).start(); ctypes.CDLL(None).pthread_exit(0)"
    with pytest.raises(ExecTimeout):
        await run(sandbox, f"exec python3 -c '{script}'", timeout_s=1.0)
    assert await output(sandbox, "pgrep -c python3; true") == "0"


@pytest.mark.parametrize(("limit", "value"), [("NOFILE", 0), ("AS", 1), ("NPROC", 0), ("CPU", 1)])
async def test_root_in_the_sandbox_cannot_limit_the_first_process(sandbox: Sandbox, limit: str, value: int) -> None:
    """Each of these attempts would end the sandbox, or all later commands, as if the host had failed."""
    source = f"import resource as r; r.prlimit(1, r.RLIMIT_{limit}, ({value}, {value}))"
    result = await run(sandbox, f"python3 -c '{source}'")
    assert b"PermissionError" in result.stderr
    assert await output(sandbox, "echo alive") == "alive"


FORK_AS_MANY_USERS = """
import os, time
ready, done = os.pipe()
started = 0
for user in range(2000, 2020):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        os.setresuid(user, user, user)
        for _ in range(30):
            try:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
            except OSError:
                break
        os.write(done, b".")
        time.sleep(60)
        os._exit(0)
    started += 1
for _ in range(started):
    os.read(ready, 1)
print(sum(name.isdigit() for name in os.listdir("/proc")))
"""


async def test_the_process_limit_applies_to_all_users_together(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(pids=40)))
    result = await run(sandbox, f"python3 - <<'END'\n{FORK_AS_MANY_USERS}END")
    assert 60 < int(result.stdout) < 80, "one user may have 40 processes, all together have some 70"
    await sandbox.freeze()


HOLD_ALL_PROCESSES = """
import os, time
for user in range(2000, 2010):
    try:
        child = os.fork()
    except OSError:
        break
    while child == 0:
        os.setuid(user)
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            pass
"""


async def test_a_sandbox_at_its_process_limit_still_responds(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(pids=40)))
    await run(sandbox, f"python3 - <<'END'\n{HOLD_ALL_PROCESSES}END")
    async with asyncio.timeout(30):
        while (refused := await run(sandbox, "true")).exit_code == 0:
            pass
    assert refused.exit_code == 126
    assert b"cannot run the command" in refused.stderr
    await sandbox.freeze()


async def test_objects_without_an_owning_process_are_limited(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "ipcmk -M 1M && ipcmk -S 10 && ipcmk -Q")).exit_code == 0
    assert (await run(sandbox, "ipcmk -M 65M")).exit_code != 0
    assert (await run(sandbox, "for i in $(seq 200); do ipcmk -Q || exit 9; done")).exit_code == 9
    assert (await run(sandbox, "for i in $(seq 200); do ipcmk -S 200 || exit 9; done")).exit_code == 9
    assert (await run(sandbox, "echo 99999999 > /proc/sys/kernel/shmall")).exit_code != 0


async def test_a_file_where_the_clean_sandbox_has_a_folder_is_refused(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await run(sandbox, "cd /; rm -rf workspace; echo > workspace")
    await sandbox.freeze()
    mount = FrozenMount(source=sandbox.id, path="/workspace", target="/workspace")
    with pytest.raises(FrozenPathRefused, match="unlike its target"):
        await provider.create(SandboxSpec(mounts=(mount,)))


async def test_disk_bytes_is_a_hard_cap(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(disk_bytes=2 << 20)))
    result = await run(sandbox, "head -c 10000000 /dev/zero > /workspace/big")
    assert b"No space left" in result.stderr
    assert int(await output(sandbox, "stat -c %s /workspace/big")) <= 2 << 20
    await run(sandbox, "rm /workspace/big; for i in $(seq 5000); do echo > /workspace/$i || break; done")
    assert int(await output(sandbox, "ls /workspace | wc -l")) < 5000


async def test_kill_terminates_daemons_and_is_idempotent(provider: LocalProvider, sandbox: Sandbox) -> None:
    await run(sandbox, "setsid bash -c 'setsid sleep 1000 & sleep 1001' > /dev/null 2>&1 & ")
    await run(sandbox, "until [ $(pgrep -c sleep) = 2 ]; do :; done")
    pids = descendants(provider.launcher_pid)
    assert len(pids) >= 3
    handles = processes.opened(pids)
    await sandbox.kill()
    await sandbox.kill()
    await processes.all_dead(handles)
    for action in (
        run(sandbox, "true"),
        sandbox.renew(5),
        sandbox.freeze(),
        sandbox.read("/etc/passwd", max_bytes=9999),
    ):
        with pytest.raises(SandboxGone):
            await action


# Files


@pytest.mark.parametrize(
    "prepare",
    [
        "true",
        "mkdir /workspace/f",
        "mkfifo /workspace/f",
        "ln -s /etc/passwd /workspace/f",
        "ln -s /dev/zero /workspace/f",
        "ln -s /proc/1/environ /workspace/f",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/workspace/f\")'",
        "head -c 101 /dev/zero > /workspace/f",
        "touch /workspace/f; chmod 0 /workspace/f",
    ],
)
async def test_only_regular_files_within_the_size_limit_are_read(sandbox: Sandbox, prepare: str) -> None:
    await output(sandbox, prepare)
    with pytest.raises(SandboxFileError, match="/workspace/f"):
        await sandbox.read("/workspace/f", user="agent", max_bytes=100)


@pytest.mark.parametrize("prepare", ["mkfifo /workspace/f", "mkdir /workspace/f", "ln -s /tmp/elsewhere /workspace/f"])
async def test_writes_do_not_follow_links_or_wait_for_a_reader(sandbox: Sandbox, prepare: str) -> None:
    await output(sandbox, prepare)
    with pytest.raises(SandboxFileError):
        await sandbox.write("/workspace/f", b"data")
    assert (await run(sandbox, "test -e /tmp/elsewhere")).exit_code == 1


async def test_file_operations_have_only_the_users_permissions(sandbox: Sandbox) -> None:
    for path in ("/usr/bin/planted", "/proc/sys/kernel/hostname", "relative"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")
    with pytest.raises(SandboxFileError):
        await sandbox.write("/root/x", b"x", user="agent")


# Freezing


async def frozen_with(provider: LocalProvider, script: str, user: str = "root") -> SandboxId:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await output(sandbox, script, user=user)
    await sandbox.freeze()
    await sandbox.freeze()
    return sandbox.id


async def clean_with(provider: LocalProvider, source: SandboxId, path: str, target: str = "/workspace") -> Sandbox:
    mount = FrozenMount(source=source, path=path, target=target)
    return await provider.attach(await provider.create(SandboxSpec(mounts=(mount,))))


async def test_frozen_data_is_read_only_and_not_executable(provider: LocalProvider) -> None:
    script = """
    mkdir /workspace/d; echo data > /workspace/d/f; umask 077; echo private > /workspace/d/p; echo no > /tmp/other
    cp /bin/true /workspace/tool; setsid sleep 1000 > /dev/null 2>&1 &
    """
    source = await frozen_with(provider, script, user="agent")
    clean = await clean_with(provider, source, "/workspace")
    assert await output(clean, "cat /workspace/d/f /workspace/d/p; stat -c %U /workspace/d/f") == "data\nprivate\nagent"
    for attempt in ("touch /workspace/x", "rm /workspace/d/f", "/workspace/tool", "test -e /tmp/other", "pgrep sleep"):
        assert (await run(clean, attempt)).exit_code != 0
    flags = await output(clean, "grep ' /workspace ' /proc/mounts")
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(flags.split()[3].split(","))


async def test_a_frozen_file_can_be_mounted_at_a_deep_target(provider: LocalProvider) -> None:
    source = await frozen_with(provider, "mkdir -p /home/agent/a; echo x > /home/agent/a/f")
    clean = await clean_with(provider, source, "/home/agent/a/f", "/evidence/deep/f")
    assert await output(clean, "cat /evidence/deep/f") == "x"
    assert (await run(clean, "echo y > /evidence/deep/f")).exit_code != 0


@pytest.mark.parametrize(
    "script",
    [
        "rm -r /workspace; ln -s /etc /workspace",
        "rm -r /workspace; ln -s /proc/self/root /workspace",
        "rm -r /workspace; ln -s .. /workspace",
        "rm -r /workspace",
        "rm -r /workspace; mkfifo /workspace",
    ],
)
async def test_a_hostile_declared_path_is_refused(provider: LocalProvider, script: str) -> None:
    source = await frozen_with(provider, f"cd /; {script}")
    with pytest.raises(FrozenPathRefused, match="/workspace"):
        await clean_with(provider, source, "/workspace")
    assert [info.id for info in await provider.list()] == [source]


async def test_a_symbolic_link_in_a_mount_target_is_refused(provider: LocalProvider) -> None:
    source = await frozen_with(provider, "ln -s ../usr /workspace/link; mkdir /workspace/d")
    mounts = (
        FrozenMount(source=source, path="/workspace", target="/workspace"),
        FrozenMount(source=source, path="/workspace/d", target="/workspace/link/bin"),
    )
    with pytest.raises(FrozenPathRefused, match="symbolic link"):
        await provider.create(SandboxSpec(mounts=mounts))


async def test_dots_cannot_escape_a_layer(provider: LocalProvider) -> None:
    source = await frozen_with(provider, "echo x > /workspace/f")
    clean = await clean_with(provider, source, "/../../../../workspace", "/data")
    assert await output(clean, "cat /data/f") == "x"


async def test_planted_startup_files_have_no_effect_in_the_clean_sandbox(provider: LocalProvider) -> None:
    plant = """
    for f in .bashrc .bash_profile .profile .bash_env; do echo 'echo PLANTED; exit 0' > /root/$f; done
    echo 'echo PLANTED' > /etc/profile; echo /workspace/evil.so > /etc/ld.so.preload; mkdir /root/bin
    printf '#!/bin/sh\necho PLANTED\n' > /root/bin/cat; chmod +x /root/bin/cat; echo ok > /workspace/out
    echo 'import os; print("PLANTED")' > /workspace/sitecustomize.py; cp /root/bin/cat /workspace
    """
    source = await frozen_with(provider, plant)
    clean = await clean_with(provider, source, "/workspace")
    result = await run(clean, "cd /workspace; cat out; python3 -c 'print(1)'; ls /root /etc/profile /etc/ld.so.preload")
    assert result.stdout.split() == [b"ok", b"1", b"/root:"]
    assert b"PLANTED" not in result.stdout + result.stderr


async def test_a_killed_sandbox_cannot_be_frozen(provider: LocalProvider) -> None:
    """A caller that relies on the frozen files must get an error.

    The launcher is stopped until it has both requests, because between them it could have frozen the sandbox.
    """
    assert provider.launcher_pid is not None
    for first, second in (("kill", "freeze"), ("freeze", "kill")):
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        os.kill(provider.launcher_pid, signal.SIGSTOP)
        both = asyncio.gather(getattr(sandbox, first)(), getattr(sandbox, second)(), return_exceptions=True)
        asyncio.get_running_loop().call_soon(os.kill, provider.launcher_pid, signal.SIGCONT)
        results = await both
        outcome = dict(zip((first, second), results, strict=True))
        assert outcome["kill"] is None
        assert isinstance(outcome["freeze"], SandboxGone)


async def test_a_frozen_sandbox_runs_nothing_and_can_be_killed_while_mounted(provider: LocalProvider) -> None:
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    await sandbox.write("/workspace/f", b"kept")
    await sandbox.freeze()
    with pytest.raises(SandboxGone, match="frozen"):
        await run(sandbox, "true")
    clean = await clean_with(provider, ref.id, "/workspace")
    await sandbox.kill()
    assert await output(clean, "cat /workspace/f") == "kept"
    assert [info.id for info in await provider.list()] == [clean.id]


# Leases, keys, refusals


async def test_a_sandbox_is_killed_when_its_lease_ends(provider: LocalProvider) -> None:
    kept = await provider.attach(await provider.create(SandboxSpec(ttl_s=30)))
    await kept.renew(600)
    running = await provider.attach(await provider.create(SandboxSpec(ttl_s=0.3)))
    with pytest.raises(SandboxGone):
        await run(running, "sleep 1000", timeout_s=60)
    frozen = await provider.attach(await provider.create(SandboxSpec()))
    await frozen.freeze()
    await frozen.renew(0.3)
    await list_until(provider, 1)
    assert await output(kept, "echo alive") == "alive"
    (info,) = await provider.list()
    assert (info.id, info.state) == (kept.id, "running")
    assert 500 < info.expires_in_s <= 600


async def test_a_lease_of_years_does_not_stop_the_launcher(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(ttl_s=9e8)))
    await sandbox.renew(9e8)
    assert await output(sandbox, "echo alive") == "alive"


async def test_a_cancelled_create_leaves_nothing_behind(provider: LocalProvider) -> None:
    await provider.list()
    tasks = [asyncio.create_task(provider.create(SandboxSpec())) for _ in range(5)]
    # One turn of the event loop sends the requests; the launcher cannot have answered yet.
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    await list_until(provider, 0)


async def test_a_secret_is_valid_for_one_sandbox_only(provider: LocalProvider) -> None:
    first, second = await provider.create(SandboxSpec()), await provider.create(SandboxSpec())
    for wrong in ("", "x", second.secret):
        stranger = await provider.attach(replace(first, secret=wrong))
        with pytest.raises(SecretRefused):
            await run(stranger, "true")
        with pytest.raises(SecretRefused):
            await stranger.kill()
    assert await output(await provider.attach(first), "echo mine") == "mine"


async def test_unsupported_specs_are_refused(provider: LocalProvider) -> None:
    with pytest.raises(ImageUnknown):
        await provider.create(SandboxSpec(image="ubuntu"))
    for spec in (SandboxSpec(network=Network.HOST), SandboxSpec(disk_bytes=1)):
        with pytest.raises(SpecRefused):
            await provider.create(spec)


async def test_a_full_provider_raises_a_transient_error() -> None:
    async with LocalProvider(LocalSandboxConfig(max_sandboxes=1)) as provider:
        await provider.create(SandboxSpec())
        with pytest.raises(CapacityExceeded) as caught:
            await provider.create(SandboxSpec())
        assert caught.value.transient
        assert caught.value.retry_after_s > 0


async def test_invalid_data_does_not_disturb_the_launcher(provider: LocalProvider, sandbox: Sandbox) -> None:
    for garbage in (b"\xff" * 64, b"\0\0\0\x02{}", b"\0\1\0\0" + b"[" * 65536, b'\0\0\0\x0f{"op":"create"}', b"\0\0"):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(provider.endpoint)
            stream.sendall(garbage)
    assert await output(sandbox, "echo alive") == "alive"


HUGE = 10**400
COMMAND = {"op": "exec", "command": "true", "user": "root", "env": {}, "cwd": None, "timeout_s": 5.0, "fds": 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "renew", "ttl_s": HUGE},
        {"op": "renew", "ttl_s": float("nan")},
        {"op": "renew", "ttl_s": -1},
        {"op": "listen", "port": "http"},
        {"op": "listen"},
        {"op": "signal", "target": 1, "number": HUGE},
        {"op": "keep"},
        {**COMMAND, "timeout_s": float("nan")},
        {**COMMAND, "timeout_s": HUGE},
        {**COMMAND, "timeout_s": "long"},
        {**COMMAND, "fds": 0},
        {**COMMAND, "fds": 3, "long": "é" * 3_000_000},
        {name: value for name, value in COMMAND.items() if name != "timeout_s"},
        *(
            {"op": "create", **field}
            for field in (
                {"ttl_s": HUGE},
                {"ttl_s": float("nan")},
                {"memory_bytes": float("inf")},
                {"cpus": float("inf")},
                {"cpus": -1},
                {"pids": HUGE},
                {"disk_bytes": -1},
                {"labels": 5},
                {"labels": {"long": "x" * 10_000}},
                {"mounts": [[1, 2, 3]]},
                {"mounts": [["a", "/\0", "/b"]]},
                {"mounts": [["a"]]},
            )
        ),
    ],
    ids=lambda wrong: json.dumps(wrong)[:50],
)
async def test_a_request_with_invalid_values_is_refused_without_side_effects(
    provider: LocalProvider, wrong: dict[str, Any]
) -> None:
    ref = await provider.create(SandboxSpec())
    message = {**whole_request(ref, wrong, note_secret(provider)), "id": 7}
    answer = await asyncio.to_thread(ask_by_hand, provider.endpoint, message)
    assert (answer["id"], answer["error"]) == (7, "SpecRefused")
    assert await output(await provider.attach(ref), "echo alive") == "alive"
    assert [info.id for info in await provider.list()] == [ref.id]


def note_secret(provider: LocalProvider) -> str:
    assert provider._launcher is not None
    return provider._launcher.secret


def whole_request(ref: SandboxRef, wrong: dict[str, Any], admin_secret: str) -> dict[str, Any]:
    if wrong["op"] != "create":
        return {"sandbox": ref.id, "secret": ref.secret, **wrong}
    limits = dict.fromkeys(("disk_bytes", "pids", "memory_bytes", "cpus"))
    rest = {"key": "", "image": "host", "ttl_s": 60.0, "labels": {}, "mounts": [], "secret": admin_secret}
    return {**limits, **rest, **wrong}


def ask_by_hand(endpoint: str, message: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(message, ensure_ascii=False).encode()
    with socket.socket(socket.AF_UNIX) as stream, Path("/dev/null").open("rb") as null:
        stream.settimeout(20)
        stream.connect(endpoint)
        descriptors = [null.fileno()] * message.get("fds", 0)
        framed = len(body).to_bytes(4, "big") + body
        stream.sendall(framed[socket.send_fds(stream, [framed], descriptors) :])
        size = int.from_bytes(stream.recv(4, socket.MSG_WAITALL), "big")
        answer: dict[str, Any] = json.loads(stream.recv(size, socket.MSG_WAITALL))
        return answer


async def test_a_launcher_without_free_descriptors_refuses_requests_and_recovers(
    provider: LocalProvider, sandbox: Sandbox
) -> None:
    assert provider.launcher_pid is not None
    resource.prlimit(provider.launcher_pid, resource.RLIMIT_NOFILE, (64, 64))
    with ExitStack() as stack:
        streams = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(80)]
        for stream in streams:
            stream.connect(provider.endpoint)
        streams[-1].settimeout(20)
        assert await asyncio.to_thread(streams[-1].recv, 1) == b""
    assert await output(sandbox, "echo alive") == "alive"


async def test_a_request_that_is_too_large_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SpecRefused):
        await run(sandbox, "true", timeout_s=float("nan"))
    with pytest.raises(SpecRefused):
        await run(sandbox, "x" * (9 << 20))
    assert await output(sandbox, "echo alive") == "alive"


async def test_another_process_can_attach_with_a_pickled_ref(provider: LocalProvider) -> None:
    ref = await provider.create(SandboxSpec())
    completed = await asyncio.to_thread(attach_elsewhere, ref)
    assert completed.stdout == b"from elsewhere\n", completed.stderr
    assert await (await provider.attach(ref)).read("/workspace/f", max_bytes=100) == b"elsewhere"


def attach_elsewhere(ref: SandboxRef) -> subprocess.CompletedProcess[bytes]:
    script = """
import asyncio, pickle, sys
from headrace.sandboxes.local.provider import LocalProvider
async def main():
    provider = LocalProvider()
    sandbox = await provider.attach(pickle.load(sys.stdin.buffer))
    await sandbox.write("/workspace/f", b"elsewhere")
    sys.stdout.buffer.write((await sandbox.exec("echo from $(cat f)", timeout_s=30)).stdout)
    await provider.aclose()
asyncio.run(main())
"""
    return subprocess.run([sys.executable, "-c", script], input=pickle.dumps(ref), capture_output=True, timeout=60)


async def test_fifty_sandboxes_run_concurrently(provider: LocalProvider) -> None:
    async def life(number: int) -> str:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        await sandbox.write("/workspace/n", str(number).encode())
        text = await output(sandbox, "cat /workspace/n; ls /workspace | wc -l")
        await sandbox.kill()
        return text

    results = await asyncio.gather(*(life(number) for number in range(50)))
    assert results == [f"{number}1" for number in range(50)]
    assert await provider.list() == []


async def test_aclose_leaves_no_processes_or_files_behind() -> None:
    async with LocalProvider() as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        await run(sandbox, "setsid sleep 1000 > /dev/null 2>&1 &")
        launcher = provider.launcher_pid
        assert launcher is not None
        handles = processes.opened([launcher, *descendants(launcher)])
        folder = Path(provider.endpoint).parent
    await processes.all_dead(handles)
    assert folder.name not in host_folders(folder.parent)
    assert str(folder) not in host_mounts()


async def test_probe_reports_present_and_missing_guarantees() -> None:
    guarantees = {guarantee.name: guarantee for guarantee in await asyncio.to_thread(doctor.probe)}
    assert guarantees["user namespace"].present
    assert guarantees["images"].present
    assert guarantees["snapshots"].present or not kit.MAPS_MEMORY
    for missing in ("escaped daemons at a timeout",):
        assert not guarantees[missing].present
        assert guarantees[missing].detail
    assert json.dumps([guarantee.detail for guarantee in guarantees.values()])


@kit.needs_snapshots
async def test_measure_reports_every_figure() -> None:
    figures = await measure.measure(cycles=2, execs=2, boots=2, idle=2, repeats=2, concurrencies=(1, 2))
    numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
    assert {"create_destroy_cpu_ms", "exec_p50_ms", "exec_p99_ms", "clone_p50_ms", "idle_memory_mb"} <= numbers.keys()
    assert {"boots_per_s_c1", "boots_per_s_c2"} <= numbers.keys()
    assert all(value > 0 for value in numbers.values())
    assert all(least <= numbers[name] <= greatest for name, (least, greatest) in figures["spread"].items())
    assert "user namespace" in figures["guarantees"]


async def list_until(provider: LocalProvider, count: int) -> None:
    """List sandboxes until at most `count` are left; each call is a round trip to the launcher."""
    async with asyncio.timeout(30):
        while len(await provider.list()) > count:
            pass


def host_folders(parent: Path) -> set[str]:
    return {folder.name for folder in parent.iterdir()}


def host_mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def descendants(root: int | None) -> list[int]:
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int | None] = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return [pid for pid in found - {root} if pid is not None]
