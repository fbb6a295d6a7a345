"""Runs a check that computes plain data with untrusted code, and prints the data as JSON.

Runs as the unprivileged user: `python -c PROGRAM` with the check on standard input. The check sets `result`. The output
is judged elsewhere: code that takes over this process can print anything, but does not know the expected result.
"""

from __future__ import annotations

import os
import sys

try:
    # The encoder of json.dumps, without the parser: importing regular expressions would take most of the time.
    from _json import encode_basestring_ascii, make_encoder

    def refuse(value: object) -> object:
        raise TypeError(type(value).__name__)

    encode = make_encoder({}, refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)

    def dumps(value: object) -> str:
        return "".join(encode(value, 0))

    dumps({"": [0]})
except Exception:  # noqa: BLE001 - other Python versions may lack these names or change them
    from json import dumps  # type: ignore[assignment]

channel = os.dup(1)
os.dup2(2, 1)
names: dict[str, object] = {"__name__": "__check__"}
try:
    exec(compile(sys.stdin.read(), "check", "exec"), names)
    answer = dumps({"result": names["result"]})
except BaseException as error:  # noqa: BLE001 - even a SystemExit of the agent's code is an answer
    answer = dumps({"error": repr(type(error).__name__)[:100]})
os.write(channel, b"\n" + answer.encode())
