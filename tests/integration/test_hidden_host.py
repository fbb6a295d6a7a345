"""What a sandbox can learn about its host from /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.sandboxes.base import HostFolder, SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from support import image_kit as kit

pytestmark = pytest.mark.namespaces

NAME = "a-name-of-the-host"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text()
MOUNTS = "cat /proc/*/mountinfo /proc/*/mounts /proc/*/mountstats 2> /dev/null; true"
# Files of the kernel whose contents would describe the machine; /proc/net belongs to the sandbox's own network.
CONTENTS = """
for file in /proc/*; do
  case "$file" in /proc/[0-9]*|/proc/self|/proc/thread-self|/proc/net|/proc/sys|/proc/sysvipc) continue;; esac
  [ -d "$file" ] && find "$file" -type f || { [ -n "$(head -c 1 "$file" 2> /dev/null)" ] && echo "$file"; }
done; true
"""
SHOWN = {
    f"/proc/{name}"
    for name in ("cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "stat", "uptime", "version", "vmstat")
}


def host_devices() -> set[str]:
    """Devices that hold the host's file systems, as its own mount table names them."""
    sources = {line.split(" - ")[1].split(" ")[1] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return {source for source in sources if source.startswith("/")}


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("image", ["host", "image"])
async def test_neither_mounts_nor_files_in_proc_name_the_host(tmp_path: Path, image: str, on_disk: bool) -> None:
    home = tmp_path / NAME
    (home / "tools").mkdir(parents=True)
    (home / "tools" / "say").write_text("said")
    (home / "layers").mkdir()
    reference = "host"
    if image == "image":
        (home / "image.tar").write_bytes(kit.tar(kit.base_entries()))
        reference = str(home / "image.tar")
    # Sockets need a short path, so they stay in the usual folder.
    config = LocalSandboxConfig(image_folder=home / "images", layers_in=home / "layers" if on_disk else None)
    folder = HostFolder(source=str(home / "tools"), target="/opt/tools")
    async with LocalProvider(config) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec(image=reference, folders=(folder,))))

        async def output(command: str) -> str:
            result = await sandbox.exec(command, timeout_s=30)
            assert result.exit_code == 0, result
            return result.stdout.decode()

        assert await output("cat /opt/tools/say") == "said"
        mounts = await output(MOUNTS)
        assert "/opt/tools" in mounts
        assert NAME not in mounts
        assert host_devices() & set(mounts.split()) == set()
        groups = [line.split(":", 2)[2] for line in (await output("cat /proc/self/cgroup")).splitlines()]
        assert groups
        assert set(groups) <= {"/", "/commands", "/../commands"}
        assert set((await output(CONTENTS)).split()) <= SHOWN
        assert await output("cat /proc/loadavg") == "0.00 0.00 0.00 1/1 1\n"
        for counter in ("fs/file-nr", "fs/inode-nr", "fs/inode-state", "fs/dentry-state", "fs/aio-nr", "kernel/pty/nr"):
            assert await output(f"cat /proc/sys/{counter}") == ""
        boot_id = await output("cat /proc/sys/kernel/random/boot_id")
        assert boot_id != BOOT_ID
        assert len(boot_id) == 37


async def test_root_in_the_sandbox_cannot_uncover_or_change_what_is_covered() -> None:
    async with LocalProvider() as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        for attempt in ("umount /proc/cmdline", "umount -l /proc/loadavg", "mount -t proc proc /mnt"):
            assert (await sandbox.exec(attempt, timeout_s=30)).exit_code != 0, attempt
        for attempt in ("echo x > /proc/cmdline", "chmod 777 /proc/loadavg", "chown 1000 /proc/loadavg"):
            assert (await sandbox.exec(attempt, timeout_s=30)).exit_code != 0, attempt
        other = await provider.attach(await provider.create(SandboxSpec()))
        assert (await other.exec("cat /proc/cmdline", timeout_s=30)).stdout == b""
