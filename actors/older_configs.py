"""Configurations that older versions wrote into run directories, as this version reads them."""

from __future__ import annotations

from typing import Any, Final

from headrace.actors.rollout import RolloutConfig

_MOVED: Final = {
    ("agent", "max_turns"): ("agent", "shell", "max_turns"),
    ("agent", "command_timeout_s"): ("agent", "shell", "command_timeout_s"),
    ("agent", "max_observation_bytes"): ("agent", "shell", "max_observation_bytes"),
    ("agent", "working_directory"): ("agent", "shell", "working_directory"),
}
"""Since agents are chosen by `agent.kind`."""
_DROPPED: Final = (("service", "evaluators"),)
"""One was always started."""


def upgraded(document: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The document with the keys of today; a new one, and the same when nothing in it is old."""
    document = {name: dict(table) for name, table in document.items()}
    for old, new in _MOVED.items():
        if (value := _take(document, old)) is not None:
            _put(document, new, value)
    for old in _DROPPED:
        _take(document, old)
    _widen_guard(document.get("rollout", {}))
    return document


def _widen_guard(rollout: dict[str, Any]) -> None:
    """Before the wait for a place and the preparation had clocks of their own, no guard had room for them."""
    clocks = ("queue_timeout_s", "boot_timeout_s", "prepare_timeout_s", "agent_timeout_s", "evaluate_timeout_s")
    if "guard_s" in rollout and "queue_timeout_s" not in rollout:
        fields = RolloutConfig.model_fields
        rollout["guard_s"] = max(rollout["guard_s"], sum(rollout.get(clock, fields[clock].default) for clock in clocks))


def _take(document: dict[str, Any], path: tuple[str, ...]) -> Any:
    *tables, key = path
    for name in tables:
        document = document.get(name, {})
    return document.pop(key, None)


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *tables, key = path
    for name in tables:
        document = document.setdefault(name, {})
    document.setdefault(key, value)
