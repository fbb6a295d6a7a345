"""A ledger as Parquet files: what other programs read is what the ledger holds."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from headrace.actors.rollouts import worker
from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.export import export
from headrace.buffer.audit.export_columns import converted, export_columns
from headrace.buffer.errors import ExportRefused, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.types import StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases
from support.recorded_spans import recorded_spans

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"


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


def simulated_run(folder: Path, **changes: Any) -> Path:
    """The ledger of a run in virtual time, in which attempts are cancelled."""
    sizes = {"batch_size": 16, "group_size": 4, "slots": 32, "tasks": 64, "turns": 1, "steps": 8, "heldout": 4}
    given = {"rule": "fraction(0.75)", "buffer": {"unfinished": "abort"}, "failure": 0.1, "evaluate_every": 3}
    run_plan(make_plan("swe64", sizes | given | changes), folder)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch, recorded_spans(patch, worker, run_id=""):
        run = simulated_run(folder / "run")
    export(run, folder / "out")
    return folder


def test_the_columns_of_attempts_are_typed(exported: Path) -> None:
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    names = pyarrow.list_(text)
    schema = parquet.read_schema(exported / "out" / "attempts.parquet")
    scores, timeline = schema.field("scores").type, schema.field("timeline").type
    assert dict(types_of(exported, "attempts")) == {
        **dict.fromkeys(("rollout_id", "group_id", "task_id", "version", "cause", "detail", "trace_id", "host"), text),
        **dict.fromkeys(("charged_to", "image", "sandbox", "worker", "node", "agent", "masked"), text),
        **dict.fromkeys(("family", "gateway"), text),
        **dict.fromkeys(("attempt", "turns", "trajectory_file", "end_sequence", "boot_tries", "prompt_tokens"), whole),
        **dict.fromkeys(("sampled_tokens", "trained_tokens", "cached_tokens", "retractions", "memory_bytes"), whole),
        **dict.fromkeys(("issued_at_s", "ended_at_s", "reward", "wall_s", "cpu_s"), real),
        **dict.fromkeys(("cpu_waited_s", "load"), real),
        **dict.fromkeys(("offered", "trainable", "solved", "warm"), pyarrow.bool_()),
        **dict.fromkeys(("engines", "tools", "versions"), names),
        "trained": pyarrow.map_(text, whole),
        "phases_s": pyarrow.map_(text, real),
        "parts_s": pyarrow.map_(text, real),
        "scores": scores,
        "timeline": timeline,
    }
    assert {field.name for field in timeline} == {"began_at_s", "segments", "merged", "left_out"}
    assert scores.get_field_index("steps") >= 0


def types_of(folder: Path, table: str) -> list[tuple[str, pyarrow.DataType]]:
    schema = parquet.read_schema(folder / "out" / f"{table}.parquet")
    return [(field.name, field.type) for field in schema]


def test_only_documents_without_a_form_are_json(exported: Path) -> None:
    """Every text that is JSON in the ledger's rows."""
    found = set()
    for path in (exported / "out").iterdir():
        table = parquet.read_table(path)
        for name in table.column_names:
            if table.schema.field(name).type == pyarrow.string():
                values = [value for value in table.column(name).to_pylist() if value]
                found |= {(path.stem, name) for value in values if value[0] in "[{"}
    assert found <= {("ended_evaluations", "summary"), ("meta", "value")}


def test_exported_attempts_name_task_image_engines_parts_and_versions(exported: Path) -> None:
    attempts = parquet.read_table(exported / "out" / "attempts.parquet").to_pylist()
    evidence = read_evidence(exported / "run")
    tasks = {group.group_id: group.task_id for group in evidence.groups}
    records = {(each.rollout_id, each.attempt): each for each in evidence.attempts}
    assert {(row["rollout_id"], row["attempt"]) for row in attempts} == set(records)
    for row in attempts:
        record = records[row["rollout_id"], row["attempt"]]
        assert row["task_id"] == tasks[row["group_id"]]
        assert dict(row["trained"]) == {str(part.version): part.tokens for part in record.trained}
        assert (row["cause"], row["offered"]) == (record.cause, record.offered)
        if record.breakdown is None:
            assert (row["wall_s"], row["parts_s"], row["image"], row["engines"]) == (None,) * 4
            continue
        assert dict(row["parts_s"]) == record.breakdown.parts_s
        assert row["wall_s"] == pytest.approx(sum(dict(row["parts_s"]).values()), abs=0.01)
        assert row["timeline"]["segments"][0]["start_s"] == 0.0
        assert max(each["end_s"] for each in row["timeline"]["segments"]) == pytest.approx(row["wall_s"], abs=0.01)
        assert row["image"] == record.breakdown.labels["image"]
        assert tuple(row["engines"] or ()) == record.breakdown.labels.get("engines", ())
    solved = [row for row in attempts if row["cause"] == "solved"]
    assert solved and all(row["host"] and row["image"] and row["engines"] and row["versions"] for row in solved)


def test_cancelled_attempts_are_exported_with_their_time_and_trace(exported: Path) -> None:
    attempts = parquet.read_table(exported / "out" / "attempts.parquet").to_pylist()
    cancelled = [row for row in attempts if row["cause"] == "cancelled"]
    begun = [row for row in cancelled if row["wall_s"] is not None]
    assert begun
    assert len(begun) >= 0.9 * len(cancelled), "those that never began on a worker have none"
    assert all(dict(row["parts_s"]) and len(row["trace_id"]) == 32 and row["image"] for row in begun)


def test_an_evicted_attempt_is_exported_with_its_time_and_the_reason(tmp_path: Path) -> None:
    changes = {"rule": "all", "buffer": {}, "failure": 0.0, "slots": 64, "max_staleness": 1, "learner_s": 20}
    run = simulated_run(tmp_path / "run", **changes)
    export(run, tmp_path / "out")
    attempts = parquet.read_table(tmp_path / "out" / "attempts.parquet").to_pylist()
    evicted = [row for row in attempts if "evicted: over the staleness bound at version 1." in row["detail"]]
    assert {row["cause"] for row in evicted} >= {"cancelled"}
    assert all(row["wall_s"] > 0 and dict(row["parts_s"]) and row["task_id"] for row in evicted)
    cancelled = [row for row in attempts if row["cause"] == "cancelled"]
    assert cancelled and all(row["detail"] for row in cancelled)


def test_exported_evaluations_and_batches_are_typed(exported: Path) -> None:
    evaluations = parquet.read_table(exported / "out" / "evaluations.parquet").to_pylist()
    assert evaluations and all(row["task_id"] and row["wall_s"] > 0 and dict(row["parts_s"]) for row in evaluations)
    [batch, *_] = parquet.read_table(exported / "out" / "batches.parquet").to_pylist()
    assert set(batch["members"][0]) == {"rollout_id", "attempt", "staleness"}
    assert isinstance(batch["closed"], bool)
    [commit, *_] = parquet.read_table(exported / "out" / "commits.parquet").to_pylist()
    assert all(isinstance(value, float) for _, value in commit["metrics"])


def test_labels_of_another_type_are_null() -> None:
    columns = export_columns("attempts", [("breakdown", "TEXT")])
    strange = Breakdown(
        wall_s=1.0, labels={"image": 7.0, "warm": "yes", "boot_tries": True, "memory_bytes": 1e300, "engines": "e"}
    )
    row = {
        column.name: array.to_pylist()[0]
        for column, array in zip(columns, converted(columns, ["breakdown"], [[strange.to_json()]]), strict=True)
    }
    assert row.pop("wall_s") == 1.0
    assert row.pop("parts_s") == []
    assert set(row.values()) == {None}


async def test_unreadable_trajectories_are_counted(tmp_path: Path) -> None:
    store, _ = await make_run(tmp_path / "run")
    await store.aclose()
    _, first, second, *_ = sorted((tmp_path / "run" / "trajectories").glob("*.db"))
    first.unlink()
    with closing(sqlite3.connect(second)) as database:
        database.execute("UPDATE trajectories SET data = substr(data, 1, 20)")
        database.commit()
    assert export(tmp_path / "run", tmp_path / "out").unreadable == 2


def test_a_ledger_is_exported_without_changing_it(tmp_path: Path) -> None:
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
