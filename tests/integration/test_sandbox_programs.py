"""Python programs that run in a fork of the launcher inside a sandbox, without starting an interpreter of its image."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.sandboxes.base import ExecResult, ProgramRunner, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, SandboxFileError
from headrace.sandboxes.launcher.commands import PRELOADED
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.local.sandbox import LocalSandbox
from support import image_kit as kit

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: LocalProvider) -> AsyncIterator[LocalSandbox]:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    yield sandbox
    await sandbox.kill()


async def run(sandbox: LocalSandbox, program: str, *arguments: str, **options: Any) -> ExecResult:
    return await sandbox.run_program(program, arguments, **{"timeout_s": 20.0, **options})


async def test_a_program_runs_like_a_python_script(sandbox: LocalSandbox) -> None:
    assert isinstance(sandbox, ProgramRunner)
    program = (
        "import os, sys; print(sys.argv[1:], sys.stdin.read(), __name__, os.getcwd()); sys.stderr.write('\\ud800')"
    )
    result = await run(sandbox, program, "a b", "'", stdin="ä".encode())
    assert (result.exit_code, result.stdout.decode()) == (0, "['a b', \"'\"] ä __main__ /\n")
    assert result.stderr == b"\\ud800"


@pytest.mark.parametrize(
    ("program", "exit_code", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise SystemExit(256 + 3)", 3, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("1 +", 126, "cannot run the program: invalid syntax"),
        ("import os; os.kill(os.getpid(), 9)", 137, ""),
        ("import hashlib", 1, "No module named 'hashlib'"),
    ],
)
async def test_a_program_exits_like_a_python_script(
    sandbox: LocalSandbox, program: str, exit_code: int, said: str
) -> None:
    result = await run(sandbox, program)
    assert result.exit_code == exit_code
    assert said in result.stderr.decode()
    assert bool(result.stderr) == bool(said)


async def test_preloaded_modules_can_be_imported(sandbox: LocalSandbox) -> None:
    result = await run(sandbox, f"import {', '.join(sorted(PRELOADED))}\nprint(json.dumps(re.findall('a', 'aa')))")
    assert (result.stdout, result.stderr) == (b'["a", "a"]\n', b"")


async def test_a_program_has_its_users_limits_and_inherits_nothing_from_the_launcher(sandbox: LocalSandbox) -> None:
    program = "import os, json; print(json.dumps([os.getuid(), os.getgid(), dict(os.environ), os.getpid() > 1]))"
    for user in ("root", "agent"):
        uid, gid, environment, is_child = json.loads((await run(sandbox, program, user=user)).stdout)
        told = await sandbox.exec("id -u; id -g; ulimit -n; ulimit -u", user=user, timeout_s=20)
        assert told.stdout.split()[:2] == [str(uid).encode(), str(gid).encode()]
        assert environment.keys() == {"PATH", "HOME", "USER", "LANG"}
        assert is_child
    descriptors = await run(sandbox, "import os, json; print(json.dumps(os.listdir('/proc/self/fd')))")
    # The last descriptor is the folder that is being listed.
    assert sorted(map(int, json.loads(descriptors.stdout)))[:3] == [0, 1, 2]
    assert len(json.loads(descriptors.stdout)) == 4


async def test_a_timeout_kills_a_program_and_its_children(sandbox: LocalSandbox) -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(600)"
    with pytest.raises(ExecTimeout):
        await run(sandbox, program, timeout_s=0.5)
    left = await sandbox.exec("ls -d /proc/[0-9]*", timeout_s=20)
    # Only the first process and those of this command.
    assert len(left.stdout.split()) <= 3


async def test_programs_run_in_an_image_without_python(provider: LocalProvider, tmp_path: Path) -> None:
    image = kit.Layout().image([kit.tar(kit.base_entries())]).write(tmp_path / "layout")
    sandbox = await provider.attach(await provider.create(SandboxSpec(image=str(image))))
    assert (await sandbox.exec("command -v python3", timeout_s=20)).exit_code == 1
    assert (await run(sandbox, "print(6 * 7)")).stdout == b"42\n"
    await sandbox.kill()


ATTACKER = """
import ctypes, os, resource, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
done = []
def attack(way, pid):
    try:
        done.append(way(pid))
    except OSError:
        done.append(False)
def trace(pid):
    return libc.ptrace(16, pid, 0, 0) == 0
def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while not (is_stopped := "State:\\tT" in open(f"/proc/{pid}/status").read()) and pid != 1:
        pass
    return is_stopped
def limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)) is not None
def rewrite(pid):
    return os.open(f"/proc/{pid}/mem", os.O_RDWR) >= 0
def forks():  # of the first process that have not become another program
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"]
    return [pid for pid in pids if open(f"/proc/{pid}/comm").read() == open("/proc/1/comm").read()]
target = 1
while sys.argv[1] == "fork" and target == 1:
    target = max(forks(), default=1)
for way in (trace, stop, limit, rewrite):
    attack(way, target)
print(done)
"""


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_agents_cannot_prevent_the_first_process_from_running_programs(sandbox: LocalSandbox, user: str) -> None:
    attacked = await sandbox.exec(["/usr/bin/python3", "-c", ATTACKER, "first"], user=user, timeout_s=20)
    assert attacked.stdout == b"[False, False, False, False]\n", attacked
    assert (await run(sandbox, "print(6 * 7)")).stdout == b"42\n"


async def test_a_program_can_be_stopped_by_its_user_but_not_read_or_rewritten(sandbox: LocalSandbox) -> None:
    """Its output is unchanged, and a program that is stopped ends at its timeout."""
    program = "import os\nwhile not os.path.exists('/tmp/attacked'):\n    pass"
    [attacked, outcome] = await asyncio.gather(
        sandbox.exec(["/usr/bin/python3", "-c", f"{ATTACKER}open('/tmp/attacked', 'w')", "fork"], timeout_s=20),
        run(sandbox, program, timeout_s=5),
        return_exceptions=True,
    )
    assert isinstance(attacked, ExecResult)
    assert attacked.stdout == b"[False, True, True, False]\n", attacked
    assert isinstance(outcome, ExecTimeout)


async def test_a_program_has_no_access_to_the_launchers_secrets(provider: LocalProvider, sandbox: LocalSandbox) -> None:
    """The secrets of the launcher and of other sandboxes are not among the objects of the fork.

    They are passed to the program in disguise, because its arguments are objects too.
    """
    other = await provider.create(SandboxSpec())
    program = (
        "import sys, json\n"
        "import gc\n"
        "gc.unfreeze()\n"
        "wanted = set(sys.argv[1:])\n"
        "texts = [value for thing in gc.get_objects() for value in gc.get_referents(thing) if type(value) is str]\n"
        "print(json.dumps([len(texts), [text for text in texts if text[::-1] in wanted]]))\n"
    )
    disguised = [secret[::-1] for secret in (other.secret, sandbox._ref.secret)]
    count, found = json.loads((await run(sandbox, program, *disguised, timeout_s=60)).stdout)
    assert count > 1000
    assert found == []


@pytest.mark.parametrize("path", ["relative", "/proc/version", "/etc", "/dev/null/x"])
async def test_an_impossible_first_write_is_refused_like_any_later_one(sandbox: LocalSandbox, path: str) -> None:
    with pytest.raises(SandboxFileError) as first:
        await sandbox.write_many({"/workspace/before": b"1", path: b"2"})
    await sandbox.exec("true", timeout_s=20)
    with pytest.raises(SandboxFileError) as later:
        await sandbox.write_many({"/workspace/before": b"1", path: b"2"})
    assert str(first.value) == str(later.value)
    assert await sandbox.read("/workspace/before", max_bytes=10) == b"1"


@pytest.mark.parametrize("files", [None, 7, [7], [["/workspace/a"]], [["/workspace/a", "x"]], [[1, 1]], [[None, None]]])
async def test_an_invalid_first_write_does_not_kill_the_sandbox(sandbox: LocalSandbox, files: object) -> None:
    with pytest.raises(SandboxFileError):
        await sandbox._file_operation({"op": "write", "files": files, "user": "root"}, b"1", 4096)
    assert (await sandbox.exec("echo alive", timeout_s=20)).stdout == b"alive\n"


async def test_a_first_write_has_the_same_effect_as_a_later_one(sandbox: LocalSandbox) -> None:
    listing = "stat -c '%a %u %g %s %n' /workspace/{0} /workspace/{0}/deep /workspace/{0}/deep/file"
    told = []
    for name in ("a", "b"):
        await sandbox.write_many({f"/workspace/{name}/deep/file": b"x" * 70_000})
        told.append(
            (await sandbox.exec(listing.format(name), timeout_s=20)).stdout.replace(b"/workspace/" + name.encode(), b"")
        )
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 3


async def test_the_launcher_reports_command_costs(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(labels={"purpose": "busy"})))
    await sandbox.write_many({"/workspace/a": b"1"})
    await sandbox.exec("n=0; while ((n < 200000)); do ((n += 1)); done", timeout_s=60)
    await run(sandbox, "sum(range(3_000_000))")
    costs = await provider.command_costs()
    await sandbox.kill()
    assert {name: count for name, (count, _) in costs.items() if name.startswith("busy.")} == {
        "busy.write": 1,
        "busy.exec": 1,
        "busy.run": 1,
    }
    assert costs["busy.exec"][1] > costs["busy.write"][1]
    assert costs["busy.run"][1] > costs["busy.write"][1]
