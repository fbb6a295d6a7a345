"""Runs a check on what the agent left, with the packages of the image, and prints the reward that it binds.

Run as `python -I -S -c PROGRAM DATA_PATHS` with the check on standard input. Site folders are added here and not by
Python itself, because one below a data path holds what the agent put there: it is left out, and no `.pth` file or
`sitecustomize` runs. What the check prints goes to standard error. Exit codes 0 and 1 are the check's own.
"""

from __future__ import annotations

import json
import os
import site
import sys
import traceback
from types import ModuleType

REPORTED, RAISED = 64, 65


def site_folders() -> list[str]:
    """Where the packages of this interpreter lie, also in a virtual environment: with -S Python sees none."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    try:
        with open(os.path.join(home, "pyvenv.cfg"), encoding="utf-8") as file:
            settings = [line.lower().replace(" ", "").strip() for line in file]
    except OSError:
        return site.getsitepackages()
    prefixes = [home, *(site.PREFIXES if "include-system-site-packages=true" in settings else [])]
    sys.prefix = sys.exec_prefix = home
    return site.getsitepackages(prefixes)


def is_below(path: str, folders: list[str]) -> bool:
    resolved = os.path.realpath(path)
    return any(resolved == folder or resolved.startswith(folder.rstrip("/") + "/") for folder in folders)


def run(check: bytes, names: dict[str, object]) -> object:
    """The exit code of the check, as `sys.exit` takes it."""
    try:
        exec(compile(check, "check", "exec"), names)
    except SystemExit as end:
        return end.code
    except BaseException:  # noqa: BLE001 - whatever it is, the check broke
        traceback.print_exc()
        return RAISED
    return 0


def report(names: dict[str, object], is_failed: bool) -> str:
    """The reward that the check bound. `solved` is null where the check does not say."""
    solved = False if is_failed else names.get("solved")
    answer: dict[str, object] = {"solved": None if solved is None else bool(solved)}
    try:
        answer["reward"] = float(names["reward"])  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        answer["error"] = str(error)[:200]
    return json.dumps(answer)


def main() -> None:
    data_paths = json.loads(sys.argv[1])
    sys.argv[1:] = []
    sys.path += [folder for folder in site_folders() if not is_below(folder, data_paths)]
    channel = os.dup(1)
    os.dup2(2, 1)
    module = sys.modules["__main__"] = ModuleType("__main__")
    code = run(sys.stdin.buffer.read(), module.__dict__)
    if "reward" in module.__dict__ and code in (None, 0, 1):
        os.write(channel, report(module.__dict__, code == 1).encode())
        code = REPORTED
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
