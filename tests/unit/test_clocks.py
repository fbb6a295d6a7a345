"""The clocks of a run: what is derived, and what contradicts itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.actors.derivation import clocks
from headrace.actors.derivation.terms import Terms
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, load_recipe
from headrace.policies.push.contract import PushConfig

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"
AGENTS = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code")


def config_of(recipe: str, *overrides: str) -> RunConfig:
    return load_recipe(RECIPES / f"{recipe}.toml", overrides, Path("run"))


@pytest.mark.parametrize("recipe", AGENTS)
def test_the_timeouts_of_an_agent_recipe_allow_half_hour_agents(recipe: str) -> None:
    config = config_of(recipe)
    rollout = config.rollout
    assert rollout.agent_timeout_s == 1800
    assert config.gateway.turn_timeout_s == 600
    assert clocks.gate_wait_s(Terms.of(config)) == 156, "three missed health checks, then the start of another engine"
    assert rollout.guard_s == 60 + 30 + 5 + 3 * 30 + 1800 + 1800
    assert config.training.stage_timeout_s == 1800
    assert config.service.stall_s == 3600


@pytest.mark.parametrize("recipe", [*AGENTS, "quickstart", "simulated"])
@pytest.mark.parametrize("minutes", [1, 30, 240])
def test_derived_timeouts_never_contradict_each_other(recipe: str, minutes: int) -> None:
    config = config_of(recipe, f"rollout.agent_timeout_s={60 * minutes}", "service.hang_s=90")
    assert clocks.problem(Terms.of(config)) is None
    assert config.service.stall_s >= 2 * config.rollout.agent_timeout_s


def test_a_long_wait_for_absent_actors_is_not_a_stall() -> None:
    assert config_of("quickstart", "cluster.absent_s=1800").service.stall_s == 2700


def test_the_quickstart_notices_a_stall_within_minutes() -> None:
    config = config_of("quickstart")
    assert (config.service.stall_s, config.gateway.turn_timeout_s, clocks.gate_wait_s(Terms.of(config))) == (
        180,
        20,
        20,
    )


def test_a_resolved_configuration_keeps_its_timeouts() -> None:
    document = config_of("claude_code").model_dump(mode="json")
    assert document["service"]["stall_s"] == 3600
    assert RunConfig.model_validate(document).model_dump(mode="json") == document


def test_a_configured_timeout_is_not_derived() -> None:
    assert config_of("claude_code", "service.stall_s=7200").service.stall_s == 7200


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["gateway.turn_timeout_s=1800"], ("gateway.turn_timeout_s", "rollout.agent_timeout_s")),
        (["rollout.agent_timeout_s=15"], ("rollout.agent_timeout_s", "one bucket of a push")),
        (["rollout.lease_s=30"], ("service.hang_s", "rollout.lease_s")),
        (["service.hang_s=4000", "service.stall_s=3600"], ("service.hang_s", "service.stall_s")),
        (["cluster.absent_s=4000", "service.stall_s=3600"], ("cluster.absent_s", "service.stall_s")),
        (["service.stall_s=180"], ("service.stall_s", "rollout.agent_timeout_s")),
        (
            ["service.stall_s=2000", "engines.health_timeout_s=1000"],
            ("service.stall_s", "engines.health_misses x (health_timeout_s + 2)"),
        ),
    ],
)
def test_contradictory_timeouts_are_refused_in_one_line_naming_both_keys(
    overrides: list[str], names: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("claude_code", *overrides)
    said = str(refused.value)
    assert "\n" not in said
    for name in names:
        assert name in said
    # What it proposes works.
    key, value = re.findall(r"set (\S+) to ([\d.]+)", said)[0]
    config_of("claude_code", *overrides, f"{key}={value}")


def test_a_simulated_step_longer_than_its_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.simulated.step_s 12 is not below training.stage_timeout_s 10"):
        config_of("simulated", "training.stage_timeout_s=10")


def test_a_push_timeout_covers_all_its_buckets() -> None:
    push = PushConfig(transfer_timeout_s=20, bucket_bytes=1_000_000)
    assert clocks.push_s(push, 10_000_000) - clocks.push_s(push, 1) == 19 * 20, "two in a row exceed the limit of one"
    disk = PushConfig(transport="disk", read_timeout_s=50, load_timeout_s=70)
    phases_s = clocks.PUSH_PHASES * disk.phase_timeout_s
    assert clocks.push_s(disk, 10_000_000) == phases_s + 70 + 2 * 50, "an engine may read twice"


def test_limits_of_reading_weights_follow_from_their_size() -> None:
    small = clocks.push_config(Terms.of(config_of("claude_code")), 1_000_000)
    assert (round(small.load_timeout_s), round(small.read_timeout_s), small.gate_lease_s) == (300, 20, 60)
    slow = config_of("claude_code", "push.wave_size=2", "service.hang_s=90")
    large = clocks.push_config(Terms.of(slow), 70 * 10**9)
    assert (large.load_timeout_s, large.read_timeout_s, large.gate_lease_s) == (580, 580, 90)


def test_a_long_engine_health_timeout_is_not_a_stall() -> None:
    config = config_of("quickstart", "engines.health_timeout_s=90")
    assert config.service.stall_s == clocks.STALLED_PHASES * clocks.unhealthy_s(Terms.of(config)) > 180
