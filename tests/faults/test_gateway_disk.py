"""A full disk of the session logs: no answer is sent that a restarted gateway would not know, and nothing else
fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace.sandboxes.linux import syscalls
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.errors import SERVER_FAILED, GatewayUnreachable
from support.gateway_rig import WIRES, Wire, world
from support.scripted_engine import Ask, segments

pytestmark = pytest.mark.namespaces
REFUSALS = 40
"""After so many there is not even room for the line that says so: it had the rest of a page."""
LONG = "Many words, which a log of a few pages has no room for. " * 200


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    syscalls.mount("tmpfs", str(folder), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=700")
    try:
        yield folder
    finally:
        syscalls.detach(str(folder))


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk completely."""
    other = disk / "of somebody else"
    with other.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    try:
        yield
    finally:
        other.unlink()


def count(ask: Ask) -> str:
    return f"answer {ask.number}"


def trained(report: SessionReport) -> list[tuple[int, ...]]:
    assert report.trajectory is not None
    rows = [(row.tokens_T.tolist(), segments(row.loss_mask_T)) for row in report.trajectory.rows]
    return [tuple(tokens[start:end]) for tokens, turns in rows for start, end in turns]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_turn_that_cannot_be_logged_is_not_answered(
    model_dir: Path, disk: Path, wire: Wire, stream: bool
) -> None:
    async with world(model_dir, count, session_log_dir=disk / "state") as w:
        client = await w.client(wire, stream=stream)
        await client.say("go")
        with full(disk):
            reply = await client.say(LONG)
            assert reply.status in (503, 529), "clients ask again"
            assert b"answer" not in reply.raw
            assert reply.error["message"] == SERVER_FAILED, "the record names the disk, an agent needs no path"
        assert (await client.send(client.body())).text == "answer 3"
        report = await w.finish()
        sampled = [one.output_ids for one in w.engines[0].sampled]
        assert trained(report) == [sampled[0], sampled[2]]
        assert report.sampled_tokens == report.trained_tokens == len(sampled[0]) + len(sampled[2])
        assert [failure.split(":")[0] for failure in report.failures] == ["session_log_broken"]
        assert (await w.finish()).failures == report.failures, "and from the log, which was told later"


async def test_the_gateway_and_its_other_sessions_survive_a_full_disk(model_dir: Path, disk: Path) -> None:
    async with world(model_dir, count, session_log_dir=disk / "state") as w:
        client, other = await w.client(), await w.client(session_id="other")
        await client.say("go")
        await other.say("go")
        with full(disk):
            with pytest.raises(GatewayUnreachable):
                await w.open("new")
            assert (await client.say(LONG)).status == 503
            assert (await w.finish("other")).turns == 1
        assert (await (await w.client(session_id="new")).say("go")).status == 200
        assert (await client.send(client.body())).status == 200
        assert (await w.finish("new")).failures == ()
        assert (await w.finish("other")).failures == ()
        assert len((await w.finish()).failures) == 1


async def test_unlogged_failures_are_written_before_the_next_line(model_dir: Path, disk: Path) -> None:
    logs = disk / "state"
    async with world(model_dir, count, session_log_dir=logs) as w:
        client = await w.client()
        await client.say("go")
        client.history += client.wire.user(LONG)
        with full(disk):
            for _ in range(REFUSALS):
                assert (await client.send(client.body())).status == 503
            assert kept(logs) < REFUSALS
        assert (await client.send(client.body())).status == 200
        assert kept(logs) == REFUSALS
        report = await w.finish()
        assert (report.turns, len(report.failures)) == (2, REFUSALS)


async def test_unlogged_failures_are_written_at_the_end_of_a_session(model_dir: Path, disk: Path) -> None:
    logs = disk / "state"
    async with world(model_dir, count, session_log_dir=logs) as w:
        client = await w.client()
        client.history += client.wire.user(LONG)
        with full(disk):
            for _ in range(REFUSALS):
                assert (await client.send(client.body())).status == 503
        report = await w.finish()
        assert len(report.failures) == REFUSALS
        assert (await w.finish()).failures == report.failures, "from the log"


def kept(logs: Path) -> int:
    """Return the number of failures that a restarted gateway would know."""
    [log] = logs.iterdir()
    return log.read_bytes().count(b'{"failed":')
