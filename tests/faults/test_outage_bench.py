"""`scripts/bench outage` over real Ray: lost engines, a host that breaks every command, a lost buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
from benches.outage import GATE_WAITS, STEPS, Outages, measure_outage, prepare_outage

from headrace.actors.record.files.run_directory import RunDirectory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_outages_are_not_charged_to_tasks(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path / "outage")
    config = prepare_outage(directory)
    outages = Outages(gate_wait_s=config.engines.simulated.gate_wait_s)
    found = measure_outage(directory, config, outages, quiet=True, say=print)
    assert found.completed, found.ended_by
    assert (found.parked, found.lost, found.charged_to_tasks, found.problems) == (0, 0, 0, ())
    assert found.issued_while_down <= found.inventory
    assert found.engines_away_s >= GATE_WAITS * config.engines.simulated.gate_wait_s
    assert found.buffer_kills > 0
    assert found.steps == STEPS
    assert found.charged["host"] > 0, "the broken host was used"
