"""Where files of other nodes are in the state folder of a run: `nodes/NODE/FOLDER`, beside `FOLDER` of its own node.

Invariant: a folder below `nodes` has the files of one node under their own names, so equal names never clash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NODES: Final = "nodes"
"""Folder of the copies in a run's state."""
NODE_DIGITS: Final = 12
"""Digits of a Ray node's id in the name of its folder."""


def folders_of_nodes(folder: Path) -> dict[str, Path]:
    """Return a folder of a run's state (`logs`, `running`, `spans`) and its copies from other nodes, by the beginnings
    of the nodes' ids; the folder itself has an empty name."""
    copies = folder.parent.glob(f"{NODES}/*/{folder.name}")
    return {"": folder} | {copy.parent.name: copy for copy in sorted(copies)}
