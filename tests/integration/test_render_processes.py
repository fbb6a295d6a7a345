"""Processes that render for a gateway: their results, their deadlines and their ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.conversation import Role, say
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.parse_work import ParseWork, brackets_of
from headrace.serve.gateway.errors import BadRequest, ContextExceeded, GatewayBroken
from headrace.serve.gateway.rendering.processes import SPARE_BYTES, RenderProcesses, _Process
from headrace.serve.gateway.rendering.work import RendererCall, RenderWork
from support.gateway_rig import renderer_of, until

ENDLESS_S = 1e6


@asynccontextmanager
async def processes(model_dir: Path, *, number: int = 2, cpu_s: float = 60.0) -> AsyncIterator[RenderProcesses]:
    pool = RenderProcesses(model_dir, token_kinds=False, processes=number, cpu_s=cpu_s)
    try:
        yield pool
    finally:
        await pool.aclose()


REFUSE: Any = partial(ContextExceeded, field="messages", limit=7)
"""In place of a function of this module, which a process would have to import."""


def render(text: str, *, max_tokens: int = 10**9) -> RenderWork:
    return RenderWork(
        messages=(say(Role.USER, text),), tools=(), ending=Ending.TURN, max_tokens=max_tokens, refusal=REFUSE
    )


def objects(count: int) -> ParseWork:
    """Parsing of a body with so many objects, which is refused after seconds of work."""
    return ParseWork(ChatCompletions().parse, b'{"messages": [' + b",".join([b"{}"] * count) + b"]}", {}, count)


def memory_of(worker: _Process) -> int:
    return int(psutil.Process(worker.process.pid).memory_info().rss)


async def test_results_and_errors_are_those_of_the_renderer(model_dir: Path) -> None:
    async with processes(model_dir) as pool:
        work = render("go")
        assert await pool.run("a", work) == work(renderer_of(model_dir))
        call = RendererCall("decode", ([1, 2, 3],))
        assert await pool.run("b", call) == call(renderer_of(model_dir))
        with pytest.raises(ContextExceeded) as refused:
            await pool.run("a", render("long " * 1000, max_tokens=10))
        assert (refused.value.field, refused.value.limit) == ("messages", 7)
        with pytest.raises(BadRequest, match="messages: a request may have at most 4096"):
            await pool.run("a", objects(5000))
        with pytest.raises(TemplateRefused):
            await pool.run(
                "a",
                RenderWork(
                    messages=(say(Role.ASSISTANT, " "),),
                    tools=(),
                    ending=Ending.OPEN,
                    max_tokens=9**9,
                    refusal=REFUSE,
                ),
            )


async def test_a_work_that_exceeds_its_processor_time_is_refused_and_its_process_replaced(model_dir: Path) -> None:
    async with processes(model_dir, number=1, cpu_s=0.2) as pool:
        await pool.run("a", render("go"))
        [before] = pool._idle
        with pytest.raises(BadRequest, match=r"more than 0\.2 s to render"):
            await pool.run("a", render(" ".join(f"word{number}" for number in range(900_000))))
        assert await pool.run("b", render("go"))
        [after] = pool._idle
        assert before.process.pid != after.process.pid


async def test_a_killed_process_is_replaced_and_its_work_done_once_more(model_dir: Path) -> None:
    async with processes(model_dir, number=1) as pool:
        for kills in (1, 2):
            working, killed = asyncio.ensure_future(pool.run("a", objects(4_000_000))), set()
            for _ in range(kills):
                await until(lambda killed=killed: {each.process.pid for each in pool._running} - killed)
                [worker] = pool._running
                worker.process.kill()
                killed.add(worker.process.pid)
            with pytest.raises(BadRequest if kills == 1 else GatewayBroken):
                await working
        assert await pool.run("a", render("go"))


async def test_a_small_work_never_waits_for_large_ones(model_dir: Path) -> None:
    async with processes(model_dir) as pool:
        ended: list[str] = []

        async def work(owner: str, what: Any) -> None:
            with suppress(BadRequest):
                await pool.run(owner, what)
            ended.append(owner)

        await asyncio.gather(work("warm", render("go")), work("warm", render("go")))
        await until(lambda: len(pool._idle) == 2)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(work("greedy", objects(1_000_000)))
            await asyncio.sleep(0)
            group.create_task(work("other", render("go")))
        assert ended[2] == "other"


async def test_who_took_less_time_comes_first(model_dir: Path) -> None:
    async with processes(model_dir, number=1) as pool:
        ended: list[str] = []

        async def work(owner: str) -> None:
            with pytest.raises(BadRequest):
                await pool.run(owner, objects(300_000))
            ended.append(owner)

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(work("greedy"))
            await asyncio.sleep(0)
            group.create_task(work("other"))
        assert ended == ["greedy", "other", "greedy", "greedy"]


async def test_memory_that_a_work_left_behind_is_given_back(model_dir: Path) -> None:
    async with processes(model_dir, number=1) as pool:
        await pool.run("a", render("go"))
        [before] = pool._idle
        base = memory_of(before)
        with pytest.raises(BadRequest):
            await pool.run("a", objects(2_000_000))
        await pool.run("a", render("go"))
        [after] = pool._idle
        assert memory_of(after) < base + SPARE_BYTES


async def test_nobody_waits_for_a_work_at_the_end(model_dir: Path) -> None:
    pool = RenderProcesses(model_dir, token_kinds=False, processes=2, cpu_s=ENDLESS_S)
    await pool.run("a", render("go"))
    working = [asyncio.ensure_future(pool.run("a", objects(4_000_000))) for _ in range(3)]
    await until(lambda: bool(pool._running))
    pids = [each.process.pid for each in (*pool._idle, *pool._running)]
    await pool.aclose()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    done, _ = await asyncio.wait(working)
    assert all(each.cancelled() for each in done)
    with pytest.raises(GatewayBroken, match="stopping"):
        await pool.run("a", render("go"))


async def test_processes_end_with_their_parent(model_dir: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from headrace.serve.gateway.rendering.work import RendererCall;"
        "from headrace.serve.gateway.rendering.processes import RenderProcesses\n"
        "async def main():\n"
        "    pool = RenderProcesses(Path(sys.argv[1]), token_kinds=False, processes=1, cpu_s=9)\n"
        "    await pool.run('a', RendererCall('decode', ([1],)))\n"
        "    print(next(iter(pool._idle)).process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(model_dir)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_without_a_tokenizer_those_who_wait_get_the_reason(tmp_path: Path) -> None:
    async with processes(tmp_path) as pool:
        with pytest.raises(GatewayBroken, match="does not start"):
            await pool.run("a", render("go"))


def test_large_bodies_are_those_that_take_long_to_parse() -> None:
    def is_large(body: bytes) -> bool:
        return ParseWork(ChatCompletions().parse, body, {}, brackets_of(body)).is_large

    assert not is_large(orjson.dumps({"messages": [{"role": "user", "content": "a, b; " * 100_000}]}))
    assert is_large(b"x" * (2 << 20))
    assert is_large(objects(21_000).body)
    assert is_large(orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 501}))


def test_a_body_with_a_million_objects_is_not_parsed() -> None:
    with pytest.raises(BadRequest, match="at most 1000000 objects and lists"):
        brackets_of(objects(1_000_001).body)
