"""Pure parts of the sandboxes: leases, process trees, accounts, framing, path mapping, errors."""

from __future__ import annotations

import os
import pickle
import socket
import struct

import pytest

from headrace.sandboxes import errors
from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.sandboxes.launcher.commands import FileProblem, find_account
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.launcher.wire import Channel, ChannelClosed
from headrace.sandboxes.linux.id_blocks import IdRanges
from headrace.sandboxes.linux.processes import ProcessEntry, parse_stat, tree_of
from headrace.sandboxes.linux.rootfs import MountRefused, check_target
from headrace.sandboxes.linux.seccomp import filter_program


def test_renewed_deadlines_replace_old_ones() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 10.0)
    deadlines.set("b", 5.0)
    deadlines.set("a", 3.0)
    deadlines.set("b", 7.0)
    assert deadlines.next() == 3.0
    assert deadlines.remaining("b", 5.0) == 2.0
    assert deadlines.pop_due(6.0) == ["a"]
    deadlines.drop("b")
    assert deadlines.next() is None
    assert deadlines.pop_due(100.0) == []


def test_id_ranges_do_not_overlap_and_are_freed_by_their_last_holder() -> None:
    blocks = iter([100_000, 100_000_000])

    def claim() -> int:
        try:
            return next(blocks)
        except StopIteration:
            raise IndexError("none left") from None

    ranges = IdRanges(65_536, 2, claim)
    first, *others = (ranges.take() for _ in range(4))
    assert {first, *others} == {100_000, 165_536, 100_000_000, 100_065_536}
    with pytest.raises(IndexError):
        ranges.take()
    ranges.share(first)
    ranges.release(first)
    with pytest.raises(IndexError):
        ranges.take()
    ranges.release(first)
    assert ranges.take() == first


def test_a_process_name_cannot_forge_its_parent() -> None:
    entry = parse_stat("77 (evil) Z 1 1 (x) S 42 " + " ".join(str(number) for number in range(5, 60)))
    assert entry.parent == 42
    assert (entry.state, entry.threads) == ("S", 20)
    assert entry.started == 22


def entry(parent: int, started: int = 10, state: str = "S", threads: int = 1) -> ProcessEntry:
    return ProcessEntry(parent=parent, state=state, threads=threads, started=started)


def test_the_process_tree_includes_descendants_and_optionally_strays() -> None:
    entries = {
        10: entry(1),
        11: entry(10),
        12: entry(11),
        13: entry(11, state="Z"),
        14: entry(11, state="Z", threads=2),
        20: entry(1, started=5),
        21: entry(20),
        30: entry(1, started=11),
        31: entry(30),
    }
    assert tree_of(10, entries, strays=False) == {10, 11, 12, 14}
    assert tree_of(10, entries, strays=True) == {10, 11, 12, 14, 30, 31}
    assert tree_of(99, entries, strays=True) == set()


PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1001:a:/home/agent:/bin/bash\nbroken\nodd:x:a:b:c:d:e\n"
GROUP = "tools:x:50:root,agent\nother:x:51:\n"


def test_accounts_are_found_by_name_and_number() -> None:
    agent = find_account("agent", PASSWD, GROUP)
    assert (agent.user_id, agent.group_id, agent.groups, agent.home) == (1000, 1001, (1001, 50), "/home/agent")
    assert find_account("7:8", PASSWD, GROUP).groups == (8,)
    assert find_account("7", "", "").group_id == 7
    for passwd in ("", "root:x:1000:1000::/home:/bin/bash"):
        assert find_account("root", passwd, "")[:2] == (0, 0)
    for unknown in ("odd", "nobody", "", "-1", "1:x"):
        with pytest.raises(FileProblem):
            find_account(unknown, PASSWD, GROUP)


@pytest.mark.parametrize("target", ["workspace", "/", "/a/../usr", "/usr/bin", "/proc/x", "/etc", "/lib64/x", "/dev"])
def test_mount_targets_that_cover_system_paths_are_refused(target: str) -> None:
    with pytest.raises(MountRefused):
        check_target(target)


def test_other_mount_targets_are_allowed() -> None:
    assert check_target("/workspace") == ["workspace"]
    assert check_target("/data//x/") == ["data", "x"]


def channel_pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(left), Channel(right)


def test_the_channel_keeps_messages_and_their_descriptors_together() -> None:
    left, right = channel_pair()
    read_end, write_end = os.pipe()
    left.send({"number": 1})
    left.send({"number": 2}, [write_end])
    left.send({"number": 3})
    received: list[tuple[dict[str, object], list[int]]] = []
    while len(received) < 3:
        received += right.receive()
    assert [message["number"] for message, _ in received] == [1, 2, 3]
    assert [len(descriptors) for _, descriptors in received] == [0, 1, 0]
    passed = received[1][1][0]
    os.write(passed, b"through")
    os.close(passed)
    # The sender closed its own copy, so the pipe ends here.
    assert os.read(read_end, 100) == b"through"
    assert os.read(read_end, 100) == b""
    os.close(read_end)
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive()
    right.close()


def test_the_channel_buffers_data_that_the_socket_does_not_accept() -> None:
    left, right = channel_pair()
    big = "x" * 2_000_000
    left.send({"text": big})
    left.send({"text": "after"})
    assert left.backlog
    received: list[tuple[dict[str, object], list[int]]] = []
    while len(received) < 2:
        left.flush()
        received += right.receive()
    assert [message["text"] for message, _ in received] == [big, "after"]
    assert not left.backlog
    left.close()
    right.close()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\0\0\0\x01x", b"\0\0\0\x02[]", b'\0\0\0\x09{"fds":1}'])
def test_the_channel_refuses_invalid_data(garbage: bytes) -> None:
    left, right = channel_pair()
    left.socket.sendall(garbage)
    with pytest.raises(ChannelClosed):
        right.receive()
    left.close()
    right.close()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_call_filter_has_a_valid_target(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    instructions = list(struct.iter_unpack("=HBBI", program))
    for position, (code, if_true, if_false, _) in enumerate(instructions):
        if code & 7 == 5:
            assert position + 1 + max(if_true, if_false) < len(instructions)
    assert instructions[-1][0] == 6
    assert filter_program("other") is None


def all_errors() -> list[errors.SandboxError]:
    plain = [kind("why") for kind in (*leaves(errors.TransientSandboxError), *leaves(errors.PermanentSandboxError))]
    return [*plain, errors.CapacityExceeded("full", 2.5)]


def leaves(kind: type[errors.SandboxError]) -> list[type[errors.SandboxError]]:
    return [leaf for child in kind.__subclasses__() for leaf in (child, *leaves(child))]


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled(error: errors.SandboxError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert error.transient == isinstance(error, errors.TransientSandboxError)


def test_refs_are_picklable_and_hide_their_secret() -> None:
    ref = SandboxRef(provider="local", id=SandboxId("x"), endpoint="/e", secret="hush")
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert "hush" not in repr(ref)
