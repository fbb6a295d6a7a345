"""The newest checkpoints and the best one are kept, also over crashes between any two of the steps."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners import checkpoint_retention as retention
from headrace.policies.learners import checkpoints


def save(root: Path, step: int, *, epoch: int = 1, newest: int = 2) -> None:
    """What a learner does in `save`."""
    version = PolicyVersion(epoch, step)
    staged = checkpoints.stage(root, version)
    checkpoints.write_manifest(staged, checkpoints.Manifest(version=version, previous_chain="", chain="", batches=()))
    checkpoints.publish(staged, version)
    retention.remove_old(root, newest=newest)


def evaluate(root: Path, step: int, success: float, versions: dict[str, int] | None = None) -> None:
    retention.begin_evaluation(root, step)
    end(root, step, success, versions)


def end(root: Path, step: int, success: float | None, versions: dict[str, int] | None = None) -> None:
    sampled = versions or {f"1.{step}": 100}
    retention.end_evaluation(root, tag=f"step-{step}", success=success, versions=sampled)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_the_best_checkpoint_is_kept_beside_the_newest(root: Path) -> None:
    for step, success in ((10, 0.2), (20, 0.6), (30, 0.5), (40, 0.6), (50, 0.1)):
        save(root, step)
        evaluate(root, step, success)
    save(root, 60)
    assert names(root) == ["1.50", "1.60", "kept-1.20"]
    best = retention.best_checkpoint(root)
    assert best is not None
    assert best[0] == retention.BestCheckpoint(version="1.20", tag="step-20", success=0.6)
    assert best[1] == root / "kept-1.20"
    checkpoints.check_checkpoint(best[1])


def test_a_better_checkpoint_replaces_the_best_one(root: Path) -> None:
    for step, success in ((10, 0.5), (20, 0.1), (30, 0.1), (40, 0.9)):
        save(root, step)
        evaluate(root, step, success)
    assert names(root) == ["1.30", "1.40"], "the former best one is not among the newest"
    for step in (50, 60):
        save(root, step)
    assert names(root) == ["1.50", "1.60", "kept-1.40"]


def test_no_run_resumes_from_a_checkpoint_that_is_only_kept(root: Path) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    for step in (20, 30):
        save(root, step)
    assert names(root) == ["1.20", "1.30", "kept-1.10"]
    assert [path.name for path in checkpoints.list_checkpoints(root)] == ["1.20", "1.30"]


def test_an_evaluation_rates_the_checkpoint_nearest_to_its_tokens(root: Path) -> None:
    for step in (10, 20):
        save(root, step, newest=9)
    evaluate(root, 12, 0.3, {"1.12": 60, "1.13": 30, "1.18": 10})
    assert retention.read_record(root).best == retention.BestCheckpoint(version="1.10", tag="step-12", success=0.3)
    evaluate(root, 14, 0.4, {"1.14": 10, "1.19": 90})
    best = retention.read_record(root).best
    assert best is not None
    assert best.version == "1.20"


def test_the_checkpoint_of_an_evaluation_in_progress_is_kept_until_it_ends(root: Path) -> None:
    save(root, 10)
    retention.begin_evaluation(root, 11)
    for step in (20, 30, 40):
        save(root, step)
    assert names(root) == ["1.30", "1.40", "kept-1.10"]
    end(root, 11, 0.7)
    save(root, 50)
    assert names(root) == ["1.40", "1.50", "kept-1.10"], "it turned out to be the best"
    retention.begin_evaluation(root, 50)
    end(root, 50, 0.8)
    save(root, 60)
    assert names(root) == ["1.50", "1.60"]


def test_an_evaluation_without_a_score_rates_nothing_and_keeps_nothing(root: Path) -> None:
    save(root, 10)
    retention.begin_evaluation(root, 11)
    for step in (20, 30, 40):
        save(root, step)
    assert names(root) == ["1.30", "1.40", "kept-1.10"]
    end(root, 11, None)
    assert names(root) == ["1.30", "1.40"]
    assert retention.read_record(root) == retention.RetentionRecord()


def test_an_evaluation_that_is_recorded_twice_changes_nothing(root: Path) -> None:
    """The service died between the record and the ledger, so that the evaluation ends again."""
    for step in (10, 20):
        save(root, step)
        evaluate(root, step, 0.5)
    before = retention.read_record(root)
    evaluate(root, 20, 0.5)
    assert retention.read_record(root) == before
    assert before.best is not None
    assert before.best.version == "1.10", "of two with the same success the first one is kept"


def test_without_checkpoints_or_tokens_nothing_is_rated(root: Path) -> None:
    evaluate(root, 3, 0.5)
    assert retention.read_record(root) == retention.RetentionRecord()
    save(root, 10)
    retention.end_evaluation(root, tag="step-10", success=0.5, versions={})
    assert retention.best_checkpoint(root) is None


def test_a_best_checkpoint_that_is_gone_is_replaced_by_the_next_rated_one(root: Path) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    save(root, 20)
    checkpoints.set_aside(root / "1.10", "damaged")
    assert retention.best_checkpoint(root) is None
    evaluate(root, 20, 0.3)
    best = retention.best_checkpoint(root)
    assert best is not None
    assert best[0].version == "1.20"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"best": {"version": "1.10"}, "evaluating": null}',
        '{"best": {"version": "1.10", "tag": "step-10", "success": null}, "evaluating": null}',
        '{"best": {"version": 1.1, "tag": "step-10", "success": 0.9}, "evaluating": null}',
        '{"best": null, "evaluating": "step-10"}',
    ],
)
def test_nothing_is_removed_while_the_record_cannot_be_read(root: Path, text: str) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    (root / retention.RECORD).write_text(text)
    for step in (20, 30, 40):
        save(root, step)
    assert names(root) == ["1.10", "1.20", "1.30", "1.40"]
    evaluate(root, 30, 0.4)
    save(root, 50)
    assert names(root) == ["1.40", "1.50", "kept-1.30"]


def test_a_copy_under_another_name_is_no_checkpoint(root: Path) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    (root / "kept-1.10.old").mkdir()
    for step in (20, 30):
        save(root, step)
    assert names(root) == ["1.20", "1.30", "kept-1.10", "kept-1.10.old"]


def test_the_record_does_not_change_during_a_removal(root: Path) -> None:
    save(root, 10)
    with FileLock(root.with_name("checkpoints.lock")):
        ending = threading.Thread(target=evaluate, args=(root, 10, 0.9))
        ending.start()
        ending.join(timeout=0.2)
        assert ending.is_alive()
        assert not (root / retention.RECORD).exists()
    ending.join(timeout=20)
    assert retention.best_checkpoint(root) is not None


def test_a_removal_that_was_interrupted_is_finished_by_the_next_save(root: Path) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    for step in (20, 30):
        save(root, step)
    # Killed after the rename of a removal.
    (root / "1.20").rename(root / "tmp-removed-1.20")
    save(root, 40)
    assert names(root) == ["1.30", "1.40", "kept-1.10"]
    assert json.loads((root / retention.RECORD).read_text())["best"]["version"] == "1.10"


def test_a_run_that_restarts_from_the_beginning_has_no_best_checkpoint(root: Path) -> None:
    save(root, 10)
    evaluate(root, 10, 0.9)
    retention.forget(root)
    assert retention.best_checkpoint(root) is None
    for step in (20, 30, 40):
        save(root, step)
    assert names(root) == ["1.30", "1.40"]
