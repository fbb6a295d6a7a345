"""The handle of a soaked run's driver process, which answers questions through pipes and is killed with SIGKILL."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson
import psutil

from headrace.actors.record.files.run_directory import RunDirectory

ANSWER_S: Final = 300.0
"""Time without an answer or a step after which the run is considered stuck."""
END_S: Final = 300.0
GONE_S: Final = 60.0
"""Time within which the children of a dead driver must end."""
RAY_AGENTS: Final = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
"""Ray processes that try for a minute to reach a dead head before they end."""


class Driver:
    """Handle of one driver process."""

    def __init__(self, directory: RunDirectory) -> None:
        read, write = os.pipe()
        command = [sys.executable, "-m", "benches.long_runs.soaked_run", str(directory.path), str(write)]
        with log_of(directory).open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(write,), start_new_session=True
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb")

    def ask(self, question: str) -> Any:
        """Return the answer, or None if the run ends without one. Raises TimeoutError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([self._answers], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"no answer within {ANSWER_S:g} s: {question}")
        line = self._answers.readline()
        return orjson.loads(line) if line else None

    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def descendants(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
            return found
        return []

    def kill(self) -> list[psutil.Process]:
        """Kill the driver; return those of its descendants that are still alive a minute later."""
        if self._process.poll() is not None:
            self._close()
            return []
        family = []
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] not in ([agent] for agent in RAY_AGENTS):
                    family.append(process)
        self._process.kill()
        self._close()
        left: list[psutil.Process] = psutil.wait_procs(family, timeout=GONE_S)[1]
        return left

    def end(self) -> int | None:
        """Wait for the end of the run; return its exit code, or None if it had to be killed."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._close()
        return self._process.returncode

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._answers):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


def log_of(directory: RunDirectory) -> Path:
    """Return the path of the drivers' output."""
    return directory.path / "driver.log"
