"""The digest of a recipe is of what it says, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[2] / "scripts" / "recipes").rglob("*.toml"))
PROGRAM = """
import sys
from pathlib import Path
from headrace.actors.run.config import load_recipe
from headrace.actors.run.parts import recipe_digest
for recipe in sys.argv[2:]:
    print(recipe_digest(load_recipe(Path(recipe), (), Path(sys.argv[1]))))
"""


def digests(directory: Path, hash_seed: int) -> list[str]:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), *map(str, RECIPES)],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return told.stdout.split()


@pytest.mark.whole
def test_a_recipe_digest_is_the_same_in_every_process_and_folder(tmp_path: Path) -> None:
    """F25."""
    found = digests(tmp_path / "here", 0)
    assert len(found) == len(RECIPES) == len(set(found))
    for seed in (1, 2, 3):
        assert digests(tmp_path / "there", seed) == found
