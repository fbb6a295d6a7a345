"""The sandbox ledger on disk, and a pool that restarts on it."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sandboxes.base import SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxLedgerRefused
from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.pool.boot import HOLDER_LABEL, LeaseRequest
from headrace.sandboxes.pool.ledger import (
    FILE_NAME,
    Drop,
    Entry,
    EntryState,
    HolderGone,
    Renewed,
    SandboxLedger,
    SandboxLedgerWriter,
)
from headrace.sandboxes.pool.pool import Pool
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig

REF = SandboxRef(provider="p", id=SandboxId("i"), endpoint="/e", secret="s3cret")


def entry(key: str, *, holder: str = "w", deadline_s: float = 10.0, ref: SandboxRef | None = REF) -> Entry:
    state = EntryState.HELD if ref else EntryState.INTENDED
    return Entry(
        host="h", key=key, state=state, request_key="r", holder=holder, image="x", deadline_s=deadline_s, ref=ref
    )


def test_applied_changes_are_loaded_after_reopening(tmp_path: Path) -> None:
    ledger = SandboxLedger(tmp_path / "new")
    owner = ledger.owner
    ledger.apply([entry("a"), entry("b", ref=None), entry("c"), Drop("h", "c"), Renewed("w", 99.0)])
    ledger.close()
    ledger.close()
    again = SandboxLedger(tmp_path / "new")
    assert again.owner == owner
    assert {row.key: (row.state, row.ref, row.deadline_s) for row in again.load()} == {
        "a": (EntryState.HELD, REF, 99.0),
        "b": (EntryState.INTENDED, None, 99.0),
    }
    again.apply([HolderGone("w")])
    assert {row.deadline_s for row in again.load()} == {10.0}
    again.close()


def test_the_file_is_private_to_its_owner(tmp_path: Path) -> None:
    ledger = SandboxLedger(tmp_path / "new")
    ledger.apply([entry("a")])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert FILE_NAME in modes
    assert set(modes.values()) == {0o600}
    ledger.close()


def test_a_ledger_in_use_and_an_invalid_file_are_refused(tmp_path: Path) -> None:
    ledger = SandboxLedger(tmp_path)
    with pytest.raises(SandboxLedgerRefused, match="in use"):
        SandboxLedger(tmp_path)
    ledger.close()
    (tmp_path / FILE_NAME).write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(SandboxLedgerRefused, match="move it away"):
        SandboxLedger(tmp_path)


@pytest.mark.namespaces
def test_the_error_for_a_full_disk_does_not_suggest_moving_the_ledger(tmp_path: Path) -> None:
    syscalls.mount("tmpfs", str(tmp_path), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=700")
    try:
        (tmp_path / "other").write_bytes(bytes(992 << 10))
        with pytest.raises(SandboxLedgerRefused, match="repair the disk"):
            SandboxLedger(tmp_path / "sandboxes")
        (tmp_path / "other").unlink()
        SandboxLedger(tmp_path / "sandboxes").close()
    finally:
        syscalls.detach(str(tmp_path))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "drop"])), max_size=20))
def test_the_last_change_of_a_key_wins(words: list[tuple[str, str]]) -> None:
    ledger, expected = SandboxLedger(), set[str]()
    for key, word in words:
        ledger.apply([entry(key) if word == "put" else Drop("h", key)])
        (expected.add if word == "put" else expected.discard)(key)
    assert {row.key for row in ledger.load()} == expected
    ledger.close()


async def test_concurrent_writes_share_one_transaction(tmp_path: Path) -> None:
    applied: list[int] = []

    class Counting(SandboxLedger):
        def apply(self, changes: object) -> None:
            applied.append(len(list(changes)))  # type: ignore[call-overload]
            super().apply(changes)  # type: ignore[arg-type]

    ledger = Counting(tmp_path)
    writer = SandboxLedgerWriter(ledger)
    running = asyncio.create_task(writer.run())
    writer.post(entry("posted"))
    await asyncio.gather(*(writer.write(entry(f"k{number}")) for number in range(50)))
    assert len(ledger.load()) == 51
    assert len(applied) <= 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    writer.post(Drop("h", "posted"))
    await writer.close()
    assert len(ledger.load()) == 50
    ledger.close()


KILLED = """
import os, sys
from pathlib import Path
from headrace.sandboxes.pool.ledger import Drop, Entry, EntryState, SandboxLedger
ledger = SandboxLedger(Path(sys.argv[1]))
for number in range(20):
    ledger.apply([Entry(host="h", key=str(number), state=EntryState.INTENDED, request_key="", holder="", image="x",
                        deadline_s=0.0)])
os.kill(os.getpid(), 9)
"""


async def test_who_waits_for_a_write_is_told_that_it_is_durable_though_its_writer_was_cancelled(tmp_path: Path) -> None:
    ledger = SandboxLedger(tmp_path / "new")
    writer = SandboxLedgerWriter(ledger)
    running = asyncio.create_task(writer.run())
    waiting = asyncio.create_task(writer.write(entry("a")))
    for _ in range(3):
        await asyncio.sleep(0)
    running.cancel()
    await waiting
    assert [row.key for row in ledger.load()] == ["a"]
    await asyncio.wait([running])
    ledger.close()


def test_a_killed_process_loses_nothing_and_leaves_no_lock(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    ledger = SandboxLedger(tmp_path)
    assert len(ledger.load()) == 20
    ledger.close()


class Outliving(SimulatedProvider):
    """A host that survives its pool."""

    async def aclose(self) -> None:
        """Leave the sandboxes alive."""


async def killed(pool: Pool) -> None:
    """Simulate a kill: the tasks end, and nothing is released."""
    await pool.__aexit__(KeyboardInterrupt, KeyboardInterrupt(), None)


async def test_a_restarted_pool_restores_its_leases_and_kills_orphans(tmp_path: Path) -> None:
    provider = Outliving(SimulationConfig(boot_s=0.01, answer_s=0, exec_s=0))
    spec = SandboxSpec(labels={HOLDER_LABEL: "w"}, idempotency_key="k", ttl_s=500)
    pool = Pool({"host": provider}, ledger=SandboxLedger(tmp_path))
    await pool.__aenter__()
    first = (await pool.lease_one(LeaseRequest(spec=spec))).ref
    short = SandboxSpec(labels={HOLDER_LABEL: "v"}, ttl_s=500)
    await pool.lease([short])
    await killed(pool)
    ledger = SandboxLedger(tmp_path)
    await provider.create(SandboxSpec(labels={"headrace-owner": ledger.owner}, idempotency_key="unknown"))
    assert len(provider.living) == 3
    async with Pool({"host": provider}, ledger=ledger) as again:
        assert len(provider.living) == 2
        status = await again.status()
        assert (status.live, status.adopted_total, status.orphans_total) == (2, 2, 1)
        assert (await again.lease_one(LeaseRequest(spec=spec))).ref == first
        await again.release_holder("v")
        assert {info.id for info in provider.living} == {first.id}
    assert provider.living == []
