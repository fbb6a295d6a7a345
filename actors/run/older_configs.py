"""Upgrade of configurations that older versions wrote into run directories."""

from __future__ import annotations

from typing import Any, Final

_MOVED: Final = {
    ("agent", "max_turns"): ("agent", "shell", "max_turns"),
    ("agent", "command_timeout_s"): ("agent", "shell", "command_timeout_s"),
    ("agent", "max_observation_bytes"): ("agent", "shell", "max_observation_bytes"),
    ("agent", "working_directory"): ("agent", "shell", "working_directory"),
}
"""Keys that moved when `agent.kind` was introduced."""
_DROPPED: Final = (("service", "evaluators"),)
"""Keys that no longer have any effect: exactly one evaluator was started, whatever their value."""

_CONSTANT_CLOCKS: Final = {
    ("gateway", "gate_wait_s"): 20.0,
    ("gateway", "turn_timeout_s"): 20.0,
    ("training", "stage_timeout_s"): 1800.0,
    ("rollout", "lease_s"): 60.0,
    ("push", "gate_lease_s"): 60.0,
}
"""Constant defaults of timeouts that are now derived from other timeouts."""


def upgraded(document: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a copy of the document with the keys of this version."""
    document = {name: dict(table) for name, table in document.items()}
    for old, (*tables, key) in _MOVED.items():
        if (value := _take(document, old)) is not None:
            table: dict[str, Any] = document
            for name in tables:
                table = table.setdefault(name, {})
            table.setdefault(key, value)
    for old in _DROPPED:
        _take(document, old)
    if "health_misses" not in document.get("engines", {}):
        # Older than derived timeouts: the constant defaults contradict longer phases, so they are derived now.
        for (section, key), default_s in _CONSTANT_CLOCKS.items():
            if document.get(section, {}).get(key) == default_s:
                del document[section][key]
        # Any value of `stall_s` was meant for a detector that counted ended rollouts only.
        document.get("service", {}).pop("stall_s", None)
        document.get("rollout", {}).pop("guard_s", None)
    return document


def _take(document: dict[str, Any], path: tuple[str, ...]) -> Any:
    *tables, key = path
    for name in tables:
        document = document.get(name, {})
    return document.pop(key, None)
