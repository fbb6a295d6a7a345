"""Applies an agent's filtered patch, then the task's test patch, to a clean repository.

Runs as root in the repository; its argument is a folder with `agent.diff` and `tests.diff`.
Invariant: both patches apply completely, or the exit code identifies the one that did not.
"""

from __future__ import annotations

import os
import subprocess
import sys

AGENT_REFUSED, TESTS_REFUSED = 10, 11
GIT = ["git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
ATTEMPTS = (["--whitespace=nowarn"], ["--whitespace=nowarn", "--recount", "-C1"], ["--whitespace=nowarn", "--3way"])
"""`--3way` is last, because it leaves conflict markers when it fails. patch(1) is not used, since its fuzz may make it
change lines other than those the agent changed."""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # The ceiling hides repositories in parent folders, which would treat the paths as their own and skip them.
    environment = dict(os.environ, GIT_CEILING_DIRECTORIES=os.path.dirname(os.getcwd()), LC_ALL="C")
    return subprocess.run([*GIT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def apply(path: str) -> bool:
    if os.path.getsize(path) == 0:
        return True
    # Otherwise --3way refuses files whose times or owners changed since the commit, as not matching the index.
    git("update-index", "-q", "--refresh")
    message = b""
    for options in ATTEMPTS:
        result = git("apply", *options, path)
        if result.returncode == 0:
            return True
        message = message or result.stdout
    sys.stderr.buffer.write(message[:2000])
    return False


if __name__ == "__main__":
    os.umask(0o022)
    if not apply(os.path.join(sys.argv[1], "agent.diff")):
        sys.exit(AGENT_REFUSED)
    if not apply(os.path.join(sys.argv[1], "tests.diff")):
        sys.exit(TESTS_REFUSED)
