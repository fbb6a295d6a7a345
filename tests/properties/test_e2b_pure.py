"""Pure parts of the E2B server: pages, deadlines, output logs, changes of folders."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import aiohttp
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from headrace.sandboxes.base import Output, Stream
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.serve.sandbox_servers.e2b.connect_protocol import encode_frame, read_frames
from headrace.serve.sandbox_servers.e2b.control import Query, page, parse_query
from headrace.serve.sandbox_servers.e2b_state.entries import FileEntry
from headrace.serve.sandbox_servers.e2b_state.processes import OutputLog
from headrace.serve.sandbox_servers.e2b_state.table import SandboxRow, State
from headrace.serve.sandbox_servers.e2b_state.watchers import EventType, changes

ROW = SandboxRow(
    id="",
    owner="o",
    boot_key="",
    template="base",
    image="host",
    access_token="",
    timeout_s=1,
    started_at=0,
    end_at=1,
    state=State.RUNNING,
)
ENTRY = FileEntry(
    inode=1,
    kind="f",
    target_kind="f",
    size_bytes=0,
    mode=0o644,
    permissions="-rw-r--r--",
    owner="root",
    group="root",
    modified_at=0,
    target="",
    path="",
)
times = st.integers(0, 5).map(float)


@given(st.lists(st.tuples(times, st.sampled_from([State.RUNNING, State.PAUSED]))), st.integers(1, 4), st.booleans())
def test_pages_contain_every_row_once_in_order(drawn: list[tuple[float, State]], limit: int, ascending: bool) -> None:
    rows = [replace(ROW, id=f"i{n}", started_at=at, state=state) for n, (at, state) in enumerate(drawn)]
    found: list[SandboxRow] = []
    token = ""
    while True:
        order = "asc" if ascending else "desc"
        query = parse_query({"limit": str(limit), "order": order, "nextToken": token, "state": "running"})
        here, token = page(rows, query)
        assert len(here) <= limit
        found += here
        if not token:
            break
    wanted = [row for row in rows if row.state is State.RUNNING]
    assert found == sorted(wanted, key=lambda row: (row.started_at, row.id), reverse=not ascending)


@given(
    st.dictionaries(st.sampled_from("ab"), st.sampled_from("12")), st.dictionaries(st.sampled_from("ab"), st.just("1"))
)
def test_a_metadata_filter_matches_metadata_that_contains_it(metadata: dict[str, str], wanted: dict[str, str]) -> None:
    rows, _ = page([replace(ROW, metadata=metadata)], Query(metadata=wanted))
    assert bool(rows) == all(metadata.get(name) == value for name, value in wanted.items())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), times)), max_size=30), times)
def test_deadlines_fall_due_once_and_in_order(steps: list[tuple[str, float | None]], now: float) -> None:
    deadlines = Deadlines()
    model: dict[str, float] = {}
    for name, at in steps:
        if at is None:
            deadlines.drop(name)
            model.pop(name, None)
        else:
            deadlines.set(name, at)
            model[name] = at
    assert deadlines.next() == min(model.values(), default=None)
    due = deadlines.pop_due(now)
    assert sorted(due) == sorted(name for name, at in model.items() if at <= now)
    assert [model[name] for name in due] == sorted(model[name] for name in due)
    assert deadlines.pop_due(now) == []


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=20), st.integers(1, 8), st.integers(0, 20))
def test_a_log_delivers_every_piece_or_counts_it_as_dropped(pieces: list[bytes], limit: int, before: int) -> None:
    """The first `before` pieces arrive without a reader, the others with one."""

    async def run() -> None:
        log = OutputLog(limit)

        async def write() -> None:
            for data in pieces[before:]:
                await log.append(Output(stream=Stream.STDOUT, data=data))
            await log.close()

        for data in pieces[:before]:
            await log.append(Output(stream=Stream.STDOUT, data=data))
        seen = b""
        async with log.reader() as reader, asyncio.TaskGroup() as group:
            group.create_task(write())
            while (piece := await reader.next()) is not None:
                seen += piece.data
        everything = b"".join(pieces)
        assert seen == everything[log.dropped_bytes :]
        assert len(b"".join(pieces[:before])) - log.dropped_bytes <= limit

    asyncio.run(run())


names = st.sampled_from(["a", "b", "d/c"])
looks = st.dictionaries(
    names,
    st.builds(
        lambda inode, size, mode, at: replace(ENTRY, inode=inode, size_bytes=size, mode=mode, modified_at=at),
        st.integers(1, 3),
        st.integers(0, 1),
        st.sampled_from([0o600, 0o644]),
        times,
    ),
)


@given(looks, looks)
def test_reported_changes_transform_one_scan_into_the_next(
    before: dict[str, FileEntry], after: dict[str, FileEntry]
) -> None:
    found = changes(before, after)
    present = set(before)
    for change in found:
        if change.kind in (EventType.REMOVE, EventType.RENAME):
            present.discard(change.name)
        else:
            present.add(change.name)
    assert present == set(after)
    for name in set(before) & set(after):
        if before[name].mode != after[name].mode and before[name].inode == after[name].inode:
            assert EventType.CHMOD in {change.kind for change in found if change.name == name}
    assert changes(after, after) == []


def test_a_rename_is_reported_as_by_inotify() -> None:
    found = changes({"old": ENTRY}, {"new": replace(ENTRY, size_bytes=3)})
    assert [(change.kind, change.name) for change in found] == [(EventType.RENAME, "old"), (EventType.CREATE, "new")]
    found = changes({}, {"new": replace(ENTRY, size_bytes=3)})
    assert [change.kind for change in found] == [EventType.CREATE, EventType.WRITE]


def test_frequently_changed_deadlines_do_not_grow_the_heap() -> None:
    deadlines = Deadlines()
    for at in range(100_000):
        deadlines.set("a", float(at))
    assert len(deadlines._heap) < 5_000
    assert deadlines.pop_due(99_998.0) == []
    assert deadlines.pop_due(99_999.0) == ["a"]


async def test_data_after_the_end_frame_is_not_read() -> None:
    """The client keeps sending and never ends its stream."""
    content = aiohttp.StreamReader(Mock(_reading_paused=False), 2**16, loop=asyncio.get_running_loop())
    request = make_mocked_request("POST", "/", payload=content)
    content.feed_data(encode_frame({"a": 1}) + encode_frame({}, end=True) + b"x" * 2**16)
    async with asyncio.timeout(30):
        assert [message async for message in read_frames(request)] == [{"a": 1}]
