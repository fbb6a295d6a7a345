"""Releases of tomlkit, jmespath and itsdangerous from PyPI, graded as plain pytest on the host decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from benches.cheating.releases import measure

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "name",
    ["tomlkit", pytest.param("jmespath", marks=pytest.mark.slow), pytest.param("itsdangerous", marks=pytest.mark.slow)],
)
async def test_a_strangers_repository_is_graded_as_plain_pytest_decides(tmp_path: Path, name: str) -> None:
    figures = await measure(tmp_path, 7, print, only=[name])
    assert figures["verdicts"] >= 7, figures
    assert (figures["false_refusals"], figures["false_rewards"], figures["ungradable"]) == (0, 0, 0), figures
