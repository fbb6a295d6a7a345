"""Figures of the benches are within bounds. Slow: half a minute each, the control some minutes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.run.exit_codes import EXIT_DIRTY

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]


def bench(name: str, *options: str) -> dict[str, Any]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [str(BENCH), name, "--json", *options]
    output = subprocess.run(command, check=True, env=environment, timeout=1500, stdout=subprocess.PIPE).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def test_sandbox_costs_are_within_bounds() -> None:
    figures = bench("sandbox")
    assert figures["create_destroy_cpu_ms"] <= 15
    assert figures["idle_memory_mb"] <= 4
    assert figures["clone_p50_ms"] <= 20
    assert {"boots_per_s_c1", "boots_per_s_c8", "boots_per_s_c32", "boots_per_s_c64"} <= figures.keys()
    assert figures["peers"].keys() == {"bwrap", "runc"}
    for peer in figures["peers"].values():
        assert ("not" in peer) if isinstance(peer, str) else min(peer.values()) > 0


def test_a_burst_of_e2b_sandboxes_comes_up_and_leaves_nothing() -> None:
    figures = bench("e2b", "--creates", "1000")
    assert (figures["up"], figures["leaked"]) == (1000, 0)
    # A hang guard, not a target: 20 s on two idle cores.
    assert figures["burst_s"] < 120
    assert 0 < figures["exec_p50_ms"] <= figures["exec_p99_ms"]


def test_the_cost_of_a_rollout_is_reported_by_part() -> None:
    figures = bench("rollout", "--rollouts", "200")
    assert sum(figures["parts_ms"].values()) == pytest.approx(figures["cpu_ms_per_rollout"])
    # The machine's own count is of another source, and of the few processes that are not the run's too.
    assert figures["cpu_ms_per_rollout"] <= 1.05 * figures["machine_cpu_ms_per_rollout"]
    assert {"boot", "launcher", "agent commands", "check", "engine", "ray", "actor gateway"} <= figures[
        "parts_ms"
    ].keys()
    assert min(figures["parts_ms"].values()) >= 0
    assert figures["commands_per_rollout"]["train.write"] == pytest.approx(1.0, abs=0.2)


def test_orchestration_costs_are_within_bounds() -> None:
    result = bench("orchestration")
    assert result["rollouts"] >= 2000
    assert result["ray_cpu_ms_per_rollout"] <= 3
    assert result["ray_calls_per_rollout"] <= 2
    # 20 turns of 200 ms, 512 rollouts at once.
    assert result["turns_of_200_ms"]["wall_over_ideal"] <= 1.25
    assert result["turns_of_200_ms"]["ray_cpu_ms_per_rollout"] <= 3
    assert result["turns_of_20_ms"]["rollouts"] == 1024
    assert result["memory"]["in_flight"] == 2000
    assert result["memory"]["pss_mb"] <= 2000


def test_a_learner_step_is_nearly_as_fast_as_a_plain_loop_and_its_memory_is_linear() -> None:
    figures = bench("learner")
    assert figures["throughput_ratio"] >= 0.8
    assert figures["peak_ratio_of_twice_the_length"] <= 2.2
    assert figures["head_memory_ratio"] <= 0.2
    assert 0 < figures["padding_share"] < 0.5
    assert figures["save_stall_s"] > 0


def test_a_push_is_nearly_as_fast_as_a_plain_broadcast() -> None:
    figures = bench("push", "--parts", "bandwidth")
    assert figures["bandwidth_ratio"] >= 0.8
    assert figures["bandwidth_ratio_100mb"] > 0


@pytest.mark.parametrize(("slots", "max_staleness", "least"), [(64, 4, 0.95), (160, 8, 0.93)])
def test_real_time_agrees_with_virtual_time(slots: int, max_staleness: int, least: float) -> None:
    result = bench("replay", "--slots", str(slots), "--max-staleness", str(max_staleness))
    assert result["problems"] == []
    assert result["agrees"], result["real_over_virtual"]
    assert result["real"]["fraction_of_ideal"] >= least
    assert result["real"]["max_staleness_seen"] <= max_staleness


def test_gateway_costs_are_within_bounds() -> None:
    """Bytes, and ratios within the run; times of its own are in the README, measured on a machine that does nothing
    else."""
    figures = bench("gateway")
    assert figures["rerender_ratio"] <= 1 / 30
    assert figures["memory_mb_per_trajectory"] <= 1.6
    assert figures["memory_mb_2000_sessions"] <= 3500
    assert figures["tokens_2000_sessions"] >= 32_000
    assert figures["cpu_ms_per_turn"] <= figures["full_rerender_ms_per_turn"] / 3
    assert figures["loop_block_max_ms"] <= figures["full_rerender_ms_per_turn"] * 3


def test_the_cost_of_tracing_is_reported_in_alternated_pairs() -> None:
    """Bytes are bounded; ratios of two short pairs are not, since a busy machine changes them by more."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [str(BENCH), "tracing", "--json", "--quick", "--pairs", "2"]
    done = subprocess.run(command, env=environment, timeout=1500, stdout=subprocess.PIPE, check=False)
    assert done.returncode in (0, EXIT_DIRTY)
    figures = json.loads(done.stdout)
    assert figures["bytes_per_turn"] <= 250
    assert figures["span_over_sdk"] <= 0.6
    assert figures["gateway_spans"]["spans"] == 2 * figures["gateway_spans"]["turns"] > 0
    assert figures["quickstart_spans"]["turns"] > 0
    assert (done.returncode == EXIT_DIRTY) == bool(figures["misses"])
    for name in ("quickstart_service_ms_per_rollout", "gateway_cpu_ms_per_turn", "simulated_cpu_ms_per_rollout"):
        assert len(figures[name]["on"]) == len(figures[name]["off"]) == 2
    assert figures["collector_down_ratio"] > 0


def test_a_run_with_shuffled_rewards_does_not_learn() -> None:
    result = bench("control")
    assert result["steps"] == 30
    assert result["final_success"] <= result["base_success"] + 0.05


def test_half_hour_agents_cause_no_stall_and_no_infra_failure() -> None:
    """A short form: three steps, small evaluations."""
    figures = bench("longagents", "--steps", "3", "--answers", "16")
    assert (figures["completed"], figures["stalls"], figures["infra"], figures["problems"]) == (True, 0, 0, [])
    assert figures["steps"] == 3
    assert figures["max_staleness_seen"] <= figures["max_staleness"]
    assert figures["agent_s_max"] > 25


def test_late_agents_make_rollouts_as_stale_as_the_bound_allows() -> None:
    """A short form: few steps, one correction."""
    figures = bench("staleness", "--bounds", "0,4", "--corrections", "clip and cap", "--steps", "6", "--late-s", "10")
    none, some = figures["runs"]
    assert (none["max_staleness_seen"], none["mean_staleness"]) == (0, 0)
    assert 0 < some["mean_staleness"] <= some["max_staleness_seen"] <= 4
    assert none["mean_abs_log_ratio"] < 1e-3 < some["mean_abs_log_ratio"]
