"""`headrace trace slow` over small real runs, each with one planted cause: it names the part and the factor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.engines.fleet import attached_id
from headrace.actors.run.service import Service
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.task import Task, write_tasks
from support import image_kit as kit
from support import run_rig as rig
from support.group_rig import TINY, servers
from support.refusing_proxy import refusing_proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.namespaces,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("ray_cluster"),
]

TASKS = 8
LONG_RUN = ("training.steps=20",)
STOP_S = 8.0
POLL_S = 0.1
IN_TIME = ("", "window", "after")
"""Factors that name a time, or nothing."""
LATE_S = 5.0
"""Seconds that a planted cause adds: several times a typical rollout on a busy machine."""
PATIENCE = (
    "buffer.max_staleness=8",
    "rollout.queue_timeout_s=120",
    "rollout.boot_timeout_s=60",
    "rollout.prepare_timeout_s=60",
    "rollout.agent_timeout_s=120",
    "rollout.evaluate_timeout_s=120",
    "service.hang_s=60",
)
"""Nothing that is slow is repeated, neither because it is too old nor on a busy machine."""
TOOLS = ("/bin/grep", "/bin/sed", "/bin/tail", "/bin/mv")
"""Programs that the policy runs beside those of every image."""


def program(name: str, script: str) -> kit.Entry:
    return kit.file(name, f"#!/bin/bash\n{script}\n".encode(), mode=0o755)


def write_image(path: Path, *entries: kit.Entry) -> str:
    path.write_bytes(kit.tar((*kit.base_entries(*TOOLS), *entries)))
    return str(path)


def without_python(count: int) -> list[Task]:
    """Tasks whose checks need no interpreter in their image."""
    tasks = generate(seed=3, count=2 * count, split=Split.TRAIN)
    return [task for task in tasks if task.family != "terminal/repair"][:count]


def files(folder: Path, train: Iterable[Task]) -> tuple[str, str]:
    """Settings of a run with these tasks to train on."""
    write_tasks(folder / "train.jsonl", train)
    write_tasks(folder / "heldout.jsonl", generate(seed=3, count=4, split=Split.HELD_OUT))
    return f"tasks.train={folder}/train.jsonl", f"tasks.heldout={folder}/heldout.jsonl"


async def causes_of(folder: Path, *overrides: str, meanwhile: rig.Meanwhile | None = None) -> list[dict[str, Any]]:
    """The causes that the command names of a run with these settings: those with a label or an event first, that of the
    most seconds first. On a busy machine there are true windows beside what was planted."""
    config, directory = rig.prepare_small(folder, "run", *PATIENCE, *overrides)
    summary = await rig.run_prepared(config, directory, meanwhile)
    assert not summary.problems
    command = (Path(sys.executable).with_name("headrace"), "trace", "slow", directory.path, "--json", "-")
    pipe = asyncio.subprocess.PIPE
    told = await asyncio.create_subprocess_exec(*map(str, command), stdout=pipe, stderr=pipe)
    output, errors = await told.communicate()
    assert told.returncode == 0, errors.decode()
    report = json.loads(output)
    print(json.dumps(report["causes"], indent=1))
    return sorted(report["causes"], key=lambda cause: (factor_of(cause) in IN_TIME, -cause["excess_s"]))


def factor_of(cause: dict[str, Any]) -> str:
    """Kind and value of a cause's common factor."""
    factor = cause["factor"]
    return "" if factor is None else f"{factor['kind']} {factor['value']}".rstrip()


async def until_step(service: Service, step: int) -> None:
    """Wait for a committed step."""
    while (await service.progress()).step < step:  # noqa: ASYNC110 - a step tells nobody outside
        await asyncio.sleep(POLL_S)


async def stopped_at(service: Service, step: int, names: Callable[[str], bool], windows: list[float]) -> None:
    """Stop the actors with these names for `STOP_S` after a step, and note when."""
    await until_step(service, step)
    processes = [number for name, number in (await service.process_ids()).items() if names(name)]
    assert processes
    windows.append(time.time())
    for number in processes:
        os.kill(number, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_S)
    finally:
        for number in processes:
            os.kill(number, signal.SIGCONT)
    windows.append(time.time())


def is_window(cause: dict[str, Any], begun_s: float, ended_s: float) -> bool:
    """Whether the factor of a cause is a time that meets this one, and is not much longer."""
    factor = cause["factor"]
    if factor is None or factor["begin_s"] is None:
        return False
    until_s = factor["end_s"] or factor["begin_s"]
    return factor["begin_s"] < ended_s and until_s > begun_s and until_s - factor["begin_s"] < 4 * (ended_s - begun_s)


async def test_a_stop_of_the_gateway_is_named_as_a_window(tmp_path: Path) -> None:
    windows: list[float] = []
    causes = await causes_of(
        tmp_path, *LONG_RUN, meanwhile=lambda service: stopped_at(service, 8, lambda name: "gateway" in name, windows)
    )
    assert any(is_window(cause, *windows) for cause in causes), windows
    assert {factor_of(cause) for cause in causes} <= {*IN_TIME}


async def test_a_stop_of_everything_is_named_as_a_window(tmp_path: Path) -> None:
    windows: list[float] = []
    causes = await causes_of(
        tmp_path, *LONG_RUN, meanwhile=lambda service: stopped_at(service, 8, lambda name: name != "service", windows)
    )
    assert any(is_window(cause, *windows) for cause in causes), windows
    assert {factor_of(cause) for cause in causes} <= {*IN_TIME}


async def test_an_engine_that_is_late_for_a_while_is_named_with_the_time(tmp_path: Path) -> None:
    windows: list[float] = []
    async with (
        servers(TINY, tmp_path, "far", "near") as started,
        refusing_proxy(started["far"].url) as far,
        refusing_proxy(started["near"].url) as near,
    ):

        async def late(service: Service) -> None:
            await until_step(service, 6)
            windows.append(time.time())
            far.late_s["/generate"] = LATE_S
            await until_step(service, 10)
            del far.late_s["/generate"]
            windows.append(time.time())

        attached = f'engines.attach=["{far.url}", "{near.url}"]'
        worst = (await causes_of(tmp_path, *LONG_RUN, attached, "engines.count=0", meanwhile=late))[0]
    assert worst["part"] == "engine"
    assert factor_of(worst) == f"engines {attached_id(far.url)}"
    assert is_window(worst, *windows), windows


async def test_an_engine_whose_answers_come_late_is_named(tmp_path: Path) -> None:
    async with servers(TINY, tmp_path, "far") as started, refusing_proxy(started["far"].url) as proxy:
        proxy.late_s["/generate"] = LATE_S
        worst = (await causes_of(tmp_path, f'engines.attach=["{proxy.url}"]'))[0]
    assert (worst["part"], factor_of(worst)) == ("engine", f"engines {attached_id(proxy.url)}")


async def test_an_image_that_starts_slowly_is_named(tmp_path: Path) -> None:
    quick = write_image(tmp_path / "quick.tar", program("start", "exit 0"))
    slow = write_image(tmp_path / "slow.tar", program("start", f"sleep {LATE_S}"))
    tasks = [replace(task, image=quick if at % 4 else slow) for at, task in enumerate(without_python(TASKS))]
    settings = (
        "sandbox.provider=support.starting_provider:Starting",
        f"sandbox.settings.image_folder={tmp_path}/images",
    )
    worst = (await causes_of(tmp_path, *files(tmp_path, tasks), *settings))[0]
    # Its clean sandboxes start as slowly.
    assert worst["part"] in ("boot", "evaluate.boot")
    assert factor_of(worst) == f"image {slow}"


async def test_a_tool_that_sleeps_is_named_with_the_task_that_needs_it(tmp_path: Path) -> None:
    grep = program("usr/local/bin/grep", f'sleep {LATE_S}\nexec /usr/bin/grep "$@"')
    image = write_image(tmp_path / "image.tar", kit.folder("usr/local"), kit.folder("usr/local/bin"), grep)
    tasks = [replace(task, image=image) for task in without_python(2 * TASKS)]
    # All have the tool, and only this kind looks for a word in files.
    user = next(task for task in tasks if task.family == "terminal/rename")
    others = [task for task in tasks if task.family != "terminal/rename"][: TASKS - 1]
    folder = f"sandbox.local.image_folder={tmp_path}/images"
    worst = (await causes_of(tmp_path, *files(tmp_path, [user, *others]), folder))[0]
    assert (worst["part"], factor_of(worst)) == ("tool.run", f"task {user.id}")


async def test_a_check_that_sleeps_is_named_with_its_task(tmp_path: Path) -> None:
    tasks = list(generate(seed=3, count=TASKS, split=Split.TRAIN))
    # The untrained policy ends the sessions of this kind, so they are checked.
    place = next(place for place, task in enumerate(tasks) if task.family == "terminal/rename")
    check = f"import time\ntime.sleep({LATE_S})\n{tasks[place].evaluator.check}"
    sleeping = tasks[place] = replace(tasks[place], evaluator=replace(tasks[place].evaluator, check=check))
    worst = (await causes_of(tmp_path, *files(tmp_path, tasks)))[0]
    assert (worst["part"], factor_of(worst)) == ("evaluate.check", f"task {sleeping.id}")


async def test_evaluations_that_go_first_are_named(tmp_path: Path) -> None:
    worst = (
        await causes_of(
            tmp_path,
            "sandbox.pool.held_out_share=1",
            "dispatcher.evaluation_slots=64",
            "evaluation.tasks=32",
            "evaluation.samples=2",
            "evaluation.every_steps=4",
            "training.steps=16",
        )
    )[0]
    assert worst["part"] in ("queue", "boot")
    assert factor_of(worst) == "evaluation"
