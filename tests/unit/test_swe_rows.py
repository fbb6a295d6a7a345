"""Rows of software-engineering data sets: each of the schemas, and what is refused with which reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.buffer.tasks.datasets.rows import RowRefused
from headrace.buffer.tasks.datasets.swe import SweEnvironment, read_repositories, task_of
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, Swepro, TestIds
from headrace.buffer.tasks.task import load_tasks, write_tasks
from support.conversions import split

SHARED = Path(os.environ.get("HEADRACE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "swe"
ENVIRONMENT = SweEnvironment(image="images/{instance_id}.tar")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FLAT = {
    "instance_id": "calc-7",
    "repo": "example/calc",
    "base_commit": COMMIT,
    "problem_statement": "mean([]) raises, it should return 0.0",
    "patch": "the gold patch",
    "test_patch": "diff --git a/tests/test_mean.py b/tests/test_mean.py\n",
    "FAIL_TO_PASS": json.dumps(["tests/test_mean.py::test_nothing"]),
    "PASS_TO_PASS": ["tests/test_mean.py::test_some[a", "tests/test_mean.py::TestX::test_y"],
    "created_at": "2024-01-01",
}
OUTER = {"instance_id": "calc-7", "image": "local", "workdir": "/workspace/calc", "problem_statement": "mend it"}
SWEPRO = {
    "run_script_path": "run.sh",
    "parser_script_path": "scripts/parser.py",
    "before_repo_set_cmd": f"git reset --hard {COMMIT}\ngit checkout abc -- tests/test_mean.py",
    "selected_test_files": ["tests/test_mean.py"],
    "fail_to_pass": ["test_nothing"],
    "pass_to_pass": ["test_some"],
}


def wrapped(**metadata: Any) -> dict[str, Any]:
    return {"prompt": "", "label": "calc-7", "metadata": OUTER | metadata}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "run.sh").write_text("run")
    (tmp_path / "scripts" / "parser.py").write_text("parse")
    return tmp_path


def test_a_flat_row_becomes_a_task(folder: Path) -> None:
    task = task_of(FLAT, ENVIRONMENT, folder)
    repository = task.evaluator.repository
    assert repository is not None
    assert (task.id, task.family, task.image) == ("calc-7", "swe/example/calc", "images/calc-7.tar")
    assert (type(task.evaluator), repository.workdir) == (RepositoryEvaluator, "/testbed")
    assert repository.base_commit == COMMIT
    assert repository.grader == TestIds(
        fail_to_pass=("tests/test_mean.py::test_nothing",),
        pass_to_pass=("tests/test_mean.py::test_some[a", "tests/test_mean.py::TestX::test_y"),
        test_patch=FLAT["test_patch"],
    )
    assert "gold" not in str(task)


def test_a_row_with_the_fields_in_its_metadata_becomes_the_same_task(folder: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "do"}], "metadata": {"remote_env_info": FLAT | {"image": "i"}}}
    task = task_of(row, ENVIRONMENT, folder)
    assert task.image == "i"
    assert task.evaluator == task_of(FLAT, ENVIRONMENT, folder).evaluator


def test_eval_cmd_and_pre_commands_become_grader_and_preparation(folder: Path) -> None:
    row = wrapped(eval_cmd="python -m pytest -q tests", pre_commands="git checkout x -f\\npip list")
    repository = task_of(row, ENVIRONMENT, folder).evaluator.repository
    assert repository is not None
    assert repository.grader == EvalCommand(command="python -m pytest -q tests")
    assert (repository.workdir, repository.prepare) == ("/workspace/calc", ("git checkout x -f\npip list",))


def test_a_fail_to_pass_script_becomes_a_grader(folder: Path) -> None:
    row = wrapped(remote_env_info={"f2p_script": "import pytest", "pre_commands": ["true", "false"]})
    repository = task_of(row, ENVIRONMENT, folder).evaluator.repository
    assert repository is not None
    assert (repository.grader, repository.prepare) == (EvalScript(script="import pytest"), ("true\nfalse",))


def test_swepro_takes_precedence_and_its_scripts_are_read(folder: Path) -> None:
    row = wrapped(swepro=SWEPRO, eval_cmd="true")
    repository = task_of(row, ENVIRONMENT, folder).evaluator.repository
    assert repository is not None
    grader = repository.grader
    assert isinstance(grader, Swepro)
    assert (grader.run_script, grader.parser_script) == ("run", "parse")
    assert (grader.fail_to_pass, grader.selected_test_files) == (("test_nothing",), ("tests/test_mean.py",))
    assert repository.base_commit == COMMIT


NEW_TEST = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
new file mode 100644
--- /dev/null
+++ b/tests/test_calc.py
@@ -0,0 +1,2 @@
+def test_empty():
+    assert mean([]) == 0.0
"""
PICTURE = """\
diff --git a/tests/base.png b/tests/base.png
new file mode 100644
index 0000000..1234567
Binary files /dev/null and b/tests/base.png differ
"""


@pytest.mark.parametrize(
    "patch", [NEW_TEST, NEW_TEST.rstrip("\n"), NEW_TEST + "\n"], ids=["whole", "stripped", "blank"]
)
def test_a_test_patch_may_end_as_data_sets_leave_it(folder: Path, patch: str) -> None:
    repository = task_of(FLAT | {"test_patch": patch}, ENVIRONMENT, folder).repository
    assert repository is not None
    assert isinstance(repository.grader, TestIds)
    assert repository.grader.test_patch == patch


def test_tests_may_be_in_the_image(folder: Path) -> None:
    """As in the rows of SWE-smith, which name their image `image_name` and have no test patch."""
    row = {key: value for key, value in FLAT.items() if key not in ("test_patch", "base_commit", "image")}
    task = task_of(row | {"image_name": "/images/smith"}, ENVIRONMENT, folder)
    assert task.repository is not None
    assert isinstance(task.repository.grader, TestIds)
    assert (task.image, task.repository.grader.test_patch) == ("/images/smith", "")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "the row: Input should be"),
        (FLAT | {"FAIL_TO_PASS": 3}, "FAIL_TO_PASS"),
        (FLAT | {"FAIL_TO_PASS": "no json"}, "FAIL_TO_PASS: must be a list, or"),
        (FLAT | {"FAIL_TO_PASS": "[1]"}, "FAIL_TO_PASS: must be a list of strings"),
        (FLAT | {"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "fail_to_pass: is empty"),
        (FLAT | {"FAIL_TO_PASS": ["test_x (module.Case)"]}, "is not a test id of pytest"),
        (FLAT | {"FAIL_TO_PASS": ["../x.py::test"]}, "is not a test id of pytest"),
        (FLAT | {"test_patch": " "}, "test_patch: is empty"),
        (FLAT | {"test_patch": "see the pull request"}, "test_patch: cannot be applied: line 1 of the diff"),
        (FLAT | {"test_patch": NEW_TEST[:-28]}, "line 7 of the diff: a hunk is shorter"),
        (FLAT | {"test_patch": NEW_TEST + PICTURE}, "the binary file tests/base.png has no data"),
        (FLAT | {"base_commit": None}, "base_commit: is missing"),
        (FLAT | {"problem_statement": ""}, "problem_statement: is missing"),
        (wrapped(), "the row has no grader"),
        (wrapped(swepro=SWEPRO | {"run_script_path": "../run.sh"}), "outside the data file's folder"),
        (wrapped(swepro=SWEPRO | {"run_script_path": "none.sh"}), "cannot read 'none.sh'"),
        (wrapped(swepro=SWEPRO | {"fail_to_pass": [], "pass_to_pass": []}), "fail_to_pass: is empty"),
        (wrapped(swepro={"fail_to_pass": ["x"]}), "metadata.swepro.run_script_path: Field required"),
        (wrapped(eval_cmd=["pytest"]), "metadata.eval_cmd"),
        (wrapped(eval_cmd="pytest", workdir="calc"), "workdir: 'calc' must be an absolute path"),
    ],
)
def test_invalid_rows_are_refused(folder: Path, row: object, said: str) -> None:
    with pytest.raises(RowRefused) as caught:
        task_of(row, ENVIRONMENT, folder)
    assert said in str(caught.value)


def test_a_row_without_an_image_is_refused(folder: Path) -> None:
    with pytest.raises(RowRefused, match="image: is missing"):
        task_of(FLAT, SweEnvironment(), folder)


def test_a_file_gives_tasks_and_refusals_by_line_and_written_tasks_round_trip(folder: Path) -> None:
    path = folder / "rows.jsonl"
    other = wrapped(swepro=SWEPRO, instance_id="calc-8")
    rows = [json.dumps(FLAT), "", "{", json.dumps(other), json.dumps(wrapped())]
    path.write_text("\n".join(rows))
    tasks, refusals = split(read_repositories(path, ENVIRONMENT))
    assert [task.family for task in tasks] == ["swe/example/calc", "swe/swepro"]
    assert [refusal.line for refusal in refusals] == [3, 5]
    write_tasks(folder / "tasks.jsonl", tasks)
    assert load_tasks(folder / "tasks.jsonl") == tasks


@pytest.mark.parametrize("name", ["swegym_rows5.nemo-gym.jsonl", "swebench_verified_rows5.nemo-gym.jsonl"])
def test_rows_from_the_public_data_sets_are_converted(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip("the shared data is not beside this checkout")
    tasks, refusals = split(read_repositories(path, ENVIRONMENT))
    assert (len(tasks), refusals) == (5, ())


def test_rows_that_only_name_an_image_are_refused() -> None:
    path = SHARED / "swebench_verified_ids10.roll.jsonl"
    if not path.exists():
        pytest.skip("the shared data is not beside this checkout")
    tasks, refusals = split(read_repositories(path, ENVIRONMENT))
    assert (len(tasks), len(refusals)) == (0, 10)
