"""`headrace check`: which task it takes, and how a rollout is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.cli.held_out.check import prepare_check, read_check
from headrace.actors.errors import ConfigError, RunError
from headrace.actors.rollouts.rollout import place_of
from headrace.buffer.tasks.datasets.terminal import Split, generate

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "recipes" / "quickstart.toml"
TURN = {
    "turn_id": "t1",
    "prompt": "<|user|>write\x1b[2J it<|end|>",
    "answer": "echo a > b\nexit",
    "sampled_tokens": 5,
    "status": "accepted",
    "masked": "",
    "versions": ["1.0"],
}
METADATA = {"reward": 0.0, "cause": "failed", "phases_s": {"boot": 0.1, "agent": 0.25}}


def test_a_task_can_be_selected_by_number_or_id(tmp_path: Path) -> None:
    first, second, *_ = train = generate(0, 512, Split.TRAIN)
    held_out = generate(0, 64, Split.HELD_OUT)
    for wanted, task in (("1", first), ("2", second), ("512", train[-1]), (held_out[3].id, held_out[3])):
        assert prepare_check(QUICKSTART, wanted, (), tmp_path).tasks == (task,)
    for wanted in ("0", "513", "-1", "absent", ""):
        with pytest.raises(ConfigError, match=f"--task {wanted}: no task has that id; training tasks are numbered"):
            prepare_check(QUICKSTART, wanted, (), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_contents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="contains files other than those"):
        prepare_check(QUICKSTART, "1", (), tmp_path)


def test_simulated_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engines\.backend simulated has no policy to run"):
        prepare_check(ROOT / "scripts" / "recipes" / "simulated.toml", "1", (), tmp_path)


def test_an_error_of_a_users_code_says_where_it_was_raised() -> None:
    names: dict[str, Any] = {"__name__": "parts"}
    exec(compile("\n\ndef fails():\n    json.loads('{')\nimport json\n", "/home/me/parts.py", "exec"), names)
    with pytest.raises(ValueError, match="Expecting") as raised:
        names["fails"]()
    assert place_of(raised.value) == " (parts.py:4)"
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    raised.value.__traceback__ = raised.value.__traceback__ and raised.value.__traceback__.tb_next
    assert place_of(raised.value) == ""


def test_a_rollout_is_shown_without_control_characters(tmp_path: Path) -> None:
    evaluation = prepare_check(QUICKSTART, "1", (), tmp_path)
    with pytest.raises(RunError, match="no records"):
        read_check(evaluation)
    folder = tmp_path / "rollouts" / "one-0"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(METADATA))
    masked = TURN | {"masked": "side", "status": "aborted"}
    (folder / "conversation.jsonl").write_text("\n".join(map(json.dumps, (TURN, masked, {"left_out_turns": 2}))))
    (folder / "evaluator.log").write_text("failed: \n")
    told = list(read_check(evaluation).lines())
    assert told[1:] == [
        "-- turn 1: 5 tokens of version 1.0, trained, accepted",
        "<|user|>write\\x1b[2J it<|end|>",
        ">> echo a > b\nexit",
        "-- turn 2: 5 tokens of version 1.0, not trained (side), aborted",
        "<|user|>write\\x1b[2J it<|end|>",
        ">> echo a > b\nexit",
        "-- {'left_out_turns': 2}",
        "-- verdict: reward 0.0, failed",
        "-- boot 0.10 s, agent 0.25 s",
    ]


def test_the_verdict_of_a_rollout_that_a_failure_ended_has_its_reason(tmp_path: Path) -> None:
    evaluation = prepare_check(QUICKSTART, "1", (), tmp_path)
    folder = tmp_path / "rollouts" / "one-0"
    folder.mkdir(parents=True)
    ended = METADATA | {"reward": None, "cause": "poison", "detail": "ConnectError: no route to /run/pool.sock"}
    (folder / "metadata.json").write_text(json.dumps(ended))
    checked = read_check(evaluation)
    assert not checked.is_rated
    assert "-- verdict: reward None, poison: ConnectError: no route to /run/pool.sock" in checked.lines()


@pytest.mark.slow
@pytest.mark.namespaces
def test_the_check_command_runs_one_rollout(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("headrace")), "check", str(QUICKSTART), "--quiet"]
    command += ["--json", str(tmp_path / "told.json"), "--out", str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    document = json.loads((tmp_path / "told.json").read_text())
    assert document["turns"]
    assert document["rollout"]["reward"] in (0.0, 1.0)
    assert f"task {document['task']}" in told.stderr
