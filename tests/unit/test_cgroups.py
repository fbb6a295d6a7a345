"""Lookup of control groups on hosts and in containers, of version 1, version 2 and both."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.sandboxes.linux.cgroup_placement import LEAF, place
from headrace.sandboxes.linux.cgroups import CgroupMount, find_mounts, is_orphan
from headrace.sandboxes.linux.processes import parse_stat
from headrace.sandboxes.linux.syscalls import reason_of

HYBRID = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
"""


def test_the_mounts_on_a_hybrid_host_are_found() -> None:
    own = "5:devices:/\n4:memory:/jobs/one\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n"
    assert find_mounts(HYBRID, own) == [
        CgroupMount(1, frozenset({"cpu", "cpuacct"}), "/sys/fs/cgroup/cpu,cpuacct"),
        CgroupMount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory/jobs/one"),
        CgroupMount(2, frozenset(), "/sys/fs/cgroup/unified"),
    ]


def test_the_mount_on_a_version_2_host_is_found() -> None:
    mountinfo = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    own = "0::/user.slice/user-0.slice/session-1.scope\n"
    folder = "/sys/fs/cgroup/user.slice/user-0.slice/session-1.scope"
    assert find_mounts(mountinfo, own) == [CgroupMount(2, frozenset(), folder)]


def test_a_container_sees_its_own_group_as_the_root_of_the_mount() -> None:
    mountinfo = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    assert find_mounts(mountinfo, "4:memory:/docker/abc\n") == [
        CgroupMount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory")
    ]
    assert find_mounts(mountinfo, "4:memory:/docker/abc/inner\n") == [
        CgroupMount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory/inner")
    ]


def test_only_groups_left_by_dead_launchers_in_our_pid_namespace_are_orphans() -> None:
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    own, started = os.getpid(), parse_stat(Path("/proc/self/stat").read_text()).started
    assert not is_orphan(f"headrace-{namespace}-{own}-{started}")
    assert is_orphan(f"headrace-{namespace}-{own}-{started + 1}")
    assert is_orphan(f"headrace-{namespace}-{1 << 30}-{started}")


@pytest.mark.parametrize("name", ["headrace-peer-12-ab", "headrace-12-34", "headrace-1-2-3-4", "x", "headrace-4-x-5"])
def test_groups_with_foreign_names_are_not_removed(name: str) -> None:
    assert not is_orphan(name)


def test_groups_from_another_pid_namespace_are_not_removed() -> None:
    assert not is_orphan(f"headrace-1-{1 << 30}-5")


def test_a_control_group_error_names_its_errno_and_the_path() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Path("/nowhere/cgroup.procs").read_text()
    assert reason_of(caught.value) == "ENOENT: /nowhere/cgroup.procs: No such file or directory"
    assert reason_of(OSError(errno.EBUSY, "mount tmpfs on /x: busy")) == "EBUSY: mount tmpfs on /x: busy"
    assert reason_of(OSError(0, "EBUSY: within")) == "EBUSY: within"


ALL = frozenset({"memory", "cpu", "pids"})


def a_group(folder: Path, *, is_root: bool = False, processes: str = "1\n77\n", controllers: str = "") -> Path:
    """Make the files of a group as the kernel shows them; unlike the kernel's they retain what is written."""
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(controllers or "cpuset cpu io memory pids\n")
    (folder / "cgroup.subtree_control").write_text("")
    (folder / "cgroup.procs").write_text(processes)
    if not is_root:
        (folder / "cgroup.type").write_text("domain\n")
    return folder


def test_processes_in_a_container_move_into_a_leaf_before_controllers_are_enabled(tmp_path: Path) -> None:
    own = a_group(tmp_path / "mount")
    place(str(own), ALL)
    assert (own / LEAF / "cgroup.procs").read_text() == "77"
    assert set((own / "cgroup.subtree_control").read_text().split()) == {"+cpu", "+memory", "+pids"}


def test_processes_in_the_real_root_group_are_never_moved(tmp_path: Path) -> None:
    own = a_group(tmp_path / "mount", is_root=True)
    place(str(own), ALL)
    assert not (own / LEAF).exists()


def test_processes_in_a_non_delegated_unit_are_not_moved(tmp_path: Path) -> None:
    root = a_group(tmp_path / "mount", is_root=True)
    unit = a_group(root / "ssh.service")
    if os.geteuid() != 0:
        unit.joinpath("cgroup.procs").write_text("1\n")
    place(str(unit), ALL)
    assert not (unit / LEAF).exists()


def test_groups_are_created_below_a_delegated_unit(tmp_path: Path) -> None:
    root = a_group(tmp_path / "mount", is_root=True)
    unit = a_group(root / "headrace.service")
    try:
        os.setxattr(unit, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"{tmp_path} keeps no extended attributes: {error.strerror}")
    assert place(str(unit), ALL).folder == str(unit)
    assert (unit / LEAF).exists()
    # A later launcher is a child of a process that was moved.
    assert place(str(unit / LEAF), ALL).folder == str(unit)


def test_invisible_processes_are_not_moved_and_the_reason_is_reported(tmp_path: Path) -> None:
    own = a_group(tmp_path / "mount", processes="1\n0\n")
    found = place(str(own), ALL)
    assert not (own / LEAF).exists()
    assert found.reasons["memory"].startswith(f"EBUSY: {own}/cgroup.procs: processes of another pid namespace")


def test_an_undelegated_controller_is_reported_with_its_file(tmp_path: Path) -> None:
    own = a_group(tmp_path / "mount", controllers="cpu pids\n")
    assert place(str(own), ALL).reasons["memory"].startswith(f"ENOENT: {own}/cgroup.controllers: ")
