"""Runs a check that computes plain data with code that may lie, and prints that data as JSON.

Runs as the unprivileged user: `python -c PROGRAM` with the check on standard input. The check binds `result`. What is
printed is judged elsewhere: whoever takes this process over can print what it likes, but not what it does not know.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

channel = os.dup(1)
os.dup2(2, 1)
names: dict[str, Any] = {"__name__": "__check__"}
try:
    exec(compile(sys.stdin.read(), "check", "exec"), names)
    answer = json.dumps({"result": names["result"]})
except BaseException as error:  # noqa: BLE001 - SystemExit of the agent's code is an answer too
    answer = json.dumps({"error": repr(type(error).__name__)[:100]})
os.write(channel, b"\n" + answer.encode())
