"""Runs a check that computes plain data with code that may lie, and prints that data as JSON.

Runs as the unprivileged user: `python -c PROGRAM` with the check on standard input. The check binds `result`. What is
printed is judged elsewhere: whoever takes this process over can print what it likes, but not what it does not know.
"""

from __future__ import annotations

import os
import sys

try:
    # What json.dumps ends in, without what it needs to read: regular expressions take longer to import than all else.
    from _json import encode_basestring_ascii, make_encoder

    def refuse(value: object) -> object:
        raise TypeError(type(value).__name__)

    encode = make_encoder({}, refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)

    def dumps(value: object) -> str:
        return "".join(encode(value, 0))

    dumps({"": [0]})
except Exception:  # noqa: BLE001 - another Python: it may not have them, or have others
    from json import dumps  # type: ignore[assignment]

channel = os.dup(1)
os.dup2(2, 1)
names: dict[str, object] = {"__name__": "__check__"}
try:
    exec(compile(sys.stdin.read(), "check", "exec"), names)
    answer = dumps({"result": names["result"]})
except BaseException as error:  # noqa: BLE001 - SystemExit of the agent's code is an answer too
    answer = dumps({"error": repr(type(error).__name__)[:100]})
os.write(channel, b"\n" + answer.encode())
