"""Applies an agent's filtered patch, then the task's test patch, to the clean repository in the current folder.

Runs as root; its argument is a folder that holds `agent.diff` and `tests.diff`.
Invariant: a patch applies whole or the program says which one did not.
"""

from __future__ import annotations

import os
import subprocess
import sys

AGENT_REFUSED, TESTS_REFUSED = 10, 11
GIT = ["git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
WAYS = (["--whitespace=nowarn"], ["--whitespace=nowarn", "--recount", "-C1"], ["--whitespace=nowarn", "--3way"])
"""`--3way` is the last because it leaves conflict markers where it fails. patch(1) with its fuzz is none of them: it
may change another place than the agent did."""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # Only a repository here counts: one further up would take the paths for its own and skip them.
    environment = dict(os.environ, GIT_CEILING_DIRECTORIES=os.path.dirname(os.getcwd()), LC_ALL="C")
    return subprocess.run([*GIT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def apply(path: str) -> bool:
    if os.path.getsize(path) == 0:
        return True
    # Without this, files whose times or owners changed since the commit do not match the index, and --3way refuses.
    git("update-index", "-q", "--refresh")
    said = b""
    for way in WAYS:
        result = git("apply", *way, path)
        if result.returncode == 0:
            return True
        said = said or result.stdout
    sys.stderr.buffer.write(said[:2000])
    return False


if __name__ == "__main__":
    os.umask(0o022)
    if not apply(os.path.join(sys.argv[1], "agent.diff")):
        sys.exit(AGENT_REFUSED)
    if not apply(os.path.join(sys.argv[1], "tests.diff")):
        sys.exit(TESTS_REFUSED)
