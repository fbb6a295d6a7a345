"""A run in virtual time whose engines are away for minutes: nobody is charged, and nothing begins meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import re

from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.plan_service import open_service
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.serve.tracing.retention import RetentionConfig

BEGINS_S, AWAY_S = 60.0, 600.0
PLAN = SimulationPlan(
    batch_size=16,
    group_size=4,
    slots=16,
    max_staleness=2,
    steps=12,
    durations=DurationsConfig(mean_s=40.0, median_s=30.0, cap_s=150.0),
    learner_s=10.0,
    push_s=1.0,
    tasks=24,
    turns=3,
)


async def run_through_outage(folder):
    async with open_service(PLAN, InlineRuntime(), clock=asyncio.get_running_loop().time) as service:
        async with asyncio.TaskGroup() as tasks:
            dispatching = tasks.create_task(service.actors.dispatcher.run())
            learning = tasks.create_task(service.actors.learner.run())
            await asyncio.sleep(BEGINS_S)
            await service.actors.engines.go_down()
            await asyncio.sleep(AWAY_S)
            held = (await service.actors.replay.status()).held
            await service.actors.engines.come_back()
            await learning
            dispatching.cancel()
        await service.actors.replay.export(folder)
        return held, await service.actors.replay.status()


def test_a_ten_minute_engine_outage_parks_and_charges_no_task(tmp_path):
    held, status = run_virtual(run_through_outage(tmp_path), seed=0)
    assert held.startswith("no engine serves, since ")
    assert status.held == ""
    assert status.parked == {}
    report = verify(tmp_path)
    assert (report.steps, report.lost, report.poison, report.problems) == (PLAN.steps, 0, 0, ())
    attempts = read_evidence(tmp_path).attempts
    assert {attempt.charged_to for attempt in attempts} == {None, "outage"}, "turns did fail meanwhile"
    assert not [attempt for attempt in attempts if BEGINS_S < attempt.issued_at_s < BEGINS_S + AWAY_S]


def test_the_events_of_a_rollout_name_it_and_its_attempt(tmp_path):
    log = tmp_path / "logs" / "worker-0.jsonl"
    handler = LogFile(log, RetentionConfig(), EventFormatter({"actor": "worker-0", "run": "r"}, Redaction({})))
    logger = logging.getLogger("headrace.actors.rollouts.rollout")
    logger.addHandler(handler)
    try:
        run_virtual(run_through_outage(tmp_path), seed=0)
    finally:
        logger.removeHandler(handler)
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    failed = [(re.match(r"rollout (\S+) attempt (\d+) is infra", event["message"]), event) for event in events]
    assert len(failed) > 1
    for match, event in failed:
        assert match is not None
        assert (event["rollout"], str(event["attempt"])) == match.groups()
