"""Runs for tests of the page, and clients of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer

from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.page.app import build_app
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.timeline import Timeline
from headrace.buffer.trajectories.types import Cause, Outcome, RolloutOrder, Row, Trajectory, VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

MODEL: Final = Path(__file__).parents[2] / "scripts" / "models" / "tiny"
TOKEN: Final = "a token of the page that nobody guesses"
MARKUP: Final = "<script>alert(1)</script><img src=x onerror=alert(2)>"
HOSTILE: Final = f"{MARKUP} \x00\x1b[2J \u202eright to left\u202c \u200b &amp; 'quoted' \"twice\" {{{{ 7 * 7 }}}}"
"""Text that an agent may write."""
RTL: Final = "\u202e"


def simulated_run(folder: Path, *, slow: bool = True, steps: int = 8) -> Path:
    """A run in virtual time; if `slow`, a third of the boots on one of four hosts take long."""
    slowdowns = '[{kind = "host", name = "host-1", factor = 40, share = 0.5}]'
    sizes = {"batch_size": 32, "slots": 32, "steps": steps, "seed": 3}
    settings = ["hosts=4", "boot_s=10", "tasks=8", *([f"slowdowns={slowdowns}"] if slow else [])]
    run_plan(make_plan("swe64", sizes, settings), folder)
    write_configuration(folder)
    return folder


def write_configuration(folder: Path) -> None:
    """Write the keys of a run's configuration that the page shows."""
    document = {"model": {"path": str(MODEL)}, "training": {"steps": 8}, "buffer": {"max_staleness": 4}}
    (folder / "config.json").write_text(json.dumps(document))


async def hostile_run(folder: Path) -> Path:
    """A run of sixteen rollouts whose agents wrote `HOSTILE` wherever they can write."""
    write_configuration(folder)
    config = cases.SMALL.model_copy(update={"group_size": 2, "batch_size": 16, "max_staleness": 4})
    clock = [1_800_000_000.0]
    async with await ReplayStore.open(
        folder, config, cases.tasks(8), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        for number, order in enumerate(await store.issue(16, version)):
            clock[0] = 1_800_000_000.0 + 3 + number
            await store.offer_many([hostile_result(order, version, slow=number % 5 == 0)])
    logs = folder / "logs"
    logs.mkdir()
    event = {"time": 1_800_000_001.5, "level": "WARNING", "actor": "worker-0", "attempt": 1, "rollout": "g000000-0"}
    (logs / "worker-0.jsonl").write_text(
        json.dumps(event | {"message": HOSTILE}) + "\n" + json.dumps(event | {"rollout": "g000000-1"}) + "\n{torn"
    )
    return folder


def hostile_result(order: RolloutOrder, version: PolicyVersion, *, slow: bool) -> Any:
    parts = {"boot": 30.0 if slow else 2.0, f"tool.{MARKUP}": 1.0, "other": 0.1}
    boot_s = parts["boot"]
    segments = [
        Segment("boot", 0.0, boot_s, detail="host-1"),
        Segment(f"tool.{MARKUP}", boot_s, boot_s + 1.0, 1, HOSTILE),
        Segment("tool.quick", boot_s, boot_s + 0.25, 1, "ls"),
    ]
    breakdown = Breakdown(
        wall_s=sum(parts.values()),
        parts_s=parts,
        labels={"agent": "shell", "tools": (HOSTILE,)},
        timeline=Timeline(segments=segments, began_at_s=1_700_000_000.0),
    )
    outcome = Outcome(reward=1.0, solved=True, trainable=True, cause=Cause.SOLVED, detail=HOSTILE[:200])
    trajectory = trajectory_of([(HOSTILE, False), (HOSTILE, True), ("given", False), ("answer", True)], version)
    finished = cases.result(order, version)
    return replace(finished, breakdown=breakdown, outcome=outcome, trajectory=trajectory)


def trajectory_of(texts: list[tuple[str, bool]], version: PolicyVersion) -> Trajectory:
    """One row with these texts, each sampled or not."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids: list[int] = []
    spans = []
    for text, sampled in texts:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if sampled:
            spans.append(VersionSpan(start=len(ids), end=len(ids) + len(found), version=version))
        ids += found
    mask = np.zeros(len(ids), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    row = Row(tokens_T=np.array(ids, dtype=np.int32), loss_mask_T=mask, logprobs_T=logprobs, versions=tuple(spans))
    return Trajectory(rows=(row,), temperature=1.0)


@asynccontextmanager
async def page_of(run_dir: Path, **more: Any) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A client of the page of a run, without a token of its own."""
    async with TestClient(TestServer(build_app(run_dir, TOKEN, **more))) as client:
        yield client


async def read(
    client: TestClient[web.Request, web.Application], path: str, *, status: int = 200, accept: str = "text/html"
) -> str:
    """Return the text of a view, which must have this status."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": accept}
    async with client.get(path, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return text


async def when_known(client: TestClient[web.Request, web.Application], path: str) -> str:
    """Return the text of a view once nothing in it is still being computed; each answer waits for a while."""
    while "data-pending" in (text := await read(client, path)):
        continue
    return text
