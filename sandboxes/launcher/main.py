# ruff: noqa: PTH120
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""The launcher process: an exec'd, single-threaded Python with the standard library only, made ready to serve.

Invariants:
- Its root is a private one before it serves, its memory cannot be inspected, and its command line names no path.
- Without root it is root of a user namespace with one id: its sandboxes have no other user. It has control groups
  where its user was given one: in a group that systemd delegated, memory, cpu and pause.
- It reads one line of settings and writes one line: ready, or why this machine cannot isolate.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import Final

from headrace.sandboxes.kernel import rootfs, syscalls
from headrace.sandboxes.kernel.cgroups import Cgroups
from headrace.sandboxes.kernel.reasons import reason_of
from headrace.sandboxes.launcher.boots import Boots
from headrace.sandboxes.launcher.fork_server import ForkServer
from headrace.sandboxes.launcher.launcher_secrets import Secrets
from headrace.sandboxes.launcher.settings import Settings

_BACKLOG: Final = 1024


def main() -> None:
    """Entry of the exec'd process: settings on standard input, one line of JSON on standard output when it serves."""
    document = json.loads(_read_line(0))
    secrets = Secrets(document.pop("admin_secret"))
    settings = Settings(**document)
    # From here on it leaves control groups behind if it just dies. The server unblocks the signal.
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


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 4096)
        if not part:
            sys.exit(1)
        line += part
    return line


def _prepare(settings: Settings, secrets: Secrets) -> ForkServer:
    os.umask(0o022)
    # A sandbox may take some 40: its channel, results of commands, maps of ids.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(settings.socket_path)
    listener.listen(_BACKLOG)
    groups = Cgroups.of_this_process()
    try:
        boots = _make_boots(settings, groups)
    except BaseException:
        groups.close()
        raise
    # Forked children then share the pages of all objects made so far.
    gc.collect()
    gc.freeze()
    gc.disable()
    return ForkServer(settings, secrets, boots, listener)


def _make_boots(settings: Settings, groups: Cgroups) -> Boots:
    """Leave the host's file tree."""
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    layers_folder = os.open(settings.layers_in, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if settings.layers_in else -1
    ids_folder = os.open(settings.ids_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    single_id = os.geteuid() != 0
    if single_id:
        syscalls.enter_own_user_namespace()
    host = rootfs.build_launcher_root(os.path.dirname(settings.socket_path))
    syscalls.name_process(f"headrace-launcher {settings.label}")
    syscalls.become_subreaper()
    syscalls.forbid_inspection()
    folders = {"layers_folder": layers_folder, "ids_folder": ids_folder}
    return Boots(settings, host, groups, **folders, own_pids=own_pids, single_id=single_id)
