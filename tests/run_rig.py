"""Small real runs for tests: the quickstart's recipe with few steps, over a shared Ray or as the command line's own
process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.launch import RunRequest, prepare
from headrace.actors.run_directory import RunDirectory
from headrace.actors.runtime import RayRuntime
from headrace.actors.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


RECIPE = Path(__file__).resolve().parents[1] / "scripts" / "recipes" / "quickstart.toml"
SMALL = (
    "training.steps=8",
    "training.save_every=2",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=16",
    "evaluation.tasks=4",
    "evaluation.samples=1",
    "evaluation.every_steps=0",
    "rollout.boot_timeout_s=15",
    "rollout.agent_timeout_s=25",
    "rollout.evaluate_timeout_s=20",
    "rollout.guard_s=60",
)


def prepare_small(folder: Path, name: str, *overrides: str) -> tuple[object, RunDirectory]:
    return prepare(RunRequest(recipe=RECIPE, runs_dir=folder, name=name, overrides=(*SMALL, *overrides)))


@asynccontextmanager
async def open_service(folder: Path, name: str, *overrides: str) -> AsyncIterator[tuple[Service, RunDirectory]]:
    """A service over the shared Ray, stopped at the end."""
    config, directory = prepare_small(folder, name, *overrides)
    runtime = RayRuntime(f"{name}-")
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    try:
        yield service, directory
    finally:
        await runtime.stop(service)


def start_driver(*arguments: str) -> subprocess.Popen[bytes]:
    """`headrace ARGUMENTS` in a session of its own, so that nothing of it is ours."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("headrace")), *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def small_arguments() -> list[str]:
    return [part for override in SMALL for part in ("--set", override)]


__all__ = ["RECIPE", "RunDirectory", "open_service", "prepare_small", "small_arguments", "start_driver"]
