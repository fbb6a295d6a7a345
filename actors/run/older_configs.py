"""Configurations in run directories: how this version writes them, and the upgrade of those of older versions.

Invariant: a run keeps the formulas that it was started with, whatever later versions mean by the same key.
"""

from __future__ import annotations

from typing import Any, Final

CONFIG_SCHEMA: Final = 2
"""Number of the schema of recorded configurations: 2 means the published formula by `advantage = "grpo"`. Older
versions recorded no number."""
_RECORD: Final = "recorded"

_MOVED: Final = {
    ("agent", "max_turns"): ("agent", "shell", "max_turns"),
    ("agent", "command_timeout_s"): ("agent", "shell", "command_timeout_s"),
    ("agent", "max_observation_bytes"): ("agent", "shell", "max_observation_bytes"),
    ("agent", "working_directory"): ("agent", "shell", "working_directory"),
    ("retention", "spans_bytes"): ("telemetry", "keep_bytes"),
}
"""Keys that moved when `agent.kind` and the store of spans were introduced."""
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


def recorded(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as a run directory stores it, with the number of its schema."""
    return {_RECORD: {"schema": CONFIG_SCHEMA}, **document}


def upgraded(document: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a copy of a stored document with the keys and values of this version. Raises ValueError if a newer version
    wrote it."""
    document = {name: dict(table) for name, table in document.items()}
    schema = document.pop(_RECORD, {}).get("schema", 1)
    if not isinstance(schema, int) or schema > CONFIG_SCHEMA:
        raise ValueError(f"its schema is {schema}, this version reads up to {CONFIG_SCHEMA}: upgrade headrace")
    buffer = document.get("buffer", {})
    if schema < CONFIG_SCHEMA and buffer.get("advantage") == "grpo":
        buffer["advantage"] = "grpo_first_round"
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
