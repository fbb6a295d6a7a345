# ruff: noqa: PTH120
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Entry point of the launcher process, a single-threaded Python process with only the standard library.

Invariants:
- Before it serves, it has a private root, its memory cannot be inspected, and its command line shows no path.
- Without root, it becomes root of a user namespace with one id, and its sandboxes have no other user. It gets control
  groups only where its user has been given one: memory, cpu and pause in a group that systemd delegated.
- It reads one line of settings and writes one line, which states that it is ready or why this machine cannot isolate
  sandboxes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from headrace.sandboxes.launcher.booter import Booter
from headrace.sandboxes.launcher.connections import Secrets
from headrace.sandboxes.launcher.fork_server import ForkServer
from headrace.sandboxes.launcher.guest import SUDO_PATH, SUDO_SCRIPT
from headrace.sandboxes.launcher.sandbox_record import Settings
from headrace.sandboxes.linux import rootfs, syscalls
from headrace.sandboxes.linux.cgroups import Cgroups
from headrace.sandboxes.linux.seccomp import fillers
from headrace.sandboxes.linux.syscalls import reason_of

_BACKLOG: Final = 1024


def main() -> None:
    """Read the settings from standard input, report on standard output in one line of JSON, then serve."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 4096)
        if not part:
            sys.exit(1)
        line += part
    document = json.loads(line)
    secrets = Secrets(document.pop("admin_secret"))
    settings = Settings(**document)
    # From here on, dying from SIGTERM would leave control groups behind. The server unblocks the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        server = _prepare(settings, secrets)
    except OSError as error:
        os.write(1, json.dumps({"error": reason_of(error)}).encode() + b"\n")
        sys.exit(1)
    server.handle_signals()
    os.write(1, json.dumps({"missing": server.missing}).encode() + b"\n")
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)
    server.serve()


def _prepare(settings: Settings, secrets: Secrets) -> ForkServer:
    os.umask(0o022)
    # A sandbox may need about 40 descriptors: its channel, results of commands, maps of ids.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(settings.socket_path)
    listener.listen(_BACKLOG)
    groups = Cgroups.of_this_process()
    try:
        # Opened now: the host's files are out of reach behind the launcher's own root.
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        layers, flags = settings.layers_in, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        layers_folder = os.open(layers, flags) if layers else -1
        ids_folder = os.open(settings.ids_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        single_id = os.geteuid() != 0
        if single_id:
            syscalls.enter_own_user_namespace()
        base, programs = os.path.dirname(settings.socket_path), {SUDO_PATH.removeprefix("/usr/"): SUDO_SCRIPT}
        host = rootfs.build_launcher_root(base, single_id=single_id, programs=programs)
        syscalls.name_process(f"headrace-launcher {settings.label}")
        syscalls.become_subreaper()
        syscalls.forbid_inspection()
        for filler in fillers():
            # A kernel that has no filters has none inside either.
            with suppress(OSError):
                syscalls.filter_calls(filler)
        folders = {"layers_folder": layers_folder, "ids_folder": ids_folder}
        booter = Booter(settings, host, groups, **folders, own_pids=own_pids, single_id=single_id)
    except BaseException:
        groups.close()
        raise
    # Forked children then share the memory pages of all objects made so far.
    gc.collect()
    gc.freeze()
    gc.disable()
    return ForkServer(settings, secrets, booter, listener)
