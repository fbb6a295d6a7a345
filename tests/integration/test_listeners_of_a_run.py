"""Every listener of a running quickstart: its address and the credential that it asks for, as in docs/listeners.md."""

from __future__ import annotations

import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import run_rig as rig
from support.listeners import Listener, address_of, credential_of

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PROCESSES = {
    "gcs_server": "Ray's control service",
    "raylet": "raylet",
    "ray::DashboardAgent": "Ray's dashboard agent",
    "ray::RuntimeEnvAgent": "Ray's runtime environment agent",
    "headrace.policies.cpu_engine": "engine",
    "headrace.policies.push.sender": "sender of weights",
}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[psutil.Process]:
    """The process that drives a small quickstart."""
    options = ("--runs-dir", str(tmp_path), "--name", "run", "--quiet", "--set", "training.steps=500")
    process = rig.start_driver("run", str(rig.RECIPE), *rig.small_arguments(), *options)
    try:
        yield psutil.Process(process.pid)
        # It drains; how much it had learned does not matter here.
        process.terminate()
        _, errors = process.communicate(timeout=200)
        assert process.returncode in (0, 4), errors.decode()
    finally:
        process.kill()
        process.communicate()


def sockets(driver: psutil.Process) -> Iterator[tuple[psutil.Process, Any]]:
    for process in [driver, *driver.children(recursive=True)]:
        try:
            for connection in process.net_connections("all"):
                yield process, connection
        except psutil.Error:
            continue


def name_of(process: psutil.Process, address: str, driver: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for mark, name in PROCESSES.items():
        if mark in (process.name(), command.strip()) or f"-m {mark} " in f"{command} ":
            return name
    if process == driver:
        return "driver"
    if not command.startswith("ray::") or address != "loopback":
        return "actor" if command.startswith("ray::") else command
    return "learner" if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text() else "gateway"


def documented() -> set[Listener]:
    section = (ROOT / "docs/listeners.md").read_text().partition("## A local run")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {Listener(*row) for row in rows if row[0] not in ("process", "---")}


def test_every_listener_is_documented_with_its_address_and_credential(driver: psutil.Process) -> None:
    table = documented()
    # The sender listens during a push only: test_listeners.py of the unit tests looks at its store.
    expected = {row.process for row in table} - {"sender of weights"}
    known: dict[tuple[int, int], Listener] = {}
    missing = expected
    deadline = time.monotonic() + 240
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE and missing:
        assert time.monotonic() < deadline, missing
        for process, connection in sockets(driver):
            if connection.family == socket.AF_UNIX or connection.status != psutil.CONN_LISTEN:
                continue
            ip, port = connection.laddr
            if (process.pid, port) in known:
                continue
            try:
                name = name_of(process, address_of(ip), driver)
                # Stores and gloo answer no stranger, and count whoever connects.
                credential = "none" if name in ("sender of weights", "learner") else credential_of(ip, port)
            except (psutil.Error, OSError):
                continue
            known[process.pid, port] = Listener(name, address_of(ip), credential)
        refuse_open_unix_sockets(driver)
        missing = expected - {row.process for row in known.values()}
    assert set(known.values()) <= table, set(known.values()) - table
    assert not missing


def refuse_open_unix_sockets(driver: psutil.Process) -> None:
    """Each lies below a folder that only this user may enter."""
    for _, connection in sockets(driver):
        path = Path(str(connection.laddr)) if connection.family == socket.AF_UNIX and connection.laddr else None
        if path is not None and path.is_socket() and "session_" in str(path):
            # Ray's start itself makes its folder wide, for as long as it lasts.
            continue
        assert path is None or not path.is_socket() or is_private(path), path


def is_private(path: Path) -> bool:
    return any(stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0 for folder in path.parents)
