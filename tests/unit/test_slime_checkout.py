"""Checks of slime's and Megatron-LM's sources, which import nothing of them."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime import checkout
from headrace.policies.learners.slime_config import SlimeSection


def write_sources(root: Path, used: object) -> Path:
    """Write a project that defines exactly what headrace uses."""
    assert isinstance(used, dict)
    for file, names in used.items():
        classes: dict[str, list[str]] = {}
        lines = []
        for name, parameters in names.items():
            owner, _, method = name.rpartition(".")
            signature = f"def {method}({', '.join((parameters or '').split())}): ..."
            if owner:
                classes.setdefault(owner, []).append(f"    {signature}")
            else:
                lines.append(
                    f"try:\n    {name} = 1\nexcept ImportError:\n    pass" if parameters is None else signature
                )
        for owner, methods in classes.items():
            lines += [f"class {owner}:", *methods]
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
    return root


@pytest.fixture
def section(tmp_path: Path) -> SlimeSection:
    return SlimeSection(
        slime_dir=write_sources(tmp_path / "slime", checkout.SLIME_USED),
        megatron_dir=write_sources(tmp_path / "megatron", checkout.MEGATRON_USED),
    )


def test_another_commit_with_the_same_names_is_accepted_and_reported(
    section: SlimeSection, caplog: pytest.LogCaptureFixture
) -> None:
    slime, megatron = checkout.find_checkouts(section)
    assert (slime.root, megatron.root) == (section.slime_dir, section.megatron_dir)
    assert "is not 624b824a8, which headrace is written for" in caplog.text


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("slime/utils/dp_schedule.py", "global_batch_size", "batch_size", "build_dp_schedule in .* takes .*batch_size"),
        ("slime/ray/actor_group.py", "async_train", "train_async", "has no RayTrainGroup.async_train"),
        ("slime/utils/misc.py", "class Box", "class", "misc.py cannot be read"),
    ],
)
def test_another_slime_fails_with_the_name_of_what_differs(
    section: SlimeSection, file: str, old: str, new: str, problem: str
) -> None:
    assert section.slime_dir is not None
    path = section.slime_dir / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(LearnerSettingsInvalid, match=rf"differs from 624b824a8.*{problem}.*check out that commit"):
        checkout.find_checkouts(section)


def test_a_megatron_without_the_optimizers_switches_is_refused(section: SlimeSection) -> None:
    assert section.megatron_dir is not None
    path = section.megatron_dir / "megatron/core/optimizer/distrib_optimizer.py"
    path.write_text(path.read_text().replace("HAVE_APEX_OR_TE", "HAVE_FUSED"))
    with pytest.raises(LearnerSettingsInvalid, match="has no HAVE_APEX_OR_TE"):
        checkout.find_checkouts(section)


def test_a_folder_that_is_no_checkout_is_refused(section: SlimeSection, tmp_path: Path) -> None:
    empty = section.model_copy(update={"slime_dir": tmp_path})
    with pytest.raises(LearnerSettingsInvalid, match=r"slime_dir .* set it to a git checkout of THUDM/slime"):
        checkout.find_checkouts(empty)


def test_pypis_unrelated_slime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LearnerSettingsInvalid, match="PyPI's `slime` is an unrelated project"):
        checkout.find_checkouts(SlimeSection())


def test_a_process_that_imported_another_slime_is_refused(
    section: SlimeSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkout.find_checkouts(section)
    other = types.ModuleType("slime")
    other.__path__ = [str(tmp_path / "elsewhere" / "slime")]
    monkeypatch.setitem(sys.modules, "slime", other)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(LearnerSettingsInvalid, match="has already imported slime from"):
        checkout.make_importable(*found)
