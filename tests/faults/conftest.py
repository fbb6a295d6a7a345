"""Fixtures shared by the fault tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.host.leftovers import run_label, sandboxes_left
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig


@pytest.fixture
async def config(tmp_path: Path) -> AsyncIterator[LocalSandboxConfig]:
    """Config of a launcher that is ended after the test, also when the test fails."""
    config = LocalSandboxConfig(stays_in=tmp_path / "stays", label=run_label(tmp_path), idle_exit_s=2.0)
    yield config
    with suppress(SandboxError):
        async with LocalProvider(config):
            pass
    assert sandboxes_left(tmp_path) == 0
