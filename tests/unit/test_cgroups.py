"""Where control groups are found on hosts and in containers, of version 1, 2 and both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.sandboxes.launcher.cgroups import Mount, find_mounts, is_orphan
from headrace.sandboxes.launcher.processes import parse_stat

HYBRID = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
"""


def test_a_hybrid_host() -> None:
    own = "5:devices:/\n4:memory:/jobs/one\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n"
    assert find_mounts(HYBRID, own) == [
        Mount(1, frozenset({"cpu", "cpuacct"}), "/sys/fs/cgroup/cpu,cpuacct"),
        Mount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory/jobs/one"),
        Mount(2, frozenset(), "/sys/fs/cgroup/unified"),
    ]


def test_a_host_of_version_2() -> None:
    mountinfo = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    own = "0::/user.slice/user-0.slice/session-1.scope\n"
    folder = "/sys/fs/cgroup/user.slice/user-0.slice/session-1.scope"
    assert find_mounts(mountinfo, own) == [Mount(2, frozenset(), folder)]


def test_a_container_sees_its_own_group_as_the_root_of_the_mount() -> None:
    mountinfo = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    assert find_mounts(mountinfo, "4:memory:/docker/abc\n") == [
        Mount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory")
    ]
    assert find_mounts(mountinfo, "4:memory:/docker/abc/inner\n") == [
        Mount(1, frozenset({"memory"}), "/sys/fs/cgroup/memory/inner")
    ]


def test_only_groups_of_dead_launchers_of_our_own_pid_namespace_are_orphans() -> None:
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    own, started = os.getpid(), parse_stat(Path("/proc/self/stat").read_text()).started
    assert not is_orphan(f"headrace-{namespace}-{own}-{started}")
    assert is_orphan(f"headrace-{namespace}-{own}-{started + 1}")
    assert is_orphan(f"headrace-{namespace}-{1 << 30}-{started}")


@pytest.mark.parametrize("name", ["headrace-peer-12-ab", "headrace-12-34", "headrace-1-2-3-4", "x", "headrace-4-x-5"])
def test_groups_of_others_are_left_alone(name: str) -> None:
    assert not is_orphan(name)


def test_groups_of_another_pid_namespace_are_left_alone() -> None:
    assert not is_orphan(f"headrace-1-{1 << 30}-5")
