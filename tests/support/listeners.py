"""Listeners of the processes that this one sees: their addresses, and the credentials that they ask for.

`python -m support.listeners` prints those of a host of namespaces, as JSON lists of process, address, credential, port.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil

RAY_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/NumPendingTasks",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.RayletDriver/ClusterInfo",
)
RAY_TOKEN = "Ray's token"
ENGINE_CALLS = (
    *(("POST", path) for path in ("/generate", "/pause_generation", "/abort_request", "/update_weights_from_disk")),
    *(("POST", path) for path in ("/init_weights_update_group", "/begin_weight_update", "/update_weight_version")),
    *(("GET", path) for path in ("/model_info", "/server_info", "/v1/loads", "/flush_cache")),
)
ADMIN_CALLS = (("POST", "/sessions"), ("POST", "/sessions/some/finish"))


class Listener(NamedTuple):
    process: str
    address: str
    credential: str


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
    if (listed := answer(base, "GET", "/sandboxes"))[0] == 401:
        assert answer(base, "POST", "/sandboxes")[0] == 401, listed
        return "a key of `--keys`"
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


_OTHERWISE = {"learner": "-", "sender of weights": "-", "Ray client server": "not shown"}
"""Stores and gloo answer no stranger, and count whoever connects."""
_NAMES = {
    "gcs_server": "control service",
    "raylet": "raylet",
    "ray::DashboardAgent": "agent",
    "ray::RuntimeEnvAgent": "agent",
    "ray::DashboardHead": "dashboard",
    "dashboard/dashboard.py": "dashboard",
    "monitor.py": "metrics of the autoscaler",
    "ray.util.client.server": "Ray client server",
    "headrace.policies.cpu_engine": "engine",
    "headrace.policies.push.sender": "sender of weights",
    "serve sandbox": "sandbox server",
}


def name_of(process: psutil.Process, address: str) -> str:
    """Return the name of a process of a cluster's host, as docs/listeners.md has it."""
    command = " ".join(process.cmdline())
    for mark, name in _NAMES.items():
        if mark == process.name() or mark in command:
            return name
    if command.startswith("ray::"):
        if address != "loopback":
            # Each worker of Ray has a port for calls of its actor.
            return "raylet"
        return "learner" if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text() else "gateway"
    return command


def main() -> None:
    """Print the listeners, except those of processes that end meanwhile."""
    found = []
    for process in psutil.process_iter():
        try:
            for connection in process.net_connections("inet"):
                if connection.status != psutil.CONN_LISTEN:
                    continue
                ip, port = connection.laddr
                name = name_of(process, address_of(ip))
                credential = _OTHERWISE.get(name) or credential_of(ip, port)
                found.append((name, address_of(ip), credential, port))
        except (psutil.Error, OSError, AssertionError) as error:
            print(f"{process}: {error!r}", file=sys.stderr)
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
