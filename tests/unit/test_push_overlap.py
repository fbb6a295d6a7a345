"""How the throughput around a push is counted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

from benches.push import overlap as push_overlap
from benches.push.testbed import Floor

from headrace.policies.learner import WeightsShard

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from headrace.policies.push.contract import PushReport


async def test_a_push_that_outlasts_its_window_makes_the_window_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(push_overlap, "WINDOW_S", 0.01)
    (tmp_path / "weights").touch()
    idle: Any = None
    floor = Floor(engines=(), pool=idle, senders=idle, shard=WeightsShard.of(tmp_path / "weights"))
    lasted_s = 0.0

    async def slow(floor: Floor) -> PushReport:
        nonlocal lasted_s
        started_s = time.monotonic()
        await asyncio.sleep(0.2)
        floor.sampled_tokens += 1000
        lasted_s = time.monotonic() - started_s
        return cast("PushReport", None)

    tokens_per_s, _ = await push_overlap.window(floor, slow)
    assert 0 < tokens_per_s <= 1000 / lasted_s
