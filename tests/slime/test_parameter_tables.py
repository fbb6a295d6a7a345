"""The recorded parameters of published models, against slime's converter and transformers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from support.parameter_tables import TABLES

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slime
@pytest.mark.timeout(600)
async def test_recorded_parameters_are_those_of_slime_and_transformers() -> None:
    # In a process of its own: what slime lacks on a CPU is replaced for all of it.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        TESTS / "golden" / "make_parameter_tables.py",
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output) == json.loads(TABLES.read_bytes())
