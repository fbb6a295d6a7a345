"""Ray stores the arguments of actors in its control service, and perhaps in Redis: they contain no secret."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from support import run_rig as rig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.namespaces,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
]


@pytest.mark.usefixtures("ray_cluster")
async def test_no_actor_of_a_run_gets_a_secret_as_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    sent: list[bytes] = []
    dumps = cloudpickle.dumps

    def recording(*arguments: Any, **options: Any) -> bytes:
        sent.append(dumps(*arguments, **options))
        return sent[-1]

    monkeypatch.setattr(cloudpickle, "dumps", recording)
    config, directory = rig.prepare_small(tmp_path, "arguments")
    # In this process, so that the actors that it starts are started from here.
    async with Service(config, directory, RayRuntime("arguments-")):  # type: ignore[arg-type]
        key = (directory.path / "engines" / "key").read_bytes().strip()
        gateway = directory.path / "gateway.json"
        token = orjson.loads(gateway.read_bytes())["admin_token"].encode()
        assert stat.S_IMODE(gateway.stat().st_mode) == 0o600
    for actor in (
        b"SandboxPool",
        b"GatewayActor",
        b"Replay",
        b"EngineGroup",
        b"Evaluator",
        b"RolloutWorker",
        b"LearnerLoop",
    ):
        assert any(actor in payload for payload in sent), actor
    assert not [payload for payload in sent if key in payload or token in payload]
