"""The environment of a sender process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.policies.push.sender import SenderConfig, SenderProcess

if TYPE_CHECKING:
    import pytest

NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


def environment_of(process_id: int | None) -> list[str]:
    return Path(f"/proc/{process_id}/environ").read_text(encoding="utf-8").split("\0")


async def test_a_sender_has_the_settings_of_nccl_that_sglang_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NCCL[0], raising=False)
    monkeypatch.setenv(NCCL[1], "1")
    async with SenderProcess(SenderConfig()) as sender:
        lines = environment_of(sender.pid)
    # Its own default, and what the user set.
    assert {f"{NCCL[0]}=0", f"{NCCL[1]}=1"} <= set(lines)
