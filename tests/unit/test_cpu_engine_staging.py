"""The spare set of an engine, between whoever writes it and the torch thread."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.policies.cpu_engine.update import Staging
from headrace.policies.models.qwen import QwenWeights
from headrace.policies.models.qwen_config import QwenConfig


def test_a_set_returned_while_an_old_one_is_recycled_is_not_lost(tiny_model_dir: Path) -> None:
    config = QwenConfig.read(tiny_model_dir / "config.json")
    staging = Staging(config)
    written, old = staging.take_spare(), QwenWeights.allocate(config)
    putting = threading.Thread(target=staging.put_spare, args=(written,))
    lines, first = inspect.getsourcelines(Staging.recycle)
    [keeping] = [first + at for at, line in enumerate(lines) if "self._spare = old" in line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        """When it was seen that there is no spare set, and before the old one becomes it: put the written one back."""
        if frame.f_code is Staging.recycle.__code__ and event == "line" and frame.f_lineno == keeping:
            putting.start()
            # It may have to wait for the end of `recycle`.
            putting.join(1.0)
        return trace

    sys.settrace(trace)
    try:
        staging.recycle(old)
    finally:
        sys.settrace(None)
    putting.join(30.0)
    assert staging.take_spare() is written
