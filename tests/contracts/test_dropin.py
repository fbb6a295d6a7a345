"""The drop-in exec-server and pool contract over plain HTTP, without the defects of the original servers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.actors.evaluation.graders.patch import apply_patch
from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from headrace.serve.sandbox_servers.exec.server import ExecPart
from support.cutting_proxy import cutting_proxy

pytestmark = pytest.mark.namespaces
REPOSITORY = """
set -e
mkdir -p /testbed && cd /testbed
git init -q .
printf 'def add(a, b):\\n    return a - b\\n' > calc.py
mkdir tests
printf 'import sys\\nsys.path.insert(0, ".")\\nfrom calc import add\\nassert add(2, 3) == 5\\n' > tests/test_calc.py
git add -A
git -c user.name=x -c user.email=x@example.org commit -qm base
"""
EVALUATE = "python3 tests/test_calc.py"


@dataclass(slots=True, kw_only=True)
class Client:
    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as response:
            assert response.status == 200
            return await response.json()

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        async with self.http.post(self.url + path, json=body) as response:
            document = await response.json()
            assert response.status == status, document
            assert (document["ok"] is True) == (status == 200), document
            return document

    async def lease(self, **body: Any) -> str:
        return str((await self.post("/allocate", **{"image": "host", "instance_id": "i-1", **body}))["lease_id"])

    async def output(self, lease: str, command: str, **body: Any) -> str:
        reply = await self.post("/exec", lease_id=lease, command=command, **{"cwd": "/testbed", **body})
        assert reply["returncode"] == 0, reply
        return str(reply["output"]).strip()


LEASE_S = 5.0


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(max_sandboxes=3)) as local:
        yield local


@pytest.fixture
async def url(local: LocalProvider, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    lease_s, key = getattr(request, "param", (600.0, ""))
    write_private(tmp_path / "keys", f"alice:{key or 'none'}\n".encode())
    keys = load_keys(tmp_path / "keys" if key else None)
    settings = ServerSettings(serve_e2b=False, keys=keys, images=ImageMap({"task:latest": "host"}))
    part = ExecPart(
        provider=local,
        settings=settings,
        apis=frozenset({"exec", "dropin"}),
        lease_s=lease_s,
        apply_patch=apply_patch,
    )
    async with E2bServer(local, settings, [part]) as server:
        yield server.url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(url=url, http=http)


@pytest.fixture
async def image(url: str) -> str:
    """An image with a repository that has a defect."""
    async with RemoteProvider(RemoteConfig(url=url)) as remote:
        sandbox = await remote.attach(await remote.create(SandboxSpec()))
        made = await sandbox.exec(REPOSITORY, timeout_s=60)
        assert made.exit_code == 0, made
        return await sandbox.snapshot()


async def test_all_node_requests_are_answered(client: Client, image: str) -> None:
    assert await client.get("/healthz") == {"ok": True, "running_containers": "0"}
    assert await client.get("/images") == {"ok": True, "images": ["base", "task:latest"], "count": 2}
    made = await client.post("/container/create", image=image, cwd="/testbed", timeout=120)
    assert made.keys() == {"ok", "container_id", "name"}
    one = {"container_id": made["container_id"]}
    (shown,) = (await client.get("/status"))["containers"].items()
    assert shown[0] == one["container_id"]
    assert shown[1].keys() == {"name", "image", "created_at"}
    reply = await client.post("/container/exec", **one, command="echo out; echo $X >&2; exit 3", env={"X": "err"})
    assert reply == {"ok": True, "returncode": 3, "output": "out\nerr\n"}
    await client.post("/container/exec", **one, command="sed -i s/-/+/ calc.py")
    diff = await client.post("/container/diff", **one, cwd="/testbed")
    assert (diff["returncode"], diff["error"]) == (0, "")
    assert "+    return a + b" in diff["patch"]
    verdict = await client.post("/container/evaluate", **one, patch=diff["patch"], eval_script=EVALUATE, timeout=60)
    assert verdict == {"ok": True, "resolved": True, "returncode": 0, "output": ""}
    assert await client.post("/container/destroy", **one) == {"ok": True}
    assert await client.post("/container/destroy", **one) == {"ok": True}
    await client.post("/container/exec", 404, **one, command="true")


async def test_all_pool_requests_are_answered(client: Client, image: str) -> None:
    made = await client.post("/allocate", image=image, instance_id="django-1")
    assert made.keys() == {"ok", "lease_id", "container_id", "node_url"}
    assert made["node_url"] == client.url
    lease = {"lease_id": made["lease_id"]}
    assert await client.post("/heartbeat", **lease) == {"ok": True}
    assert (await client.get("/status"))["pool"]["total_leases"] == 1
    assert await client.output(made["lease_id"], "pwd") == "/testbed"
    assert (await client.post("/diff", **lease))["patch"] == ""
    empty = await client.post("/evaluate", **lease, patch="", eval_script=EVALUATE)
    assert empty["resolved"] is False
    assert "patch validation failed" in empty["error"]
    await client.output(made["lease_id"], "sed -i s/-/*/ calc.py")
    wrong = (await client.post("/diff", **lease))["patch"]
    verdict = await client.post("/evaluate", **lease, patch=wrong, eval_script=EVALUATE)
    assert (verdict["resolved"], verdict["returncode"]) == (False, 1)
    assert "AssertionError" in verdict["output"]
    stale = wrong.replace("return a - b", "return b - a")
    verdict = await client.post("/evaluate", **lease, patch=stale, eval_script=EVALUATE)
    assert verdict["resolved"] is False
    assert "git apply failed" in verdict["error"]
    late = await client.post("/evaluate", **lease, patch=wrong, eval_script="sleep 1000", timeout=1)
    assert late == {"ok": True, "resolved": False, "error": "Evaluation timed out after 1s"}
    assert await client.post("/close", **lease) == {"ok": True}
    await client.post("/heartbeat", 404, **lease)
    assert (await client.get("/status"))["active_containers"] <= 1


async def test_a_patch_cannot_forge_its_verdict(client: Client, image: str) -> None:
    lease = await client.lease(image=image)
    await client.output(lease, "echo 'import os; os._exit(0)' | tee conftest.py sitecustomize.py > tests/test_calc.py")
    patch = (await client.post("/diff", lease_id=lease))["patch"]
    script = "PYTHONPATH=. python3 tests/test_calc.py"
    verdict = await client.post("/evaluate", lease_id=lease, patch=patch, eval_script=script)
    assert (verdict["resolved"], verdict["returncode"]) == (False, 1)


async def test_a_timeout_kills_the_process_tree(client: Client) -> None:
    lease = await client.lease()
    reply = await client.post("/exec", lease_id=lease, command="setsid sleep 1000 & sleep 1000", timeout=1)
    assert reply == {"ok": True, "returncode": -1, "output": "Command timed out after 1s"}
    await client.output(lease, "while pgrep sleep > /dev/null; do sleep 0.05; done")


async def test_output_is_capped_and_drained(client: Client) -> None:
    lease = await client.lease()
    reply = await client.post("/exec", lease_id=lease, command="head -c 30000000 /dev/zero | tr '\\0' x; exit 4")
    assert reply["returncode"] == 4
    assert len(reply["output"]) < 1 << 21
    assert "output was cut" in reply["output"]


# Repeated requests


async def test_a_request_with_a_lost_response_runs_once(client: Client) -> None:
    """F21."""
    lease = await client.lease()
    async with cutting_proxy(client.url) as proxy, aiohttp.ClientSession() as http:
        through = Client(url=proxy.url, http=http)
        proxy.cut(0)
        named = {"exec_id": "e1", "command": "echo named >> log; date +%N"}
        with pytest.raises(aiohttp.ClientError):
            await through.output(lease, **named)
        first = await through.output(lease, **named)
        assert await through.output(lease, **named) == first
        command = "echo unnamed >> log; touch up; until test -e go; do sleep 0.05; done"
        lost = asyncio.create_task(through.output(lease, command))
        await client.output(lease, "until test -e up; do sleep 0.05; done")
        proxy.drop()
        with pytest.raises(aiohttp.ClientError):
            await lost
        again = asyncio.create_task(through.output(lease, command))
        await client.output(lease, "touch go; sleep 0.1")
        await again
    assert await client.output(lease, "cat log") == "named\nunnamed"
    await client.output(lease, "echo twice >> log")
    await client.output(lease, "echo twice >> log")
    assert await client.output(lease, "cat log") == "named\nunnamed\ntwice\ntwice"


async def test_identical_requests_without_a_key_get_distinct_containers(client: Client) -> None:
    leases = await asyncio.gather(client.lease(), client.lease())
    assert len(set(leases)) == 2
    for lease in leases:
        await client.post("/close", lease_id=lease)
    keyed = await asyncio.gather(*(client.lease(idempotency_key="one") for _ in range(3)))
    assert len(set(keyed)) == 1


# Room and leases


async def test_a_create_waits_until_there_is_capacity(client: Client) -> None:
    leases = [await client.lease() for _ in range(3)]
    async with client.http.post(f"{client.url}/allocate", json={"image": "host", "timeout": 0.3}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["ok"] is False
    waiting = asyncio.create_task(client.lease(timeout=60))
    await client.post("/close", lease_id=leases[0])
    await client.output(await waiting, "true")


@pytest.mark.whole
@pytest.mark.parametrize("url", [(LEASE_S, "")], indirect=True)
async def test_containers_of_a_killed_client_are_reaped(client: Client, local: LocalProvider) -> None:
    program = f"""
import json, urllib.request
def post(path, **body):
    request = urllib.request.Request("{client.url}" + path, json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request))
lease = post("/allocate", image="host")["lease_id"]
print(lease, flush=True)
post("/exec", lease_id=lease, command="sleep 1000", timeout=2, cwd="/")
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline()
    kept = await client.lease()
    child.send_signal(signal.SIGKILL)
    await child.communicate()
    async with asyncio.timeout(60):
        while len(await local.list()) > 1:
            await client.post("/heartbeat", lease_id=kept)
            await asyncio.sleep(LEASE_S / 5)
    # Longer than the lease, without a word from its client meanwhile.
    assert await client.output(kept, f"sleep {2 * LEASE_S}; echo alive", timeout=30) == "alive"
    assert (await client.get("/status"))["pool"]["total_leases"] == 1


# Bad input


@pytest.mark.parametrize("url", [(600.0, "alice-secret")], indirect=True)
async def test_a_key_is_required(client: Client) -> None:
    assert (await client.get("/healthz"))["ok"]
    for path in ("/container/create", "/allocate", "/exec", "/close"):
        await client.post(path, 401, image="host", lease_id="x", command="true")
    client.http.headers["Authorization"] = "Bearer alice-secret"
    await client.output(await client.lease(), "true")


async def test_invalid_input_is_refused_and_creates_no_container(client: Client, local: LocalProvider) -> None:
    bad: tuple[dict[str, Any], ...] = ({}, {"image": ""}, {"image": 5}, {"image": "host", "cwd": "relative"})
    for body in (*bad, {"image": "host", "timeout": -1}):
        await client.post("/allocate", 400, **body)
    for image in ("/", "unknown:latest"):
        await client.post("/container/create", 404, image=image)
    await client.post("/exec", 404, lease_id="missing", command="true")
    await client.post("/exec", 400, command="true")
    assert await local.list() == []
    lease = await client.lease()
    await client.post("/exec", 400, lease_id=lease, command="")
    await client.post("/exec", 400, lease_id=lease, command="true", timeout="soon")
    await client.post("/exec", 400, lease_id=lease, command="true", env={"A=B": "c"})
    reply = await client.post("/exec", lease_id=lease, command="true", cwd="/missing")
    assert reply["returncode"] == 126
    diff = await client.post("/diff", lease_id=lease)
    assert (diff["patch"], diff["returncode"] != 0, diff["error"] != "") == ("", True, True)
