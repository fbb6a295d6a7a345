"""Folders that not every node sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime import visibility

NODES = ("rank-0", "rank-1")


def test_nodes_with_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    folders = {"rank-0": tmp_path / "a", "rank-1": tmp_path / "b"}
    for node, folder in folders.items():
        visibility.leave_token(folder, node, "t1")
    unseen_by = {node: visibility.unseen(folder, NODES, "t1") for node, folder in folders.items()}
    assert unseen_by == {"rank-0": ["rank-1"], "rank-1": ["rank-0"]}
    with pytest.raises(LearnerSettingsInvalid, match="rank-0 does not see what rank-1 wrote there: put the run"):
        visibility.refuse_unseen(tmp_path, unseen_by)


def test_a_shared_folder_is_accepted_and_left_clean(tmp_path: Path) -> None:
    for node in NODES:
        visibility.leave_token(tmp_path, node, "t1")
    seen = {node: visibility.unseen(tmp_path, NODES, "t1") for node in NODES}
    visibility.refuse_unseen(tmp_path, seen)
    visibility.remove_tokens(tmp_path, NODES)
    assert list(tmp_path.iterdir()) == []


def test_a_token_of_an_earlier_check_does_not_count(tmp_path: Path) -> None:
    visibility.leave_token(tmp_path, "rank-0", "earlier")
    assert visibility.unseen(tmp_path, ("rank-0",), "now") == ["rank-0"]
