"""Named checks of a program that uses an SDK: each prints one line of JSON with its result."""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

BASE_URL, CLOSED_URL = os.environ["BASE_URL"], os.environ["CLOSED_URL"]
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOO_LONG = "word " * 9000
checks: list[tuple[str, Callable[[], None]]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add the function to the checks, under its own name."""
    checks.append((function.__name__, function))
    return function


def check_each(apis: dict[str, Any]) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Return a decorator that adds a function to the checks once for each API, with the name of the API first."""

    def decorator(function: Callable[[Any], None]) -> Callable[[Any], None]:
        checks.extend((f"{name}_{function.__name__}", functools.partial(function, api)) for name, api in apis.items())
        return function

    return decorator


def equal(found: Any, wanted: Any) -> None:
    assert found == wanted, f"{found!r} is not {wanted!r}"


def run() -> None:
    """Run every check, also after one that fails."""
    for name, function in checks:
        error = None
        try:
            function()
        except Exception:  # noqa: BLE001 - any error is the result of this check, and the others still run
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)
