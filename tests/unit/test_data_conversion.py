"""`headrace data convert`: forms are recognised, rows converted one by one, and archives stay in their folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.services.corpus import read_passages
from headrace.buffer.tasks.datasets.archives import ArchiveBounds, unpack
from headrace.buffer.tasks.datasets.converters import Converted, SettingsRefused, convert
from headrace.buffer.tasks.datasets.recognition import form_of_row
from headrace.buffer.tasks.datasets.rows import SourceRefused
from headrace.buffer.tasks.evaluators import AnswerEvaluator
from headrace.buffer.tasks.task import load_tasks

SHARED = Path(os.environ.get("HEADRACE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
real_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not beside this checkout")
ASKED = {"question": "who sang?", "answer": ["Elm", "Elm Oak"]}
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer in tags: who sang?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Elm"]}},
    "extra_info": {"split": "train", "index": 7},
}
SWE = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["t.py::test_a"],
}
HARBOR = {
    "task.toml": '[task]\nname = "count"\n',
    "instruction.md": "Count the lines.\n",
    "environment/Dockerfile": "FROM ubuntu:22.04\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
}
IMAGES = {"images": {"ubuntu:22.04": "/images/jammy"}}


def written(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def run(source: Path, form: str = "auto", **settings: Any) -> Converted:
    return convert(source, source.parent / "out", form=form, settings=settings)


def archive(files: dict[str, str], *others: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        for other in others:
            tar.addfile(other)
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


def test_questions_become_tasks_with_targets(tmp_path: Path) -> None:
    done = run(written(tmp_path, [ASKED, SEARCH_R1, {"id": "x", "question": "when?", "expected_answer": "1972"}]))
    asked, prompted, other = load_tasks(done.tasks)
    assert done.form == "search-r1"
    assert [task.id for task in (asked, prompted, other)] == ["rows-1", "nq-train-7", "rows-x"]
    assert [task.evaluator.answer and task.evaluator.answer.targets for task in (asked, prompted, other)] == [
        ("Elm", "Elm Oak"),
        ("Elm",),
        ("1972",),
    ]
    assert isinstance(asked.evaluator, AnswerEvaluator)
    assert asked.environment is not None
    assert asked.environment.kind == "search"
    assert prompted.messages[0].content == prompted.instruction == "Answer in tags: who sang?"
    assert prompted.origin is not None
    assert (prompted.origin.source, prompted.origin.split) == ("nq", "train")


def test_parquet_has_the_same_tasks_as_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{**SEARCH_R1, "extra_info": {"split": "train", "index": number}} for number in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    done = run(tmp_path / "rows.parquet")
    assert load_tasks(done.tasks) == load_tasks(run(written(tmp_path, rows)).tasks)
    damaged = (tmp_path / "rows.parquet").read_bytes()[:-40]
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(SettingsRefused, match="damaged Parquet after row 0"):
        convert(tmp_path / "damaged.parquet", tmp_path / "out", form="search-r1", settings={})


def test_bad_rows_never_end_a_conversion(tmp_path: Path) -> None:
    rows = [
        ASKED,
        "{",
        "[" * 100_000,
        '"\\ud800"',
        {"question": "\ud800", "answer": ["a"]},
        {"question": "q", "answer": [" "]},
        {"question": "q", "answer": 3},
        {"prompt": [{"role": "tool", "content": "x"}], "reward_model": {"ground_truth": "a"}},
        {**SEARCH_R1},
        {**SEARCH_R1},
        SWE,
        {"id": "1", "contents": "a passage"},
        "",
    ]
    source = written(tmp_path, rows)
    source.write_bytes(source.read_bytes() + b"\xff\n")
    done = run(source)
    assert [task.id for task in load_tasks(done.tasks)] == ["rows-1", "nq-train-7"]
    reasons = {refusal.line: refusal.reason for refusal in done.refusals}
    assert sorted(reasons) == [2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14]
    assert reasons[10] == "id: 'nq-train-7' is a duplicate of row 9"
    assert reasons[11] == "looks like the form swe, not search-r1; use --form swe"
    assert "services.retriever.corpus" in reasons[12]
    assert reasons[14] == "is not UTF-8 text"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["read"], report["converted"], report["refused"]) == (13, 2, 11)
    assert sum(report["reasons"].values()) == 11
    assert "/" not in report["source"]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (ASKED, "search-r1"),
        (SEARCH_R1, "search-r1"),
        (SWE, "swe"),
        ({"metadata": {"eval_cmd": "pytest"}}, "swe"),
        ({"text": "mend", "metadata": {"instance": SWE}}, "openclaw"),
        ({"index": 0, "metadata": {"user_id": "u", "actions": []}}, "tau"),
        ({"user_scenario": {}, "evaluation_criteria": {}}, "tau2"),
        ({"task_id": "t", "instruction": "i"}, "endless"),
        ({"data_source": "endless", "prompt": []}, "endless"),
        ({"prompt": "mend it"}, None),
        ([1], None),
    ],
)
def test_rows_are_recognised(row: object, form: str | None) -> None:
    assert form_of_row(row) == form


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "has no rows"),
        ([{"prompt": "mend it"}], "of no known form .row 1 has the keys prompt.; name it with --form"),
        ([{"id": "1", "contents": "x"}], "a passage of a corpus"),
        (["[1, 2"], "not valid JSON"),
    ],
)
def test_files_without_a_known_form_are_refused(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(SettingsRefused, match=said):
        run(written(tmp_path, rows))
    assert not (tmp_path / "out").exists()


def test_openclaw_rows_are_graded_by_their_test_ids(tmp_path: Path) -> None:
    instance = {**SWE, "image_name": "img", "eval_script": "pytest t.py"}
    alone = {"instance_id": "c", "eval_script": "pytest t.py", "image_name": "img"}
    rows = [{"text": "mend it", "metadata": {"instance": found}} for found in (instance, alone)]
    done = run(written(tmp_path, rows))
    [task] = load_tasks(done.tasks)
    assert (done.form, task.id, task.image, task.instruction) == ("openclaw", "a__b-1", "img", "mend it")
    assert "eval_script alone cannot grade" in done.refusals[0].reason


def test_archives_of_task_folders(tmp_path: Path) -> None:
    files = {f"all/{folder}/{name}": text for folder in ("good", "linked") for name, text in HARBOR.items()}
    files["all/good/task.toml"] = '[task]\nname = "good"\n'
    packed = archive(
        files,
        member("all/linked/tests/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("../outside"),
        member("/absolute"),
    )
    (tmp_path / "tasks.tar.gz").write_bytes(gzip.compress(packed))
    done = run(tmp_path / "tasks.tar.gz", **IMAGES)
    assert [task.id for task in load_tasks(done.tasks)] == ["good"]
    assert [refusal.reason for refusal in done.refusals] == [
        "linked: all/linked/tests/link: is a link, a device or a pipe",
        "../outside: leaves the folder",
        "/absolute: leaves the folder",
    ]
    assert not (tmp_path / "outside").exists()


def test_a_packed_task_folder_in_a_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    linked = archive(HARBOR, member("tests/device", tarfile.CHRTYPE))
    rows = [{"path": "a", "task_binary": packed} for packed in (archive(HARBOR), linked, b"no archive")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "echo.parquet")
    done = run(tmp_path / "echo.parquet", **IMAGES)
    assert (done.form, [task.id for task in load_tasks(done.tasks)]) == ("endless", ["count"])
    link, damaged = (refusal.reason for refusal in done.refusals)
    assert link == "task_binary: tests/device: is a link, a device or a pipe"
    assert damaged.startswith("task_binary: the archive is damaged")


def test_archives_are_bounded(tmp_path: Path) -> None:
    packed = archive({"a": "x" * 4096, "b": "y"})
    assert unpack(io.BytesIO(packed), tmp_path, ArchiveBounds(file_bytes=1024)) == {"a": "is larger than 0 MiB"}
    assert (tmp_path / "b").read_text() == "y"
    with pytest.raises(SourceRefused, match="too large"):
        unpack(io.BytesIO(gzip.compress(packed)), tmp_path, ArchiveBounds(total_bytes=4096))
    with pytest.raises(SourceRefused, match="more than 1 members"):
        unpack(io.BytesIO(packed), tmp_path, ArchiveBounds(members=1))


def test_licences_are_named_and_never_guessed(tmp_path: Path) -> None:
    source = written(tmp_path, [ASKED])
    assert run(source).licence.startswith("unknown")
    (tmp_path / "LICENSE.Other").touch()
    assert run(source).licence == "unknown; beside the data: LICENSE.Other"
    (tmp_path / "LICENSE").touch()
    assert run(source).licence == "see LICENSE"
    (tmp_path / "rows.README.md").touch()
    assert run(source).licence == "see rows.README.md"
    done = convert(source, tmp_path / "out", form="auto", settings={}, licence="CC BY-SA 3.0")
    [task] = load_tasks(done.tasks)
    assert task.origin is not None
    assert (done.licence, task.origin.licence) == ("CC BY-SA 3.0", "CC BY-SA 3.0")


@real_data
@pytest.mark.parametrize(
    ("name", "form", "read", "count"),
    [
        ("search-r1/NQ-open.dev.jsonl", "search-r1", 3610, 3610),
        ("search-r1/hotpotqa_example5.gym.jsonl", "search-r1", 5, 5),
        ("tau-bench/retail/tasks_dev.jsonl", "tau", 20, 20),
        ("tau-bench/tau2/retail/tasks.json", "tau2", 114, 107),
        ("endless-terminals/tasks10_instructions.json", "endless", 10, 0),
        ("swe/swegym_rows5.nemo-gym.jsonl", "swe", 5, 0),
    ],
)
def test_real_rows_go_through(tmp_path: Path, name: str, form: str, read: int, count: int) -> None:
    done = convert(SHARED / name, tmp_path, form="auto", settings={})
    assert (done.form, done.count + done.refused, done.count) == (form, read, count)
    if count:
        assert len(load_tasks(done.tasks)) == count


@real_data
def test_the_example_corpus_is_no_task_file_and_serves_a_retriever(tmp_path: Path) -> None:
    corpus = SHARED / "search-r1" / "example_corpus.jsonl"
    with pytest.raises(SettingsRefused, match=r"services\.retriever\.corpus"):
        convert(corpus, tmp_path, form="auto", settings={})
    assert len(list(read_passages(corpus))) == 10


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_refused_rows_can_end_the_command_with_1(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    rows = [SWE | {"image": "host", "problem_statement": "mend it"}, SWE | {"image": "host"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "convert", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), *options]
    assert CliRunner().invoke(app, command).exit_code == code
    assert len((tmp_path / "out" / "refused.jsonl").read_text().splitlines()) == 1
