"""Makes the golden configuration, that of the quickstart: `scripts/generate golden_config`.

Until a version is released, a change of the configuration replaces it.
"""

from __future__ import annotations

from pathlib import Path

from headrace.actors.run.config import load_recipe
from headrace.actors.run.launch import document_of

ROOT = Path(__file__).resolve().parents[2]


def make() -> Path:
    """Write the file, and return its path."""
    config = load_recipe(ROOT / "scripts" / "recipes" / "quickstart.toml", (), Path("run"))
    text = document_of(config).replace(f"{ROOT}/".encode(), b"")
    path = Path(__file__).with_name("config.json")
    path.write_bytes(text + b"\n")
    return path
