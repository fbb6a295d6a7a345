"""Every listener of a running quickstart: its address and the credential that it asks for, as in docs/listeners.md."""

from __future__ import annotations

import http.client
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import psutil
import pytest

from support import run_rig as rig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
RAY_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/NumPendingTasks",
    "/ray.rpc.ReporterService/GetTraceback",
)
RAY_TOKEN = "Ray's token"
ENGINE_CALLS = (
    *(("POST", path) for path in ("/generate", "/pause_generation", "/abort_request", "/update_weights_from_disk")),
    *(("POST", path) for path in ("/init_weights_update_group", "/begin_weight_update", "/update_weight_version")),
    *(("GET", path) for path in ("/model_info", "/server_info", "/v1/loads", "/flush_cache")),
)
ADMIN_CALLS = (("POST", "/sessions"), ("POST", "/sessions/some/finish"))
PROCESSES = {
    "gcs_server": "Ray's control service",
    "raylet": "raylet",
    "ray::DashboardAgent": "Ray's dashboard agent",
    "ray::RuntimeEnvAgent": "Ray's runtime environment agent",
    "headrace.policies.cpu_engine": "engine",
    "headrace.policies.push.sender": "sender of weights",
}


class Listener(NamedTuple):
    process: str
    address: str
    credential: str


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


def address_of(ip: str) -> str:
    if ip in ("127.0.0.1", "::1"):
        return "loopback"
    return "every interface" if ip in ("::", "0.0.0.0") else "this host's address"


def credential_of(ip: str, port: int) -> str:
    """What a request without a credential is told."""
    host = "127.0.0.1" if ip in ("::", "0.0.0.0") else ip
    channel = grpc.insecure_channel(f"{host}:{port}")
    try:
        grpc.channel_ready_future(channel).result(timeout=3)
        codes = {refusal(channel, call) for call in RAY_CALLS}
        if grpc.StatusCode.UNAVAILABLE in codes:
            raise ConnectionError(f"the process at {host}:{port} ended: it is asked again if it is still there")
        assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}, (ip, port, codes)
        return RAY_TOKEN if grpc.StatusCode.UNAUTHENTICATED in codes else "none"
    except grpc.FutureTimeoutError:
        return http_credential(f"http://{host}:{port}")
    finally:
        channel.close()


def refusal(channel: grpc.Channel, call: str) -> grpc.StatusCode:
    try:
        channel.unary_unary(call)(b"", timeout=60)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def http_credential(base: str) -> str:
    """Engines and Ray's agents refuse every path; the gateway refuses a turn."""
    status, text = answer(base, "GET", "/")
    if status == 401 and b"--key-file" in text:
        assert {answer(base, *call)[0] for call in ENGINE_CALLS} == {401}
        assert {answer(base, *call, key="0123456789abcdef")[0] for call in ENGINE_CALLS} == {401}
        return "the engines' key"
    if status == 401:
        return RAY_TOKEN
    if b"session is unknown" in answer(base, "POST", "/v1/messages")[1]:
        assert {answer(base, *call, key="0123456789abcdef")[0] for call in ADMIN_CALLS} == {401}
        return "the session's token"
    return "none"


def answer(base: str, method: str, path: str, key: str | None = None) -> tuple[int, bytes]:
    """Status and text of an answer; (0, b"") if there is none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        base + path, data=b"{}" if method == "POST" else None, method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


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
