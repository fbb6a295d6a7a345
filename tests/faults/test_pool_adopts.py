"""A pool that is killed with -9 while its launcher survives: the next pool adopts its leases and kills orphans."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.pool.boot import HOLDER_LABEL, OWNER_LABEL, LeaseRequest
from headrace.sandboxes.pool.ledger import SandboxLedger
from headrace.sandboxes.pool.pool import Pool

pytestmark = pytest.mark.namespaces

POOL = """
import asyncio, json, sys
from pathlib import Path
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.pool.boot import HOLDER_LABEL, LeaseRequest
from headrace.sandboxes.pool.ledger import SandboxLedger
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.pool.pool import Pool
async def main():
    provider = LocalProvider(LocalSandboxConfig.model_validate_json(sys.argv[1]))
    await provider.start()
    async with Pool({"local": provider}, ledger=SandboxLedger(Path(sys.argv[2])), owner="run") as pool:
        labels = {HOLDER_LABEL: "worker"}
        ids = []
        for number in range(3):
            spec = SandboxSpec(labels=labels, idempotency_key=str(number), ttl_s=120)
            ref = (await pool.lease_one(LeaseRequest(spec=spec))).ref
            await (await provider.attach(ref)).exec(f"echo {number} > /tmp/file", timeout_s=30)
            ids.append(ref.id)
        await pool.freeze(ids[2:])
        print(json.dumps(ids), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_new_pool_adopts_the_sandboxes_of_a_killed_pool(config: LocalSandboxConfig, tmp_path: Path) -> None:
    arguments = (sys.executable, "-c", POOL, config.model_dump_json(), str(tmp_path / "ledger"))
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        ids = json.loads(await process.stdout.readline())
    process.kill()
    await process.wait()
    provider = LocalProvider(config)
    await provider.start()
    orphan = await provider.create(SandboxSpec(labels={OWNER_LABEL: "run"}, ttl_s=120))
    stranger = await provider.create(SandboxSpec(labels={OWNER_LABEL: "another run"}, ttl_s=120))
    ledger = SandboxLedger(tmp_path / "ledger")
    async with asyncio.timeout(60), Pool({"local": provider}, ledger=ledger, owner="run") as pool:
        assert {info.id for info in await provider.list()} == {*ids, stranger.id}
        assert orphan.id not in ids
        status = await pool.status()
        assert (status.live, status.frozen, status.adopted_total, status.orphans_total) == (2, 1, 3, 1)
        for number in range(2):
            spec = SandboxSpec(labels={HOLDER_LABEL: "worker"}, idempotency_key=str(number), ttl_s=120)
            ref = (await pool.lease_one(LeaseRequest(spec=spec))).ref
            assert ref.id == ids[number]
            result = await (await provider.attach(ref)).exec("cat /tmp/file", timeout_s=30)
            assert result.stdout == f"{number}\n".encode()
        assert await pool.renew_holder("worker", 60) == []
        await pool.release_holder("worker")
        assert {info.id for info in await provider.list()} == {stranger.id}
