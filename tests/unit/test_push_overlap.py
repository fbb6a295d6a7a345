"""Throughput of a window with a push."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benches.push import overlap as push_overlap
from benches.push.testbed import PushTestbed

from headrace.policies.learner import WeightsShard
from headrace.policies.push.contract import PushReport

if TYPE_CHECKING:
    import pytest


async def test_a_push_longer_than_its_window_extends_the_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(push_overlap, "WINDOW_S", 0.01)
    (tmp_path / "weights").touch()
    idle: Any = None
    shard = WeightsShard.of(tmp_path / "weights")
    testbed = PushTestbed(engines=(), pool=idle, sender=idle, directories=idle, shard=shard)
    lasted_s = 0.0

    async def slow(testbed: PushTestbed) -> PushReport:
        nonlocal lasted_s
        started_s = time.monotonic()
        await asyncio.sleep(0.2)
        testbed.sampled_tokens += 1000
        lasted_s = time.monotonic() - started_s
        return cast("PushReport", None)

    tokens_per_s, _ = await push_overlap.window(testbed, slow)
    assert 0 < tokens_per_s <= 1000 / lasted_s
