"""Parts by name: headrace's own, those named by their module, and entry points of distributions that tests write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.buffer.primitives.registry import PartRefused, Registry

MODULE = """
def double(x):
    return 2 * x
class Inner:
    @staticmethod
    def triple(x):
        return 3 * x
number = 7
"""


def _function(found: object) -> Callable[[int], int]:
    if not callable(found):
        raise TypeError("it cannot be called")
    function: Callable[[int], int] = found
    return function


REGISTRY = Registry(kind="calculation", group="headrace.test_calculations", own={"same": abs}, accept=_function)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, on the path."""
    (tmp_path / "their_parts.py").write_text(MODULE)
    (tmp_path / "their_broken.py").write_text("raise OSError('no disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("their_parts", "their_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def install(site: Path, distribution: str, **points: str) -> None:
    folder = site / f"{distribution}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{REGISTRY.group}]", *lines, ""]))


@pytest.mark.parametrize(("name", "six"), [("same", 3), ("their_parts:double", 6), ("their_parts:Inner.triple", 9)])
def test_builtin_parts_and_parts_named_by_module_are_found(site: Path, name: str, six: int) -> None:
    assert REGISTRY.find(name)(3) == six


def test_an_entry_point_is_found_by_name(site: Path) -> None:
    install(site, "theirs", double="their_parts:double")
    assert REGISTRY.find("double")(3) == 6
    assert REGISTRY.names() == ("same", "double")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("twice", "there is no calculation 'twice'; available: same, double, or package.module:Name for one"),
        ("their_parts:half", "AttributeError: module 'their_parts' has no attribute 'half'"),
        ("nowhere:double", "No module named 'nowhere'; put its folder on PYTHONPATH, or install it"),
        ("their_broken:double", "calculation 'their_broken:double': OSError: no disk"),
        ("their_parts:number", "'their_parts:number' is not a valid calculation: it cannot be called"),
        (":double", "ValueError: Empty module name"),
        ("their_parts:", "AttributeError"),
    ],
)
def test_a_name_that_resolves_to_no_part_is_refused(site: Path, name: str, said: str) -> None:
    install(site, "theirs", double="their_parts:double")
    with pytest.raises(PartRefused) as refused:
        REGISTRY.find(name)
    assert said in str(refused.value)


def test_a_name_shared_by_two_parts_is_refused(site: Path) -> None:
    install(site, "theirs", double="their_parts:double", same="their_parts:double")
    install(site, "others", double="their_parts:Inner.triple")
    with pytest.raises(PartRefused, match="'double' exists twice: in others and theirs"):
        REGISTRY.find("double")
    with pytest.raises(PartRefused, match="'same' exists twice: in headrace and in theirs"):
        REGISTRY.find("same")


def test_an_entry_point_that_cannot_be_loaded_is_refused(site: Path) -> None:
    install(site, "theirs", broken="their_broken:double", number="their_parts:number")
    with pytest.raises(PartRefused, match="calculation 'broken' of theirs: OSError: no disk"):
        REGISTRY.find("broken")
    with pytest.raises(PartRefused, match="'number' is not a valid calculation: it cannot be called"):
        REGISTRY.find("number")
