"""Programs that run inside clean sandboxes, sent as text: standard library only, Python 3.7 or later, no imports of
ours."""

from __future__ import annotations

from importlib.resources import files


def source(name: str) -> str:
    """Text of one of the programs of this folder."""
    return files(__name__).joinpath(f"{name}.py").read_text(encoding="utf-8")
