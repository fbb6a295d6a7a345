"""What sandboxes for E2B's clients have in addition: the account `user`, files, and `sudo`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.sandboxes.base import ExecResult, Guest, Sandbox, SandboxSpec, TerminalSize
from headrace.sandboxes.errors import ExecTimeout, ImageRefused, SpecRefused, Unsupported
from headrace.sandboxes.launcher.sudo import SudoRefused, parse_sudo
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider
from support import image_kit as kit

pytestmark = pytest.mark.namespaces

FILES = {"/run/e2b/.E2B_SANDBOX": "true"}
PROGRAMS = ("/bin/sh", "/usr/bin/env", "/usr/bin/stat", "/usr/bin/grep", "/usr/bin/sort", "/bin/echo", "/bin/pwd")


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        yield provider


async def boot(provider: LocalProvider, *, image: str = "host", guest: Guest | None = None) -> Sandbox:
    spec = SandboxSpec(image=image, guest=guest or Guest(files=FILES))
    return await provider.attach(await provider.create(spec))


async def run(sandbox: Sandbox, command: str, user: str = "user", timeout_s: float = 30.0) -> ExecResult:
    return await sandbox.exec(command, user=user, timeout_s=timeout_s)


async def said(sandbox: Sandbox, command: str, user: str = "user") -> str:
    result = await run(sandbox, command, user)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def image_with(tmp_path: Path, *more: kit.Entry) -> str:
    path = tmp_path / "image.tar"
    path.write_bytes(kit.tar((*kit.base_entries(*PROGRAMS), *more)))
    return str(path)


ACCOUNTS = "root:x:0:0::/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/bash\nother:x:7:7::/:/bin/sh"


@pytest.mark.parametrize("image", ["host", "image"])
async def test_the_account_its_home_and_the_files_exist(provider: LocalProvider, tmp_path: Path, image: str) -> None:
    accounts = kit.file("etc/passwd", ACCOUNTS.encode())
    sandbox = await boot(provider, image=image if image == "host" else image_with(tmp_path, accounts))
    assert await said(sandbox, "id -u; id -g; id -un; echo $HOME; cd; echo x > f; stat -c '%U %n' f") == (
        "1000\n1000\nuser\n/home/user\nuser f"
    )
    assert await said(sandbox, "cat /run/e2b/.E2B_SANDBOX") == "true"
    if image != "host":
        assert await said(sandbox, "id -u other", "root") == "7"
        assert (await run(sandbox, "echo > /run/e2b/.E2B_SANDBOX")).exit_code != 0


async def test_an_account_of_the_image_is_kept(provider: LocalProvider, tmp_path: Path) -> None:
    accounts = kit.file("etc/passwd", b"root:x:0:0::/root:/bin/bash\nuser:x:1234:1234::/srv/user:/bin/bash\n")
    sandbox = await boot(provider, image=image_with(tmp_path, accounts))
    assert await said(sandbox, "id -u; echo $HOME") == "1234\n/srv/user"


async def test_account_files_that_lead_elsewhere_are_refused(provider: LocalProvider, tmp_path: Path) -> None:
    image = image_with(tmp_path, kit.link("etc/passwd", "/proc/sys/kernel/hostname"))
    with pytest.raises(ImageRefused, match="/etc/passwd of the image"):
        await boot(provider, image=image)
    assert await provider.list() == []


@pytest.mark.parametrize("image", ["host", "image"])
async def test_sudo_runs_commands_as_root_with_the_callers_streams(
    provider: LocalProvider, tmp_path: Path, image: str
) -> None:
    sandbox = await boot(provider, image=image if image == "host" else image_with(tmp_path))
    assert await said(sandbox, "sudo id -u") == "0"
    result = await run(sandbox, "cd /tmp; echo in | sudo sh -c 'pwd; cat; echo err >&2; exit 7'")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"/tmp\nin\n", b"err\n")
    # Standard input is passed on, not read ahead.
    assert await said(sandbox, "printf '1\\n2\\n' | while read -r line; do sudo -n echo $line; done") == "1\n2"
    assert await said(sandbox, "sudo -- touch /etc/made; stat -c %U /etc/made") == "root"
    assert await said(sandbox, "A=1 B=2 C=3 sudo --preserve-env=B D=4 env | grep -E '^[ABCD]='") == "B=2\nD=4"
    assert await said(sandbox, "A=1 sudo -nE env | grep -E '^(A|HOME|SUDO_USER)=' | sort") == (
        "A=1\nHOME=/root\nSUDO_USER=user"
    )
    assert await said(sandbox, "cd /tmp; sudo -i pwd; sudo -s pwd; sudo -D / pwd; sudo -u user id -un") == (
        "/root\n/tmp\n/\nuser"
    )
    assert (await run(sandbox, "sudo bash -c 'kill -9 $$'")).exit_code == 137
    assert await said(sandbox, "sudo cat <&-") == ""
    assert await said(sandbox, "sudo id -u", "root") == "0"


async def test_sudo_works_in_a_terminal(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    process = await sandbox.spawn(["sudo", "tty"], user="user", terminal=TerminalSize())
    shown = b"".join([piece.data async for piece in process.output()])
    assert (shown.strip(), await process.wait()) == (b"/dev/pts/0", 0)


async def test_a_command_of_sudo_ends_with_its_caller(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    with pytest.raises(ExecTimeout):
        await run(sandbox, "sudo sleep 1000", timeout_s=1)
    assert (await run(sandbox, "sudo true; ! pgrep -x sleep", "root")).exit_code == 0


@pytest.mark.parametrize("command", ["sudo", "sudo -b true", "sudo -g tty true", "sudo --no-such true"])
async def test_what_sudo_does_not_support_is_refused_by_name(provider: LocalProvider, command: str) -> None:
    sandbox = await boot(provider)
    result = await run(sandbox, command)
    assert result.exit_code == 1
    assert b"usage: sudo" in result.stderr


async def test_other_accounts_cannot_use_sudo_unless_they_are_in_its_group(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    result = await run(sandbox, "sudo true", "nobody")
    assert (result.exit_code, b"neither" in result.stderr) == (1, True)
    await run(sandbox, "echo 'sudo:x:27:nobody' >> /etc/group", "root")
    assert await said(sandbox, "sudo id -u", "nobody") == "0"


# A process of `user` that waits with descriptor 3 open to the first process, and another account that names its pid.
ANOTHERS_PID = """
exec 3<> /dev/tcp/127.0.0.2/49982
echo "$1" >&3
IFS= read -r -u 3 answer
echo "$answer"
"""


async def test_nobody_can_ask_in_the_name_of_another_process(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    waiting = await sandbox.spawn(
        "exec 3<> /dev/tcp/127.0.0.2/49982; echo ready; exec sleep 1000", user="user", timeout_s=60
    )
    async for piece in waiting.output():
        assert piece.data == b"ready\n"
        break
    result = await sandbox.exec(f"bash -c '{ANOTHERS_PID}' x {waiting.pid}", user="nobody", timeout_s=30)
    assert f"process {waiting.pid} did not ask for this" in result.stdout.decode()
    for text in ("x", "99999999999999999999", "-1", "0"):
        result = await sandbox.exec(f"bash -c '{ANOTHERS_PID}' x {text}", user="nobody", timeout_s=30)
        assert result.stdout == b"\n", text
    assert await said(sandbox, "sudo id -u") == "0"


async def test_silent_connections_do_not_keep_others_out(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    hold = 'for n in $(seq 20 60); do eval "exec $n<> /dev/tcp/127.0.0.2/49982"; done; echo held; exec sleep 1000'
    holding = await sandbox.spawn(hold, user="nobody", timeout_s=60)
    async for piece in holding.output():
        assert piece.data == b"held\n"
        break
    results = await asyncio.gather(*(said(sandbox, "sudo id -u") for _ in range(8)))
    assert results == ["0"] * 8


async def test_without_the_policy_there_is_no_sudo(provider: LocalProvider) -> None:
    sandbox = await boot(provider, guest=Guest(sudo=False))
    result = await run(sandbox, "sudo id -u")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        b"",
        b"sudo: refused by the policy of this sandbox\n",
    )
    plain = await provider.attach(await provider.create(SandboxSpec()))
    assert (await run(plain, "ls /run/e2b; id user", "root")).exit_code != 0
    assert (
        await run(plain, "grep -s headrace /usr/bin/sudo; exec 3<> /dev/tcp/127.0.0.2/49982", "root")
    ).exit_code != 0


@pytest.mark.parametrize("guest", [Guest(user="a:b"), Guest(user=""), Guest(files={"relative": "x"})])
async def test_bad_guests_are_refused(provider: LocalProvider, guest: Guest) -> None:
    with pytest.raises(SpecRefused, match="guest"):
        await boot(provider, guest=guest)


async def test_providers_without_the_feature_refuse_a_guest() -> None:
    with pytest.raises(Unsupported, match="guest"):
        await SimulatedProvider().create(SandboxSpec(guest=Guest()))


def test_an_assignment_is_not_a_command() -> None:
    order = parse_sudo(["-u", "user", "A=b=c", "make", "X=1"])
    assert (order.command, order.user, order.env) == (["make", "X=1"], "user", {"A": "b=c"})
    with pytest.raises(SudoRefused, match="usage"):
        parse_sudo(["A=1"])
