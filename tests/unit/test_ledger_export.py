"""A ledger as Parquet files: what other programs read is what the ledger holds."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from pyarrow import parquet

from headrace.buffer.audit.export import export
from headrace.buffer.errors import ExportRefused, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.types import StepReport
from headrace.buffer.versions import PolicyVersion
from support import replay_cases as cases

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger_v1"


async def make_run(run_dir: Path) -> tuple[ReplayStore, list]:
    """An open store with one trained batch, and trajectories in several files."""
    opened = ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3, trajectory_file_bytes=1)
    store = await opened
    version = await store.open_epoch(None)
    for number, order in enumerate(await store.issue(100, version)):
        await store.offer_many([cases.result(order, version, version, reward=float(number % 2))])
    batch = await store.take(version, 1, timeout_s=1.0)
    after = PolicyVersion(1, 1)
    await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    return store, list(batch.items)


async def test_tables_and_trajectories_are_exported_from_a_live_run(tmp_path: Path) -> None:
    store, items = await make_run(tmp_path / "run")
    async with store:
        report = export(tmp_path / "run", tmp_path / "out")
    tables = {path.stem: parquet.read_table(path) for path in (tmp_path / "out").iterdir()}
    assert {name: table.num_rows for name, table in tables.items()} == report.rows
    assert report.unreadable == 0
    states = tables["rollouts"].to_pydict()["state"]
    assert states.count("trained") == cases.SMALL.batch_size
    rows = {row["rollout_id"]: row for row in tables["trajectories"].to_pylist()}
    assert len(rows) == report.rows["trajectories"] == len(states)
    for item in items:
        (row,) = item.trajectory.rows
        written = rows[item.rollout_id]
        assert written["tokens"] == row.tokens_T.tolist()
        assert written["loss_mask"] == row.loss_mask_T.tolist()
        assert written["logprobs"] == row.logprobs_T.tolist()
        assert [(span["start"], span["end"], span["version"]) for span in written["versions"]] == [
            (span.start, span.end, str(span.version)) for span in row.versions
        ]
    assert len(list((tmp_path / "run" / "trajectories").glob("*.db"))) > 1


async def test_a_run_is_exported_to_a_folder_below_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = await make_run(tmp_path / "run")
    await store.aclose()
    monkeypatch.chdir(tmp_path)
    assert export(Path("run"), Path("out")).unreadable == 0
    assert (tmp_path / "out" / "trajectories.parquet").is_file()


async def test_unreadable_trajectories_are_counted(tmp_path: Path) -> None:
    store, _ = await make_run(tmp_path / "run")
    await store.aclose()
    _, first, second, *_ = sorted((tmp_path / "run" / "trajectories").glob("*.db"))
    first.unlink()
    with closing(sqlite3.connect(second)) as database:
        database.execute("UPDATE trajectories SET data = substr(data, 1, 20)")
        database.commit()
    assert export(tmp_path / "run", tmp_path / "out").unreadable == 2


def test_an_old_ledger_is_exported_without_changing_it(tmp_path: Path) -> None:
    run_dir = shutil.copytree(GOLDEN, tmp_path / "run")
    before = (run_dir / "ledger.db").read_bytes()
    report = export(run_dir, tmp_path / "out")
    assert report.rows["trajectories"] > 0
    assert (run_dir / "ledger.db").read_bytes() == before


@pytest.mark.parametrize("make", ["folder", "no run", "no ledger", "under a file"])
def test_a_refused_export_leaves_no_files(tmp_path: Path, make: str) -> None:
    run_dir, out, wanted = shutil.copytree(GOLDEN, tmp_path / "run"), tmp_path / "out", ExportRefused
    if make == "folder":
        out.mkdir()
    elif make == "no run":
        run_dir, wanted = tmp_path / "other", LedgerRefused
    elif make == "no ledger":
        (run_dir / "ledger.db").write_bytes(b"no database at all, whatever its name says" * 100)
        wanted = LedgerRefused
    else:
        (tmp_path / "file").write_text("")
        out = tmp_path / "file" / "out"
    with pytest.raises(wanted):
        export(run_dir, out)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert make == "folder" or not out.exists()
