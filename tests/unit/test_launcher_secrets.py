"""Secrets of the launcher: authentication, and their absence in children."""

from __future__ import annotations

import os

import pytest

from headrace.sandboxes.launcher.connections import Secrets
from headrace.sandboxes.launcher.requests import CommandCosts


def test_only_the_right_secret_is_accepted() -> None:
    secrets = Secrets("the owner's")
    assert secrets.is_admin("the owner's")
    assert secrets.fits("one", secrets.of("one"))
    for wrong in ("", "the owner", secrets.of("one"), "ä"):
        assert not secrets.is_admin(wrong)
    for wrong in ("", secrets.of("two"), "the owner's", secrets.of("one")[:-1], "ä"):
        assert not secrets.fits("one", wrong)
    assert Secrets("the owner's").of("one") != secrets.of("one")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_see_the_secret() -> None:
    secrets = Secrets("the owner's")
    known = secrets.of("one")
    child = os.fork()
    if child == 0:
        os._exit(secrets.is_admin("the owner's") or secrets.of("one") == known)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert secrets.fits("one", known)


def test_the_number_of_cost_names_is_limited() -> None:
    costs = CommandCosts()
    for number in range(200):
        costs.add(f"purpose-{number}", "exec", 0.5)
    costs.add("", "write", 1.0)
    rows = costs.to_json()
    assert len(rows) <= 65
    assert sum(count for count, _ in rows.values()) == 201
    assert sum(seconds for _, seconds in rows.values()) == pytest.approx(101.0)
