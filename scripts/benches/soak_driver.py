"""The driver process of a soaked run: asked through pipes, and killed with -9."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import orjson
import psutil

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.record.run_directory import RunDirectory

ANSWER_S: Final = 300.0
"""The run is stuck when it does not answer, or makes no step, for so long."""
END_S: Final = 300.0
GONE_S: Final = 60.0
"""What a dead driver started is gone by then."""
RAY_AGENTS: Final = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
"""They try for a minute to reach a dead head, then end."""


class Driver:
    """One driver process, asked and killed."""

    def __init__(self, directory: RunDirectory) -> None:
        read, write = os.pipe()
        command = [sys.executable, "-m", "benches.soaked_run", str(directory.path), str(write)]
        with log_of(directory).open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(write,), start_new_session=True
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb")

    def ask(self, question: str) -> Any:
        """None when the run ends without an answer. Raises TimeoutError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([self._answers], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"no answer in {ANSWER_S:g} s: {question}")
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
        """End it; what it had started, and is still there a while later."""
        if self._process.poll() is not None:
            self._close()
            return []
        family = [process for process in self.descendants() if not _is_ray_agent(process)]
        self._process.kill()
        self._close()
        left: list[psutil.Process] = psutil.wait_procs(family, timeout=GONE_S)[1]
        return left

    def end(self) -> int | None:
        """Wait for the end of the run; its exit code, None when it has to be killed."""
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
    """What the drivers of a run print."""
    return directory.path / "driver.log"


def _is_ray_agent(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0] in RAY_AGENTS
    except (psutil.NoSuchProcess, IndexError):
        return False
