"""Generated corpora for retrievers."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ("river", "bridge", "market", "harbour", "tower", "museum", "forest", "castle", "station", "garden")


def write_corpus(path: Path, passages: int) -> Path:
    """Write a corpus, the same each time, in which passage N alone has the word `townN`."""
    chance = random.Random(3)
    with path.open("w", encoding="utf-8") as file:
        for number in range(passages):
            text = " ".join(chance.choices(WORDS, k=40))
            row = {"id": str(number), "contents": f'"Town {number}"\nIn town{number} there is a {text}.'}
            file.write(json.dumps(row) + "\n")
    return path
