"""The trainer that docs/external_trainer.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "external_trainer.md"


def trainer_of_the_docs() -> str:
    """Return its text."""
    [text] = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(text)
