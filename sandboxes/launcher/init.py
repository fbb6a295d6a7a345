# ruff: noqa: PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""Process 1 of a sandbox: builds it, then starts its commands and reaps its orphans until it is killed.

Invariants:
- Forked from the launcher into a new pid namespace; it never runs anything of the agent's in itself.
- It dies with the launcher (parent-death signal, and the end of its control socket), and all of the sandbox with it.
- Nobody inside can trace it (not dumpable, memory owned by the first user namespace), set its limits (a user id of its
  own; not without root), stop it or kill it: no signal it handles ends it, and the kernel shields process 1 from the
  others.
- Every command has a deadline kept here; at the deadline its tree is ended. Where new processes keep appearing, every
  process but this one is: nothing inside can end the sandbox itself, for then whoever is about to be scored would be
  taken for a failure of the host.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from headrace.sandboxes.kernel import host_limits, processes, rootfs, syscalls
from headrace.sandboxes.kernel.disk_layers import mount_disk_layer
from headrace.sandboxes.launcher import commands
from headrace.sandboxes.launcher.wire import Channel, ChannelClosed, close_all

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.commands import Limits

# chown, dac_override, fowner, fsetid, kill, setgid, setuid: what root needs for chown, su and package files.
KEPT_CAPABILITIES: Final = (0, 1, 3, 4, 5, 6, 7)
_NAMESPACES: Final = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
_BACKLOG: Final = 128
_OOM_SCORE: Final = b"500"
RESERVED_PROCESSES: Final = host_limits.RESERVED_PROCESSES - 1
"""Above the limit of one user, so that a user who has reached it still gets commands to clean up with."""


class Plan(NamedTuple):
    """All that the first process needs to know, settled before the fork."""

    root: rootfs.Root
    host: rootfs.HostImage
    limits: Limits
    layers_folder: int
    """A folder of the host's disk for the file layer, or -1: the layer lies in memory and is there."""
    last_capability: int
    call_filter: bytes | None


class _Running:
    """A child of init that somebody waits for."""

    __slots__ = ("deadline", "operation", "started", "tag", "timed_out")

    def __init__(self, tag: int, operation: str, deadline: float) -> None:
        self.tag = tag
        self.operation = operation
        self.started = time.monotonic()
        self.deadline = deadline
        self.timed_out = False


def run_init(plan: Plan, control: socket.socket, commands_group: int) -> NoReturn:
    """Build the sandbox, tell the launcher, serve. `commands_group` moves who writes to it into the control group of
    the commands, or is -1."""
    channel = Channel(control)
    if plan.root.single_id:
        # Nobody else is in here yet.
        syscalls.allow_inspection()
    # Opened by real root: later this process has no right to the files of /proc that are its own.
    oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        _build(plan, channel)
    except rootfs.MountRefused as error:
        _report_failure(channel, "FrozenPathRefused", str(error))
    except rootfs.ImageUnusable as error:
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
    syscalls.unshare(_NAMESPACES)
    socket.sethostname("sandbox")
    rootfs.raise_loopback()
    rootfs.limit_shared_memory(plan.limits.shared_memory_bytes)
    if plan.layers_folder >= 0:
        _mount_disk_layer(plan, channel)
    rootfs.build_sandbox_root(plan.root, plan.host)
    close_all(plan.root.all_id_maps)
    _enter_user_namespace(plan)
    channel.send({"event": "unmapped"})
    _wait_for_word(channel)
    if not plan.root.single_id:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    # The saved one stays the host's, which nobody inside can have: who shares all three may set this process's limits
    # (prlimit(2)), and with them end it.
    os.setresuid(0, 0, 0 if plan.root.single_id else -1)
    # A nested user namespace would give all capabilities back, over namespaces of the agent's own.
    _write("/proc/sys/user/max_user_namespaces", "0")
    syscalls.drop_capabilities(KEPT_CAPABILITIES, plan.last_capability)
    syscalls.forbid_new_privileges()
    if plan.call_filter is not None:
        syscalls.filter_calls(plan.call_filter)
    syscalls.die_with_parent(signal.SIGKILL)


def _mount_disk_layer(plan: Plan, channel: Channel) -> None:
    """Slow, so it is done here; the launcher gets a copy of the mount, to show it to others when this one is dead."""
    path = f"{rootfs.LAYERS}/{plan.root.sandbox_id}"
    mount_disk_layer(plan.layers_folder, plan.limits.layer_bytes, path, plan.root.base_id, rootfs.DEVICES)
    os.close(plan.layers_folder)
    channel.send({"event": "layer"}, (syscalls.copy_mount(path),))


def _enter_user_namespace(plan: Plan) -> None:
    """The process limit of its maker bounds a user namespace as a whole (set_userns_rlimit_max in kernel/ucount.c), if
    that is not root: otherwise an agent that changes its user would have the limit of one user for each of 65,536."""
    if plan.root.single_id:
        # Nobody else may write its map.
        syscalls.enter_own_user_namespace()
        syscalls.forbid_inspection()
        return
    syscalls.keep_capabilities_as(plan.root.base_id)
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    everything = plan.limits.processes + RESERVED_PROCESSES
    resource.setrlimit(
        resource.RLIMIT_NPROC, (everything if hard == resource.RLIM_INFINITY else min(everything, hard), hard)
    )
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def _wait_for_word(channel: Channel) -> None:
    """The launcher says one thing during the boot: the ids are mapped. Its death ends this process."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        while not channel.receive():
            poll.poll()
    except ChannelClosed:
        os._exit(1)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class _Init:
    """The loop of process 1: one control socket, one wake-up pipe, the running commands by pid."""

    def __init__(self, plan: Plan, channel: Channel, wake: int, oom_score: int, commands_group: int) -> None:
        self._limits = plan.limits
        self._image = plan.root.image
        self._oom_score = oom_score
        self._commands_group = commands_group
        self._channel = channel
        self._wake = wake
        self._running: dict[int, _Running] = {}
        self._untouched = not plan.root.mounts
        """Nobody's code ever ran in here, and no files of a sandbox in which some did are shown."""

    def serve(self) -> NoReturn:
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.register(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.backlog else 0))
            poll.poll(self._wait_ms())
            # A pause can fall on any line here. Its word lies in the channel before the time after it can be seen.
            now = time.monotonic()
            try:
                self._channel.flush()
                self._take_messages()
                self._reap()
                if not self._has_message():
                    self._expire(now)
            except ChannelClosed:
                os._exit(0)

    def _has_message(self) -> bool:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _wait_ms(self) -> int | None:
        deadlines = [running.deadline for running in self._running.values() if not running.timed_out]
        first = min(deadlines, default=math.inf)
        if first == math.inf:
            return None
        # poll(2) takes 31 bits.
        return min(max(0, int((first - time.monotonic()) * 1000) + 1), 1 << 30)

    def _take_messages(self) -> None:
        for message, descriptors in self._channel.receive():
            match message["op"]:
                case "cancel":
                    self._cancel(int(message["tag"]))
                case "paused":
                    self._extend(float(message["seconds"]))
                case "listen":
                    self._listen(int(message["tag"]), int(message["port"]))
                case "signal":
                    self._signal(int(message["tag"]), int(message["number"]))
                case _:
                    self._start(message, descriptors)
            close_all(descriptors)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        tag = int(message["tag"])
        if self._untouched and message["op"] == "write" and commands.is_small_write(message, descriptors[0]):
            # Nothing in here can hold this process up, or lead it astray.
            self._channel.send({"tag": tag, "timed_out": False, **commands.write_now(message, descriptors)})
            return
        self._untouched = False
        try:
            pid = self._fork()
        except OSError as error:
            # Its processes may be used up by the agent: that is a result of the command, not a failure of the host.
            with suppress(OSError):
                os.write(descriptors[2], f"cannot run the command: {error}\n".encode())
            self._channel.send(
                {"tag": tag, "exit_code": commands.EXIT_CANNOT_RUN, "duration_s": 0.0, "timed_out": False}
            )
            return
        if pid == 0:
            self._become_child(message, descriptors)
        timeout_s = message["timeout_s"]
        deadline = math.inf if timeout_s is None else time.monotonic() + float(timeout_s)
        self._running[pid] = _Running(tag, message["op"], deadline)
        if message["op"] == "spawn":
            self._channel.send({"tag": tag, "started": pid})

    def _fork(self) -> int:
        """When memory runs out, commands go before this process, and before whoever trains on them."""
        os.write(self._oom_score, _OOM_SCORE)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                os.write(self._oom_score, b"0")
        return pid

    def _become_child(self, message: dict[str, Any], descriptors: list[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        try:
            if self._commands_group >= 0:
                os.write(self._commands_group, b"0")
            os.closerange(3, 1 << 20)
            if message["op"] in ("exec", "spawn"):
                commands.run_command(message, self._limits, self._image)
            elif message["op"] == "run":
                commands.run_program(message, self._limits)
            elif message["op"] == "read":
                commands.read_file(message, self._limits)
            commands.write_files(message, self._limits)
        finally:
            # The loop of process 1 must never go on in a child, whatever was wrong with the message.
            os._exit(commands.EXIT_CANNOT_RUN)

    def _cancel(self, tag: int) -> None:
        for pid, running in self._running.items():
            if running.tag == tag:
                self._end(pid, running)

    def _listen(self, tag: int, port: int) -> None:
        """Hand out a listener on the sandbox's own loopback: whoever accepts from it need not be in here."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            listener.close()
            self._channel.send({"tag": tag, "error": "SpecRefused", "message": f"port {port}: {error}"})
        else:
            self._channel.send({"tag": tag}, (listener.detach(),))

    def _extend(self, seconds: float) -> None:
        """The sandbox stood still for so long."""
        for running in self._running.values():
            running.deadline += seconds

    def _signal(self, tag: int, number: int) -> None:
        for pid, running in self._running.items():
            if running.tag != tag:
                continue
            if number == signal.SIGKILL:
                self._kill(pid)
            else:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _expire(self, now: float) -> None:
        for pid, running in list(self._running.items()):
            if running.deadline <= now and not running.timed_out:
                self._end(pid, running)

    def _end(self, pid: int, running: _Running) -> None:
        running.timed_out = True
        self._kill(pid)

    def _kill(self, pid: int) -> None:
        if not processes.kill_tree(pid, strays=len(self._running) == 1):
            # kill(2): a signal to -1 spares the caller, and no fork that is under way escapes it.
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    def _reap(self) -> None:
        _drain(self._wake)
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            running = self._running.pop(pid, None)
            if running is not None:
                self._report(running, status, usage.ru_utime + usage.ru_stime)

    def _report(self, running: _Running, status: int, cpu_s: float) -> None:
        code = os.waitstatus_to_exitcode(status)
        self._channel.send(
            {
                "tag": running.tag,
                "exit_code": code if code >= 0 else 128 - code,
                "duration_s": time.monotonic() - running.started,
                "timed_out": running.timed_out,
                "cost": (running.operation, cpu_s),
            }
        )


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
