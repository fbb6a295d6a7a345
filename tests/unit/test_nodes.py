"""Processes of a node by id and start time, and the counts of several gateways."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from headrace.actors.runtime.actors.nodes import NodeProcess, kill_here, started
from headrace.serve.gateway.capture.coverage import Coverage
from headrace.serve.gateway.http.gateway import GatewayStats


def test_only_the_process_with_this_start_time_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = NodeProcess(node="", id=child.pid, started=started(child.pid))
        assert not kill_here(replace(process, started=process.started + 1))
        assert child.poll() is None
        assert kill_here(process)
        assert child.wait(timeout=30) == -9
    assert not kill_here(process)


def test_gateways_are_counted_together() -> None:
    first = GatewayStats(
        sessions=2,
        turns_in_flight={"a": 1, "b": 2},
        sampled_tokens=10,
        tokens_by_version={"1.1": 10},
        turns=3,
        silent={"a": 2},
        closed=("b",),
        table_version=7,
        coverage=Coverage(sessions=2, sampled=10, trained=6, masked={"side": 4}),
    )
    second = GatewayStats(
        sessions=1,
        turns_in_flight={"a": 4},
        sampled_tokens=5,
        tokens_by_version={"1.1": 1, "1.2": 4},
        turns=1,
        parser_fails=True,
        silent={"a": 1, "b": 3},
        closed=("a", "b"),
        table_version=6,
        coverage=Coverage(sessions=1, sampled=5, trained=2, masked={"side": 1, "abandoned": 2}),
    )
    assert GatewayStats.together([first]) == first
    together = GatewayStats.together([first, second])
    assert (together.sessions, together.turns, together.sampled_tokens) == (3, 4, 15)
    assert together.turns_in_flight == {"a": 5, "b": 2}
    assert together.tokens_by_version == {"1.1": 11, "1.2": 4}
    assert (together.silent, together.closed) == ({"a": 2, "b": 3}, ("a", "b"))
    assert together.parser_fails
    assert together.table_version == 7
    masked = {"side": 5, "abandoned": 2}
    assert together.coverage == Coverage(sessions=3, sampled=15, trained=8, masked=masked)
