"""Configurations that older versions wrote into run directories, as this version reads them."""

from __future__ import annotations

from typing import Any, Final

_MOVED: Final = {
    ("agent", "max_turns"): ("agent", "shell", "max_turns"),
    ("agent", "command_timeout_s"): ("agent", "shell", "command_timeout_s"),
    ("agent", "max_observation_bytes"): ("agent", "shell", "max_observation_bytes"),
    ("agent", "working_directory"): ("agent", "shell", "working_directory"),
}
"""Since agents are chosen by `agent.kind`."""
_DROPPED: Final = (("service", "evaluators"),)
"""One was always started."""

_CONSTANT_CLOCKS: Final = {
    ("gateway", "gate_wait_s"): 20.0,
    ("gateway", "turn_timeout_s"): 20.0,
    ("training", "stage_timeout_s"): 1800.0,
    ("rollout", "lease_s"): 60.0,
    ("push", "gate_lease_s"): 60.0,
}
"""Their defaults of that time."""


def upgraded(document: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The document with the keys of today; a new one, and the same when nothing in it is old."""
    document = {name: dict(table) for name, table in document.items()}
    for old, new in _MOVED.items():
        if (value := _take(document, old)) is not None:
            _put(document, new, value)
    for old in _DROPPED:
        _take(document, old)
    if "health_misses" not in document.get("engines", {}):
        _free_clocks(document)
    return document


def _free_clocks(document: dict[str, dict[str, Any]]) -> None:
    """Clocks were constants before they were derived from each other, and contradicted longer phases."""
    for (table, key), default_s in _CONSTANT_CLOCKS.items():
        if document.get(table, {}).get(key) == default_s:
            del document[table][key]
    # Whatever it was set to, it counted ended rollouts only.
    document.get("service", {}).pop("stall_s", None)
    document.get("rollout", {}).pop("guard_s", None)


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
