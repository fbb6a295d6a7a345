"""Every listener on every host of a cluster with a run: its address and credential, as in docs/listeners.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.cluster_rig import CONTROL, ROOT, WORKERS, running_cluster
from support.listeners import Listener
from support.marks import NEEDS_HOSTS
from support.ray_hosts import redis_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    *NEEDS_HOSTS,
]


def documented() -> set[Listener]:
    section = (ROOT / "docs/listeners.md").read_text().partition("## A cluster")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {Listener(*row) for row in rows if row[0] not in ("process", "---")}


def test_every_listener_of_a_cluster_is_documented_and_refuses_strangers(tmp_path: Path) -> None:
    if (redis := redis_folder()) is None:
        pytest.skip("scripts/install redis could not install Redis here")
    with running_cluster(tmp_path / "shared", redis) as cluster:
        urls = [cluster.serve_sandboxes(number) for number in WORKERS]
        settings = (
            *("training.steps=500", "evaluation.tasks=4", "evaluation.samples=1", "buffer.batch_size=16"),
            *("engines.cpus=0.2", "cluster.unit_cpus=0.2", "cluster.learner_cpus=0.2"),
            *("sandbox.provider=remote", f"sandbox.remote.urls={json.dumps(urls)}"),
            f"sandbox.remote.key_file={cluster.storage.parent / 'key'}",
        )
        run = cluster.submit("quickstart.toml", *settings, name="listening")
        run.wait_for_step(1)
        found: set[Listener] = set()
        for number in (10, CONTROL, *WORKERS):
            output = cluster.ray.run(cluster.hosts[number], "-m", "support.listeners")
            found |= {Listener(*row[:3]) for row in json.loads(output.splitlines()[-1])}
        table = documented()
        assert found <= table, "\n".join(map(str, sorted(found - table)))
        ours = {"engine", "gateway", "sandbox server"}
        assert ours <= {listener.process for listener in found}, "each of our servers was there to be looked at"
