# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""First process of a sandbox: builds it, then starts its commands and reaps its orphans until it is killed.

Invariants:
- It is forked from the launcher into a new pid namespace and never runs any of the agent's code itself.
- It dies with the launcher (parent-death signal, and end of its control socket), and the whole sandbox dies with it.
- Nobody inside can trace it (not dumpable, memory owned by the first user namespace), set its limits (it has a user id
  of its own, except without root), stop it or kill it: no signal that it handles ends it, and the kernel shields
  process 1 from the others.
- Every command has a deadline, enforced here: when it passes, the command's process tree is killed. If new processes
  keep appearing, every process but this one is killed. Nothing inside can end the sandbox itself, because an agent that
  is about to be scored could otherwise make its own exit look like a host failure.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn

from headrace.sandboxes.launcher import commands
from headrace.sandboxes.launcher.commands import Limits
from headrace.sandboxes.launcher.guest import GuestFiles, GuestProblem, add_guest
from headrace.sandboxes.launcher.sudo import SudoRequests, run_sudo
from headrace.sandboxes.launcher.wire import Channel, ChannelClosed, Message, close_all
from headrace.sandboxes.linux import host_limits, processes, rootfs, syscalls
from headrace.sandboxes.linux.disk_layers import mount_disk_layer

# chown, dac_override, fowner, fsetid, kill, setgid, setuid: root needs them for chown, su and package files.
KEPT_CAPABILITIES: Final = (0, 1, 3, 4, 5, 6, 7)
_NAMESPACES: Final = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
_BACKLOG: Final = 128
_SOCKET_BYTES: Final = 128 << 10
_OOM_SCORE: Final = b"500"
RESERVED_PROCESSES: Final = host_limits.RESERVED_PROCESSES - 1
"""Processes allowed above one user's limit, so that a user who has reached it can still run commands to clean up."""


class Plan(NamedTuple):
    """Everything that the first process needs to know, determined before the fork."""

    root: rootfs.Root
    host: rootfs.HostImage
    limits: Limits
    layers_folder: int
    """Descriptor of the folder on the host's disk for the file layer, or -1 if the layer is in memory and already
    mounted."""
    last_capability: int
    call_filter: bytes | None
    guest: GuestFiles | None
    host_network: bool


class _Running:
    """Child of the first process for which somebody is waiting, who gets `answer(result)`."""

    __slots__ = ("answer", "deadline", "operation", "started", "tag", "timed_out")

    def __init__(self, tag: int, operation: str, deadline: float, answer: Callable[[Message], None]) -> None:
        self.tag = tag
        self.operation = operation
        self.answer = answer
        self.started = time.monotonic()
        self.deadline = deadline
        self.timed_out = False


def run_init(plan: Plan, control: socket.socket, commands_group: int) -> NoReturn:
    """Build the sandbox, report to the launcher, and serve. `commands_group` is a descriptor that moves a process which
    writes to it into the control group of the commands, or -1."""
    channel = Channel(control)
    if plan.root.single_id:
        # Safe because no other process is in the sandbox yet.
        syscalls.allow_inspection()
    # Opened as real root: later this process has no access to its own files in /proc.
    oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        _build(plan, channel)
    except rootfs.MountRefused as error:
        _report_failure(channel, "FrozenPathRefused", str(error))
    except (rootfs.ImageUnusable, GuestProblem) as error:
        _report_failure(channel, "ImageRefused", str(error))
    except OSError as error:
        _report_failure(channel, "BootFailed", str(error))
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    channel.send({"event": "ready"})
    _Init(plan, channel, wake_read, oom_score, commands_group).serve()


def _report_failure(channel: Channel, name: str, message: str) -> NoReturn:
    channel.send({"event": "failed", "error": name, "message": message})
    os._exit(1)


def _build(plan: Plan, channel: Channel) -> None:
    syscalls.unshare(_NAMESPACES if plan.host_network else _NAMESPACES | syscalls.CLONE_NEWNET)
    socket.sethostname("sandbox")
    if not plan.host_network:
        rootfs.raise_loopback()
    rootfs.limit_shared_memory(plan.limits.shared_memory_bytes)
    if plan.layers_folder >= 0:
        # Mounted here because it is slow. The launcher gets a copy of the mount, to show it to other sandboxes when
        # this process is dead.
        path = f"{rootfs.LAYERS}/{plan.root.sandbox_id}"
        mount_disk_layer(plan.layers_folder, plan.limits.layer_bytes, path, plan.root.base_id, rootfs.DEVICES)
        os.close(plan.layers_folder)
        channel.send({"event": "layer"}, (syscalls.copy_mount(path),))
    rootfs.build_sandbox_root(plan.root, plan.host)
    close_all(plan.root.all_id_maps)
    if plan.root.single_id:
        # Only this process may write the map of its own namespace.
        syscalls.enter_own_user_namespace()
        syscalls.forbid_inspection()
    else:
        # The process limit of its creator, unless that is root, bounds a user namespace as a whole
        # (set_userns_rlimit_max in kernel/ucount.c). Otherwise an agent that changes its user would have the limit of
        # one user for each of 65,536.
        syscalls.keep_capabilities_as(plan.root.base_id)
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        total = plan.limits.processes + RESERVED_PROCESSES
        limit = total if hard == resource.RLIM_INFINITY else min(total, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    channel.send({"event": "unmapped"})
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        # The launcher's only message during the boot: the ids are mapped.
        while not channel.receive():
            poll.poll()
    except ChannelClosed:
        os._exit(1)
    if not plan.root.single_id:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    # The saved user id stays the host's, which nobody inside can have: a process with all three ids the same could set
    # this process's limits (prlimit(2)) and end it that way.
    os.setresuid(0, 0, 0 if plan.root.single_id else -1)
    # A nested user namespace would give all capabilities back, over namespaces of the agent's own.
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="utf-8") as file:
        file.write("0")
    syscalls.drop_capabilities(KEPT_CAPABILITIES, plan.last_capability)
    syscalls.forbid_new_privileges()
    if plan.call_filter is not None:
        syscalls.filter_calls(plan.call_filter)
    syscalls.die_with_parent(signal.SIGKILL)
    if plan.guest is not None:
        add_guest(plan.guest, shows_host=plan.root.image.shows_host, single_id=plan.root.single_id)


def _kill_all() -> None:
    # kill(2): a signal to -1 spares the caller, and no concurrent fork escapes it.
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


class _Init:
    """Event loop of process 1: a control socket, a wake-up pipe, and the running commands by pid."""

    def __init__(self, plan: Plan, channel: Channel, wake: int, oom_score: int, commands_group: int) -> None:
        self._limits = plan.limits
        self._image = plan.root.image
        self._oom_score = oom_score
        self._commands_group = commands_group
        self._channel = channel
        self._wake = wake
        self._running: dict[int, _Running] = {}
        offers_sudo = plan.guest is not None and plan.guest.sudo and not (plan.root.single_id or plan.host_network)
        self._sudo = SudoRequests(channel, self._start_sudo) if offers_sudo else None
        self._untouched = not plan.root.mounts
        """True while no client code has run inside, and no files are mounted from a sandbox in which client code has
        run."""

    def serve(self) -> NoReturn:
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.register(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.backlog else 0))
            if self._sudo is not None:
                self._sudo.register(poll)
            deadlines = (running.deadline for running in self._running.values() if not running.timed_out)
            first = min(deadlines, default=math.inf)
            # poll(2) takes 31 bits.
            wait_ms = min(max(0, (first - time.monotonic()) * 1000 + 1), 1 << 30)
            poll.poll(None if first == math.inf else int(wait_ms))
            # The sandbox can be paused at any line here. The message about the pause is in the channel before a time
            # after the pause can be read: nothing expires while a message waits.
            now = time.monotonic()
            try:
                self._channel.flush()
                self._take_messages()
                self._reap()
                if self._sudo is not None:
                    self._sudo.take()
                waiting = select.poll()
                waiting.register(self._channel.fileno(), select.POLLIN)
                if not waiting.poll(0):
                    for pid, running in list(self._running.items()):
                        if running.deadline <= now and not running.timed_out:
                            self._end(pid, running)
            except ChannelClosed:
                os._exit(0)

    def _take_messages(self) -> None:
        for message, descriptors in self._channel.receive():
            named = [(pid, running) for pid, running in self._running.items() if running.tag == message.get("tag")]
            match message["op"]:
                case "cancel":
                    for pid, running in named:
                        self._end(pid, running)
                case "paused":
                    for running in self._running.values():
                        running.deadline += float(message["seconds"])
                case "end_commands":
                    _kill_all()
                case "socket":
                    # It stays in this network wherever it is connected from.
                    self._give_socket(message, socket.AF_INET6 if message["ipv6"] is True else socket.AF_INET, None)
                case "listen":
                    # A listener on the sandbox's own loopback: the process that accepts from it need not be inside.
                    self._give_socket(message, socket.AF_INET, int(message["port"]))
                case "lent":
                    assert self._sudo is not None
                    self._sudo.lend(message, descriptors)
                case "signal":
                    for pid, _ in named:
                        if message["number"] == signal.SIGKILL:
                            self._kill(pid)
                        else:
                            with suppress(ProcessLookupError):
                                os.kill(pid, int(message["number"]))
                case _:
                    self._start(message, descriptors)
            close_all(descriptors)

    def _give_socket(self, message: Message, family: socket.AddressFamily, port: int | None) -> None:
        """Answer with a TCP socket of this network: a listener on `port`, or one that its receiver connects."""
        tag = int(message["tag"])
        made = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            if port is None:
                # What waits in it is memory of the sandbox that no command owns.
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            else:
                made.bind(("127.0.0.1", port))
                made.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            if made is not None:
                made.close()
            self._channel.send({"tag": tag, "error": "SpecRefused", "message": f"port {port}: {error}"})
        else:
            self._channel.send({"tag": tag}, (made.detach(),))

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        tag = int(message["tag"])
        if self._untouched and message["op"] == "write" and commands.is_small_write(message, descriptors[0]):
            # No process of the agent can delay this write or redirect it.
            self._channel.send({"tag": tag, "timed_out": False, **commands.write_now(message, descriptors)})
            return
        self._untouched = False
        pid = self._fork(tag, message, descriptors, lambda result: self._channel.send({"tag": tag, **result}))
        if message["op"] == "spawn" and pid:
            self._channel.send({"tag": tag, "started": pid})

    def _start_sudo(
        self, message: Message, descriptors: Sequence[int], answer: Callable[[Message], None]
    ) -> Callable[[], None]:
        pid = self._fork(0, message, descriptors, answer)
        return lambda: self._kill(pid) if pid in self._running else None

    def _fork(self, tag: int, message: Message, descriptors: Sequence[int], answer: Callable[[Message], None]) -> int:
        """Start a child and return its pid, or 0 if no process can be made."""
        pid = -1
        try:
            # When memory runs out, commands are killed before this process, and before the trainer on the same host.
            os.write(self._oom_score, _OOM_SCORE)
            try:
                pid = os.fork()
            finally:
                if pid != 0:
                    os.write(self._oom_score, b"0")
        except OSError as error:
            # The agent may have used up its processes: that is a result of the command, not a failure of the host.
            with suppress(OSError):
                os.write(descriptors[2], f"cannot run the command: {error}\n".encode())
            answer({"exit_code": commands.EXIT_CANNOT_RUN, "duration_s": 0.0, "timed_out": False})
            return 0
        if pid == 0:
            self._become_child(message, descriptors)
        timeout_s = message["timeout_s"]
        deadline = math.inf if timeout_s is None else time.monotonic() + float(timeout_s)
        self._running[pid] = _Running(tag, message["op"], deadline, answer)
        return pid

    def _become_child(self, message: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            if self._commands_group >= 0:
                os.write(self._commands_group, b"0")
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(len(descriptors), 1 << 20)
            if message["op"] == "sudo":
                run_sudo(message, self._limits, self._image)
            if message["op"] in ("exec", "spawn"):
                commands.run_command(message, self._limits, self._image)
            elif message["op"] == "run":
                commands.run_program(message, self._limits)
            elif message["op"] == "read":
                commands.read_file(message, self._limits)
            commands.write_files(message, self._limits)
        finally:
            # The loop of process 1 must never continue in a child, whatever was wrong with the message.
            os._exit(commands.EXIT_CANNOT_RUN)

    def _end(self, pid: int, running: _Running) -> None:
        running.timed_out = True
        self._kill(pid)

    def _kill(self, pid: int) -> None:
        if not processes.kill_tree(pid, strays=len(self._running) == 1):
            _kill_all()

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            running = self._running.pop(pid, None)
            if running is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            running.answer(
                {
                    "exit_code": code if code >= 0 else 128 - code,
                    "duration_s": time.monotonic() - running.started,
                    "timed_out": running.timed_out,
                    "cost": (running.operation, usage.ru_utime + usage.ru_stime),
                }
            )
