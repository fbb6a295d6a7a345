"""Collection of other nodes' files: over outages, hanging and lost nodes, several runs, and at the end of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.cluster.runs.file_collection import FileCollection
from headrace.actors.cluster.runs.records import RunId
from headrace.actors.errors import ActorLost
from headrace.actors.record.files.log_lines import lines_of_rollout
from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.actors.record.files.node_copies import folders_of_nodes
from headrace.actors.record.files.running import FOLDER, RunningFile, read_running, write_running
from headrace.actors.runtime.actors.nodes import TABLE_FILE, NodeAgent
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.serve.tracing.attempts import working_for
from headrace.serve.tracing.retention import RetentionConfig
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from support.gateway_rig import until

GUARD_S = 30.0
RUNS = [RunId("1" * 32), RunId("2" * 32)]
NODES = ["a" * 56, "b" * 56]


class Node(NodeAgent):
    """The agent of a node, whose disk is a folder, and whose link can be cut."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.state = state
        self.is_lost = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0
        self.most_bytes = 0

    async def file_pages(self, *given: Any) -> Any:
        self.asked += 1
        if self.is_lost:
            raise ActorLost("the node is gone")
        await self.may_answer.wait()
        pages = await super().file_pages(*given)
        self.most_bytes = max(self.most_bytes, sum(page.size for page in pages.values()))
        return pages

    def log(self, run: str, actor: str, text: str) -> None:
        """Log an event for the rollout r1 of a run."""
        events = EventFormatter({"run": run, "actor": actor, "node": "n", "pid": 7}, Redaction({}))
        file = LogFile(self.state / run / "logs" / f"{actor}.jsonl", RetentionConfig(file_bytes=4096), events)
        with working_for(("r1", 1)):
            file.emit(record_of(text))


def record_of(text: str) -> logging.LogRecord:
    return logging.LogRecord("headrace.tests", logging.INFO, "", 0, text, (), None)


@asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[tuple[FileCollection, dict[str, Node]]]:
    nodes = {node: Node(folder / f"disk-{number}") for number, node in enumerate(NODES)}
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as tasks:
        collection = FileCollection(folder / "state", tasks)
        yield collection, nodes
        collection.cancel()


def messages(folder: Path, run: str) -> list[str]:
    return [line.event["message"] for line in lines_of_rollout(folder / "state" / run / "logs", "r1")]


async def test_files_of_several_nodes_and_runs_reach_the_state_folder_under_their_nodes(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        for number, node in enumerate(nodes.values()):
            for run in RUNS:
                node.log(run, "worker-0", f"of node {number}")
        collection.begin_passes(nodes, RUNS)
        for run in RUNS:
            await collection.finish(nodes, run)
            assert messages(tmp_path, run) == ["of node 0", "of node 1"]
            folders = folders_of_nodes(tmp_path / "state" / run / "logs")
            assert list(folders) == ["", "a" * 12, "b" * 12]


@pytest.mark.whole
async def test_a_backlog_comes_in_bounded_pages_and_each_line_once(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        node = nodes[NODES[0]]
        for number in range(700):
            node.log(RUNS[0], "worker-0", f"{number} {'x' * 6000}")
        await collection.finish(nodes, RUNS[0])
        assert [int(text.split()[0]) for text in messages(tmp_path, RUNS[0])] == list(range(700))
        assert node.asked > 4
        assert node.most_bytes <= 1 << 20


async def passed(collection: FileCollection, nodes: dict[str, Node], folder: Path, lines: int) -> None:
    """Begin passes until this many lines have been copied."""
    while len(messages(folder, RUNS[0])) < lines:
        collection.begin_passes(nodes, RUNS[:1])
        await asyncio.sleep(0)


async def test_a_hanging_node_delays_no_other_and_nothing_is_lost_over_an_outage(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        hanging, other = nodes.values()
        hanging.may_answer.clear()
        for number in range(3):
            for node in (hanging, other):
                node.log(RUNS[0], "worker-0", f"{number}")
            await passed(collection, nodes, tmp_path, number + 1)
        assert hanging.asked == 1
        hanging.may_answer.set()
        hanging.is_lost = True
        collection.begin_passes(nodes, RUNS[:1])
        await collection.finish(nodes, RUNS[0])
        hanging.is_lost = False
        await collection.finish(nodes, RUNS[0])
        assert sorted(messages(tmp_path, RUNS[0])) == ["0", "0", "1", "1", "2", "2"]


async def test_copies_of_a_lost_node_say_what_it_was_running(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        lost, other = nodes.values()
        file = RunningFile(worker="w1", node=NODES[0], pid=7, written_s=time.time(), rollouts=())
        write_running(lost.state / RUNS[0] / FOLDER, file)
        lost.log(RUNS[0], "worker-0", "the last words")
        collection.begin_passes(nodes, RUNS[:1])
        state = tmp_path / "state" / RUNS[0]
        await until(lambda: bool(messages(tmp_path, RUNS[0])) and bool(read_running(state / FOLDER)))
        lost.is_lost = True
        other.log(RUNS[0], "worker-1", "goes on")
        await collection.finish(nodes, RUNS[0])
        assert read_running(state / FOLDER) == [file]
        assert messages(tmp_path, RUNS[0]) == ["the last words", "goes on"]


@pytest.mark.whole
async def test_a_run_that_ends_does_not_wait_for_the_backlog_of_another(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        node = nodes[NODES[0]]
        for number in range(400):
            node.log(RUNS[1], "worker-0", f"{number} {'x' * 6000}")
        node.log(RUNS[0], "worker-0", "the last words")
        collection.begin_passes(nodes, RUNS)
        await until(lambda: node.asked > 0)
        await collection.finish(nodes, RUNS[0])
        assert messages(tmp_path, RUNS[0]) == ["the last words"]
        assert len(messages(tmp_path, RUNS[1])) < 400


async def test_a_pass_after_the_run_has_finished_copies_nothing_of_it(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        node = nodes[NODES[0]]
        node.log(RUNS[0], "worker-0", "first")
        await collection.finish(nodes, RUNS[0])
        node.log(RUNS[0], "worker-0", "too late")
        node.log(RUNS[1], "worker-0", "of another run")
        collection.begin_passes(nodes, RUNS)
        await until(lambda: messages(tmp_path, RUNS[1]) == ["of another run"])
        assert messages(tmp_path, RUNS[0]) == ["first"]


async def test_the_node_with_the_ledgers_sends_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.log(RUNS[0], "worker-0", "here")
    (tmp_path / TABLE_FILE).touch()
    assert await node.file_pages({RUNS[0]: {}}, 1000) == {}


async def test_a_run_that_the_node_does_not_have_and_strange_names_are_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path / "disk")
    node.log(RUNS[0], "worker-0", "here")
    (tmp_path / "secret").mkdir()
    pages = await node.file_pages({RUNS[0]: {}, RUNS[1]: {}, "..": {}, "../secret": {}}, 10_000)
    assert list(pages) == [RUNS[0]]
    [piece] = pages[RUNS[0]].pieces
    assert json.loads(piece.data)["message"] == "here"


async def test_the_store_reads_spans_of_other_nodes_once_in_whichever_form(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collection, nodes):
        run, store = RUNS[0], SpanFolder(tmp_path / "state" / RUNS[0] / "spans")
        for number, node in enumerate(nodes.values()):
            telemetry = configure(
                TelemetryConfig(),
                process="worker-7",
                spans_dir=node.state / run / "spans",
                run_id=run,
                install=False,
            )
            for name in ("one", "two"):
                with telemetry.tracer("tests").start_as_current_span(f"{name} of node {number}"):
                    pass
                assert telemetry.flush()
            await collection.finish(nodes, run)
            expected = sorted(f"{name} of node {each}" for name in ("one", "two") for each in range(number + 1))
            assert sorted(span["name"] for span in store.spans()) == expected
            # Compresses the file.
            telemetry.shutdown()
            await collection.finish(nodes, run)
            spans = list(store.spans())
            assert sorted(span["name"] for span in spans) == expected
            assert {span["resource"]["service.instance.id"] for span in spans} == {"worker-7"}
        found = sorted(path.relative_to(tmp_path / "state" / run).as_posix() for path in store.files())
        assert found == [f"nodes/{node[:12]}/spans/worker-7.000001.jsonl.zst" for node in NODES]
