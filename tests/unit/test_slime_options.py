"""The command lines of the machine files for slime, against the recorded options of its parser (`golden/`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.policies.learners.slime import arguments
from support.machine_files import SLIME, SLIME_MODELS, slime_terms_on
from support.published_configs import write_published_config

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "golden" / "slime_options.json").read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("machine", SLIME)
def test_slime_has_every_flag_of_a_machine_file(parser: Strict, tmp_path: Path, machine: str) -> None:
    model = write_published_config(tmp_path / "model", SLIME_MODELS[machine])
    given = slime_terms_on(machine, model, tmp_path / "run")
    assert arguments.problem(given) is None
    ours = [word for flag in arguments.flags(given, load=tmp_path) for word in flag.words]
    _, unknown = parser.parse_known_args([*given.learner.slime.arguments, *ours])
    assert set(arguments.flag_names(unknown)) <= arguments.PARSED_EARLY


def test_every_flag_that_headrace_refuses_exists() -> None:
    # A renamed one would pass.
    assert set(arguments.REFUSED) - {*RECORDED, *arguments.PARSED_EARLY} <= REFUSED_EARLY
