"""Runs a check on an agent's files, with the image's packages, and prints the reward that the check sets.

Its arguments are `packages` and the data paths; the check is read from standard input. Site folders are added here
instead of by Python, so that those below data paths, which the agent controls, can be left out, and no `.pth` file or
`sitecustomize` runs. The check's output goes to standard error. Exit codes 0 and 1 come from the check only if BEGUN is
on standard output, since an interpreter that cannot start also exits with 1.

With `packages=UID,GID,...`, site folders that this user could change are left out, too.

With `plain` instead, it runs without the image's interpreter, and a check that needs a missing module exits with
UNAVAILABLE.

It runs for every rollout, so modules that few checks need (json, site, traceback) are imported only on demand, with the
module search path from before the check.
"""

from __future__ import annotations

import os
import sys

REPORTED, RAISED, UNAVAILABLE = 64, 65, 66
PLAIN, PACKAGES = "plain", "packages"
BEGUN = b"begun\n"
PATH: list[str] = []
"""Module search path from before the check."""


def site_folders() -> list[str]:
    """Return the package folders of this interpreter or virtual environment, which Python skips with -S."""
    import site

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


def can_change(path: str, user: int, groups: list[int]) -> bool:
    """Return whether a user could change a folder or one above it."""
    path = os.path.realpath(path)
    while os.path.exists(path):
        status = os.stat(path)
        writable = status.st_mode & 0o002 or (status.st_mode & 0o020 and status.st_gid in groups)
        if writable or status.st_uid == user:
            return True
        if path == "/":
            break
        path = os.path.dirname(path)
    return False


def run(check: bytes, names: dict[str, object], mode: str) -> object:
    """Run the check and return its exit code, as for `sys.exit`."""
    try:
        exec(compile(check, "check", "exec"), names)
    except SystemExit as end:
        return end.code
    except BaseException as error:  # noqa: BLE001 - any exception means that the check broke
        if mode == PLAIN and isinstance(error, ImportError):
            return UNAVAILABLE
        sys.path[:] = PATH
        sys.__excepthook__(*sys.exc_info())
        return RAISED
    return 0


def report(names: dict[str, object], is_failed: bool) -> str:
    """Return the check's reward as JSON. `solved` is null if the check does not set it."""
    sys.path[:] = PATH
    import json

    solved = False if is_failed else names.get("solved")
    answer: dict[str, object] = {"solved": None if solved is None else bool(solved)}
    try:
        answer["reward"] = float(names["reward"])  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        answer["error"] = str(error)[:200]
    return json.dumps(answer)


def main() -> None:
    mode, _, ids = sys.argv[1].partition("=")
    data_paths = sys.argv[2:]
    sys.argv[1:] = []
    if mode == PACKAGES:
        user, *groups = [int(number) for number in ids.split(",") if number] or [-1]
        folders = [folder for folder in site_folders() if not is_below(folder, data_paths)]
        sys.path += [folder for folder in folders if not ids or not can_change(folder, user, groups)]
    PATH.extend(sys.path)
    channel = os.dup(1)
    os.dup2(2, 1)
    os.write(channel, BEGUN)
    module = sys.modules["__main__"] = type(sys)("__main__")
    code = run(sys.stdin.buffer.read(), module.__dict__, mode)
    if "reward" in module.__dict__ and code in (None, 0, 1):
        os.write(channel, report(module.__dict__, code == 1).encode())
        code = REPORTED
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
