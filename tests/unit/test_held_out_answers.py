"""Answers, their file, their folders and their summary, without any actor."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.agents.programs.agent import AgentReport, StopReason
from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.patch import file_diff
from headrace.actors.evaluation.graders.verdict import Verdict
from headrace.actors.rollouts import evaluation_folders as folders_module
from headrace.actors.rollouts.answers import Answer, AnswerLog, answer_id, plain_name, read_answers
from headrace.actors.rollouts.evaluation_folders import (
    AnswerRecording,
    EvaluationFolders,
    conversation_lines,
    evaluation_order,
)
from headrace.actors.rollouts.rollout_reports import RolloutReports
from headrace.actors.rollouts.summary import About, pass_rates, summarize_answers, summary_lines, write_summary
from headrace.actors.run.sources import problem_digest, refuse_overlap
from headrace.actors.training.replay import Evaluated
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause, RolloutId
from headrace.serve.gateway.capture.rows import TranscriptTurn
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.http.codec import read_spec

ABOUT = About(model="/models/tiny", recipe_sha256="00")
HOSTILE = ("../../etc/passwd", "a/b", "..", ".", "/", "a\x00b", "con\n", "ä" * 300, "\ud800", " ", "x" * 500)


def answer(task_id: str = "one", sample: int = 0, reward: float | None = 1.0, **changes: object) -> Answer:
    cause = Cause.INFRA if reward is None else Cause.SOLVED if reward else Cause.FAILED
    made = Answer(
        rollout_id=answer_id("base", TaskId(task_id), sample),
        task_id=TaskId(task_id),
        sample=sample,
        attempt=1,
        cause=cause,
        reward=reward,
        solved=cause is Cause.SOLVED,
        detail="",
        turns=2,
        sampled_tokens=7,
        versions=(("1.9", 3), ("1.10", 4)),
        phases_s=(("queue", 0.5), ("agent", 2.0)),
        trace_id="0a",
        folder=f"{plain_name(task_id)}-{sample}",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_line_is_read_back_unchanged_and_written_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    log = AnswerLog(path)
    log.append([answer(), answer(sample=1, reward=None)])
    log.append([answer(detail="another"), answer("two")])
    again = AnswerLog(path)
    again.append([answer("two"), answer("three")])
    assert read_answers(path) == (answer(), answer(sample=1, reward=None), answer("two"), answer("three"))
    assert again.get(answer().rollout_id) == answer()
    assert again.get(RolloutId("base/other/0")) is None


def test_an_incomplete_last_line_is_removed_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    AnswerLog(path).append([answer(), answer("two")])
    data = path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:cut])
        log = AnswerLog(path)
        assert log.get(answer("two").rollout_id) is None
        log.append([answer("two")])
        assert path.read_bytes() == data


def test_an_invalid_line_is_reported_by_number(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    AnswerLog(path).append([answer()])
    with path.open("ab") as file:
        file.write(b'{"rollout_id": 1}\n')
    with pytest.raises(ConfigError, match=r"results.jsonl:2: not a valid answer"):
        AnswerLog(path)


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from headrace.actors.rollouts.answers import Answer, AnswerLog
log = AnswerLog(Path(sys.argv[1]))
first = Answer.from_json(__import__("json").loads(sys.argv[2]))
for number in range(10**6):
    log.append([replace(first, rollout_id=f"base/t/{number}", sample=number)])
    print(number, flush=True)
"""


def test_acknowledged_answers_are_present_exactly_once_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = json.dumps(answer().to_json())
    acknowledged = -1
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), first], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        lines = itertools.islice(writer.stdout, acknowledged + 60)
        told = [int(line) for line in lines]
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        acknowledged = told[-1]
        known = [one.sample for one in AnswerLog(path)._known.values()]
        assert known == list(range(len(known))), "each once, in order"
        assert len(known) > acknowledged


@given(st.lists(st.text(st.characters(), max_size=100), unique=True, max_size=20))
def test_every_task_id_has_a_unique_name_that_is_not_a_path(ids: list[str]) -> None:
    names = [plain_name(task_id) for task_id in (*ids, *HOSTILE) if task_id not in HOSTILE or task_id not in ids]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]*(\.[0-9a-f]{16})?", name) for name in names)
    for task_id in ids:
        session_id = f"{answer_id('step-10', TaskId(task_id), 3)}.1.0123abcd"
        assert read_spec(orjson.dumps({"session_id": session_id}), SessionId("other")).session_id == session_id


def test_folders_for_hostile_ids_stay_inside_the_root(tmp_path: Path) -> None:
    folders = EvaluationFolders(root=tmp_path / "evaluations", about=ABOUT)
    for task_id in HOSTILE:
        one = answer(task_id)
        assert folders.write("base", one, RolloutReports()) == one
        kept = folders.read("base", one.folder)
        assert kept is not None
        assert (kept.rollout_id, kept.folder) == (one.rollout_id, one.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations"]
    assert len(list((tmp_path / "evaluations" / "base" / "rollouts").iterdir())) == len(HOSTILE)


def said(text: str) -> TranscriptTurn:
    return TranscriptTurn(
        turn_id="t1",
        parent="",
        lineage="0",
        prompt="<|user|>go",
        answer=text,
        sampled_tokens=3,
        status="delivered",
        masked="",
        versions=("1.9",),
    )


def test_a_later_attempt_replaces_the_whole_folder(tmp_path: Path) -> None:
    folders = EvaluationFolders(root=tmp_path, about=ABOUT)
    first = RolloutReports(
        agent=AgentReport(stop=StopReason.ERROR, turns=1, exit_code=2, result="\ud800 bad", log_tail="x" * 10**6),
        verdict=Verdict(reward=0.0, cause=Cause.FAILED, detail="no", log="printed \udcff", patch="--- a\n"),
    )
    folders.write("base", answer(reward=0.0), first)
    target = folders.rollout("base", answer().folder)
    assert sorted(path.name for path in target.iterdir()) == ["evaluator.log", "metadata.json", "patch.diff"]
    assert (target / "evaluator.log").read_bytes().startswith(b"failed: no\nprinted ")
    assert json.loads((target / "metadata.json").read_bytes())["agent"]["exit_code"] == 2
    assert (target / "metadata.json").stat().st_size < 20_000
    folders.write("base", answer(attempt=2), RolloutReports())
    assert [path.name for path in target.iterdir()] == ["metadata.json"]
    assert folders.read("base", answer().folder) == answer(attempt=2)
    assert list(target.parent.iterdir()) == [target], "nothing half-made is left"


def test_truncated_files_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(folders_module, "MAX_CONVERSATION_BYTES", 1000)
    lines = conversation_lines([said("y" * 300)] * 5).splitlines()
    assert [json.loads(line).get("left_out_turns") for line in lines] == [None, None, 3]
    folders = EvaluationFolders(root=tmp_path, about=ABOUT)
    verdict = Verdict(reward=1.0, solved=True, cause=Cause.SOLVED, log="z" * 1000)
    folders.write("base", answer(), RolloutReports(verdict=verdict))
    log = (folders.rollout("base", answer().folder) / "evaluator.log").read_bytes()
    assert len(log) < 150
    assert log.endswith(folders_module.TRUNCATED)


def test_an_answer_is_recorded_even_if_its_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "rollouts").write_text("in the way")
    assert EvaluationFolders(root=tmp_path, about=ABOUT).write("base", answer(), RolloutReports()) == answer(folder="")


def test_infra_answers_are_excluded_from_means_and_counted_separately(tmp_path: Path) -> None:
    """F24."""
    answers = [answer(), answer(sample=1, reward=0.0), answer("two", reward=None, versions=()), answer("two", 1)]
    summary = summarize_answers(answers, tag="base", tasks=2, samples=2, dataset_sha256="ab")
    assert (summary.answers, summary.infra, summary.success) == (4, 1, 2 / 3)
    assert summary.infra_reasons == {"infra": 1}, "the cause, where an answer says nothing more"
    assert summary.versions == {"1.9": 9, "1.10": 12}, "oldest first, by number"
    assert summary.mixed == 3
    write_summary(tmp_path / "summary.json", summary, ABOUT)
    document = json.loads((tmp_path / "summary.json").read_bytes())
    assert (document["n"], document["n_infra"], document["dataset_sha256"]) == (4, 1, "ab")
    assert document["causes"] == {"failed": 1, "infra": 1, "solved": 2}
    assert document["pass_at_k"] == {"1": 0.75, "2": 1.0}
    assert document["pass_hat_k"] == {"1": 0.75, "2": 0.0}
    assert document["tasks_at_k"] == {"1": 2, "2": 1}
    details = ["no image debian", "no image debian", "the\ngateway died", "a", "b"]
    lost = [answer(sample=number, reward=None, detail=detail) for number, detail in enumerate(details)]
    lost_summary = summarize_answers(lost, tag="base", tasks=1, samples=5, dataset_sha256="")
    assert list(lost_summary.infra_reasons.items())[:2] == [("no image debian", 2), ("the gateway died", 1)]
    assert "infra: no image debian (2 answers)" in summary_lines(lost_summary)
    none = summarize_answers([answer(reward=None)], tag="base", tasks=1, samples=1, dataset_sha256="")
    assert (none.success, none.pass_rates) == (None, ())


def test_pass_rates_count_solved_answers_not_rewards() -> None:
    formatted = answer(reward=0.1, cause=Cause.FAILED, solved=False)
    costly = answer(sample=1, reward=-1.0, cause=Cause.SOLVED, solved=True)
    assert [rate.any_solved for rate in pass_rates([formatted, costly], 1)] == [0.5]
    summary = summarize_answers([formatted, costly], tag="base", tasks=2, samples=1, dataset_sha256="")
    assert (summary.success, summary.mean_reward) == (0.5, -0.45)


async def test_an_answer_recovered_from_the_ledger_keeps_its_verdict() -> None:
    order = evaluation_order("base", TaskId("t"), 0)
    async with AnswerRecording(None, "base") as recording:
        for reward, solved, cause in ((-1.0, False, Cause.FAILED), (0.0, True, Cause.SOLVED)):
            known = Evaluated(attempts=1, reward=reward, solved=solved)
            recovered = recording.recover(order, known)
            assert (recovered.reward, recovered.solved, recovered.cause) == (reward, solved, cause)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_pass_rates_are_the_means_over_all_subsets(outcomes: list[list[bool]]) -> None:
    answers = [
        answer(f"t{task}", sample, float(solved))
        for task, row in enumerate(outcomes)
        for sample, solved in enumerate(row)
    ]
    samples = max(map(len, outcomes))
    rates = pass_rates(answers, samples)
    assert [rate.k for rate in rates] == sorted({k for k in (1, 2, 4, samples) if k <= samples})
    for rate in rates:
        rows = [list(itertools.combinations(row, rate.k)) for row in outcomes if len(row) >= rate.k]
        assert rate.tasks == len(rows)
        anything = sum(sum(map(any, row)) / len(row) for row in rows) / len(rows)
        everything = sum(sum(map(all, row)) / len(row) for row in rows) / len(rows)
        assert (rate.any_solved, rate.all_solved) == (pytest.approx(anything), pytest.approx(everything))


def test_an_overlap_is_found_even_if_the_task_was_renamed() -> None:
    """F24."""
    spec = NoEvaluator()
    train = [Task(id=TaskId(f"t{n}"), family="a", instruction=f"do {n}", evaluator=spec) for n in range(9)]
    held_out = [replace(task, id=TaskId(f"held-{task.id}"), family="b") for task in train[:7]]
    other = replace(train[8], instruction="do something else")
    trained = {problem_digest(task) for task in train}
    refuse_overlap(trained, {other.id: problem_digest(other)}, "--tasks x")
    with pytest.raises(ConfigError) as refused:
        refuse_overlap(trained, {task.id: problem_digest(task) for task in (other, *held_out)}, "--tasks x")
    assert "--tasks x: 7 tasks are also in tasks.train ('held-t0', 'held-t1'" in str(refused.value)
    assert "and 2 more" in str(refused.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\nb", "a\nb\n"),
        ("a\n", "a\nb"),
        ("", "new\n"),
        (None, "new\n\nfile"),
        ("gone\n", None),
        ("one\r\ntwo\x0bthree\n", "one\ntwo\x0bthree\n"),
        ("".join(f"{n}\n" for n in range(300)), "".join(f"{n}\n" for n in range(1, 301))),
    ],
)
def test_a_patch_file_is_a_diff_that_git_applies(tmp_path: Path, before: str | None, after: str | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before, newline="")
    diff = file_diff("/file", before, after)
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=diff.encode(), cwd=tmp_path, check=True)
    assert (path.read_bytes().decode() if path.exists() else None) == after


def test_a_hostile_path_stays_on_one_line_of_a_diff() -> None:
    diff = file_diff("/x\n+++ b/etc/passwd\n", None, "y\n")
    assert len(diff.splitlines()) == 4
