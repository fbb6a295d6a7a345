"""Functions for the evaluator `function`, which run in processes of their own."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any


def brevity(task: dict[str, Any], episode: dict[str, Any]) -> float:
    """Reward short answers, and print, which must not disturb the result."""
    print(task["id"])
    said = [part["text"] for part in episode["parts"] if part["source"] == "policy"]
    return 1.0 / (1 + sum(map(len, said)))


async def has_note(task: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
    """Solved if the environment left a note."""
    await asyncio.sleep(0)
    return {"reward": 0.25, "solved": "note" in episode["artifacts"], "detail": task["family"]}


def raises(task: dict[str, Any], episode: dict[str, Any]) -> float:
    raise LookupError("no dictionary")


def leaves(task: dict[str, Any], episode: dict[str, Any]) -> float:
    sys.exit(0)


def hangs(task: dict[str, Any], episode: dict[str, Any]) -> float:
    time.sleep(60)
    return 1.0


def wrong_type(task: dict[str, Any], episode: dict[str, Any]) -> str:
    return "good"


def infinite(task: dict[str, Any], episode: dict[str, Any]) -> float:
    return float("inf")


def no_boolean(task: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 1.0, "solved": "yes"}
