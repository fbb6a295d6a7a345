"""The command lines of the recipes for slime, against the recorded options of its parser (`golden/`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.actors.run.config import load_recipe, slime_terms
from headrace.policies.learners.slime import arguments

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "golden" / "slime_options.json").read_text(encoding="utf-8"))
RECIPES = sorted((ROOT / "scripts" / "recipes" / "untested").glob("slime_*.toml"))
REFUSED_EARLY = {"--debug-rollout-only", "--load-debug-rollout-data"}
"""Refused flags that slime parses before its main parser."""
TYPES = {"int": int, "float": float}


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@pytest.fixture(scope="module")
def parser() -> Strict:
    parser = Strict(allow_abbrev=False, add_help=False)
    for name, option in RECORDED.items():
        if option["values"] == 0:
            parser.add_argument(name, action="store_true")
        else:
            nargs, kind = option["values"], TYPES.get(option["type"], str)
            parser.add_argument(name, nargs=None if nargs == 1 else nargs, type=kind)
    return parser


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_slime_has_every_flag_of_a_recipe(parser: Strict, tmp_path: Path, recipe: Path) -> None:
    given = slime_terms(load_recipe(recipe, (), tmp_path / "run"))
    assert arguments.problem(given) is None
    ours = [word for flag in arguments.flags(given, load=tmp_path) for word in flag.words]
    _, unknown = parser.parse_known_args([*given.learner.slime.arguments, *ours])
    assert set(arguments.flag_names(unknown)) <= arguments.PARSED_EARLY


def test_every_flag_that_headrace_refuses_exists() -> None:
    # A renamed one would pass.
    assert set(arguments.REFUSED) - {*RECORDED, *arguments.PARSED_EARLY} <= REFUSED_EARLY
