"""The version tree and the staleness bound."""

from __future__ import annotations

import pytest

from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.trajectories.versions import PolicyVersion, VersionTree


def tree() -> VersionTree:
    versions = VersionTree()
    versions.open_epoch(1, None)
    versions.open_epoch(2, PolicyVersion(1, 40))
    versions.open_epoch(3, PolicyVersion(2, 41))
    versions.open_epoch(4, PolicyVersion(1, 42))
    return versions


@pytest.mark.parametrize(
    ("trained_at", "sampled", "updates"),
    [
        ("1.7", "1.3", 4),
        ("2.40", "1.40", 0),
        ("2.41", "1.45", 6),
        ("3.43", "1.39", 4),
        ("4.44", "3.42", 6),
        ("1.3", "1.7", 4),
    ],
)
def test_staleness_counts_the_updates_on_the_path(trained_at: str, sampled: str, updates: int) -> None:
    assert tree().staleness(PolicyVersion.parse(trained_at), PolicyVersion.parse(sampled)) == updates


def test_an_epoch_can_be_opened_only_once_and_at_a_known_parent() -> None:
    versions = tree()
    with pytest.raises(ValueError, match="already open"):
        versions.open_epoch(2, PolicyVersion(1, 1))
    with pytest.raises(ValueError, match="unknown"):
        versions.open_epoch(6, PolicyVersion(5, 0))


def test_versions_under_different_roots_share_no_ancestor() -> None:
    versions = tree()
    versions.open_epoch(9, None)
    with pytest.raises(ValueError, match="no common ancestor"):
        versions.staleness(PolicyVersion(9, 1), PolicyVersion(1, 1))


def test_a_version_round_trips_as_text() -> None:
    assert PolicyVersion.parse(str(PolicyVersion(3, 14))) == PolicyVersion(3, 14)
    with pytest.raises(ValueError, match="invalid literal"):
        PolicyVersion.parse("3")


@pytest.mark.parametrize(("updates", "left"), [(4, 0), (3, -1), (6, 2)])
def test_the_farthest_version_decides_how_long_a_rollout_stays_within_the_bound(updates: int, left: int) -> None:
    bound, sampled = StalenessBound(updates), (PolicyVersion(1, 41), PolicyVersion(1, 39))
    trained_at = PolicyVersion(3, 43)
    assert bound.updates_left(tree(), trained_at, sampled) == left
    assert bound.admits(tree(), trained_at, sampled) is (left >= 0)


def test_the_inventory_is_one_batch_per_version_within_the_bound() -> None:
    assert StalenessBound(2).stock(batch_size=64) == 192
