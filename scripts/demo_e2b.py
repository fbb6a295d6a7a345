"""A repair task from boot to reward, run with the unmodified e2b SDK against `headrace serve sandbox`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2b import CommandExitException, Sandbox

REPOSITORY = {
    "/workspace/repo/add.sh": "add() { echo $(($1 - $2)); }\n",
    "/workspace/repo/README": "Adds two numbers.\n",
}
FIXED = "add() { echo $(($1 + $2)); }\n"
TESTS = 'set -e\n. ./add.sh\n[ "$(add 2 3)" = 5 ]\n[ "$(add -1 1)" = 0 ]\necho 2 passed\n'
GIT = "git -c user.name=demo -c user.email=demo@localhost"
STARTED = time.monotonic()


def say(step: str) -> None:
    print(f"{time.monotonic() - STARTED:5.2f} s  {step}", flush=True)


@contextmanager
def server() -> Iterator[str]:
    """Start a server and yield its base URL; stop the server afterwards."""
    program = str(Path(sys.executable).with_name("headrace"))
    with subprocess.Popen([program, "serve", "sandbox", "--json", "-"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline() or "{}")["url"]
        finally:
            process.send_signal(signal.SIGTERM)


def boot(options: dict[str, str]) -> Sandbox:
    """Return a sandbox that contains the repository."""
    sandbox = Sandbox.create(metadata={"demo": "repair"}, timeout=120, **options)
    sandbox.files.write_files([{"path": path, "data": text} for path, text in REPOSITORY.items()])
    sandbox.commands.run(f"git init -q && git add -A && {GIT} commit -qm base", cwd="/workspace/repo")
    return sandbox


def score(sandbox: Sandbox, patch: str) -> float:
    """Apply the patch, and only then add the tests and run them."""
    sandbox.files.write("/tmp/agent.patch", patch)
    sandbox.commands.run("git apply /tmp/agent.patch", cwd="/workspace/repo")
    sandbox.files.write("/tmp/tests.sh", TESTS)
    try:
        say(f"tests: {sandbox.commands.run('bash /tmp/tests.sh', cwd='/workspace/repo').stdout.strip()}")
    except CommandExitException as error:
        say(f"tests fail with {error.exit_code}: {error.stderr}")
        return 0.0
    return 1.0


def main() -> int:
    with server() as url:
        say(f"server at {url}")
        options = {"api_url": url, "sandbox_url": url, "api_key": "e2b_0000"}
        agent = boot(options)
        say(f"sandbox {agent.sandbox_id} holds the repository")
        agent.files.write("/workspace/repo/add.sh", FIXED)
        patch = agent.commands.run("git diff", cwd="/workspace/repo").stdout
        say(f"edited; the patch has {len(patch.splitlines())} lines")
        agent.kill()
        clean = boot(options)
        say(f"clean sandbox {clean.sandbox_id}; the first one is dead")
        reward = score(clean, patch)
        clean.kill()
        say(f"reward {reward}")
    return 0 if reward == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
