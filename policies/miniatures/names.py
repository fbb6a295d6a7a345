"""Names of miniatures, and where their files are.

Invariant: the name of a miniature's folder contains a digest of everything that decides its content, so that nothing
outdated is used.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Final

PREFIX: Final = "miniature:"
NAMES: Final = ("endless", "echo", "search_r1", "swe_rl", "tau")
_SOURCES: Final = ("miniatures/*.py", "models/tiny.py", "models/qwen_config.py", "../buffer/tasks/datasets/*.py")
"""Files that decide the content of miniatures, relative to the package of policies."""


class MiniatureUnknown(ValueError):
    """There is no miniature with this name."""


def cache_folder() -> Path:
    """Return the folder of all miniatures, below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "headrace" / "miniatures"


def resolved(path: str) -> Path:
    """Return the absolute path that `miniature:NAME/FILE` means; the file need not exist. Raises MiniatureUnknown."""
    name, _, rest = path.removeprefix(PREFIX).partition("/")
    if name not in NAMES:
        raise MiniatureUnknown(f"there is no miniature {name!r}; there are {', '.join(NAMES)}")
    return cache_folder() / f"{name}-{_sources_digest()}" / rest


def name_of(path: Path) -> str | None:
    """Return the name of the miniature that a resolved path belongs to, or None."""
    folders = {resolved(f"{PREFIX}{name}"): name for name in NAMES}
    return next((folders[above] for above in (path, *path.parents) if above in folders), None)


@cache
def _sources_digest() -> str:
    package = Path(__file__).resolve().parents[1]
    hasher = hashlib.sha256()
    for pattern in _SOURCES:
        folder, _, name = (package / pattern).as_posix().rpartition("/")
        paths = sorted(Path(folder).glob(name))
        assert paths, f"no {name} in {folder}"
        for path in paths:
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]
