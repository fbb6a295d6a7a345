"""Versions of SGLang, and how their APIs differ."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

DEFAULT_VERSION: Final = "0.5.23"


def release(version: str) -> tuple[int, ...]:
    """Return the comparable part of a version, such as (0, 5, 15) for `0.5.15.post1`; empty if the version contains no
    number."""
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


logger = logging.getLogger(__name__)
EMBEDDED_PREFIX: Final = "headrace-cpu "
"""Prefix of the embedded engine's version; that engine uses the newest dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangApi:
    """API of one version."""

    version: str
    update_session: bool
    """Weights are sent between /begin_weight_update and /end_weight_update; before 0.5.21 these routes are missing."""
    version_spans: bool
    """A reply has the version of each token. Without it (before 0.5.20), the version at the end labels the whole
    output, which is right only if a pause aborts: the first tokens of a request that survives a push by retract or
    in_place would be labelled with later weights."""
    refuses_unknown_groups: bool
    """An update from a group that was not joined gets a 400; before 0.5.21 it crashes the server."""
    ready_route: bool
    """The route /ready answers 503 while generation is paused (since 0.5.20)."""


DIALECTS: Final = (
    SGLangApi(
        version="0.5.15.post1",
        update_session=False,
        version_spans=False,
        refuses_unknown_groups=False,
        ready_route=False,
    ),
    SGLangApi(version="0.5.21", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
    SGLangApi(version="0.5.23", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
)
"""Known dialects, oldest first."""


@cache
def dialect_of(version: str) -> SGLangApi:
    """Return the dialect of a server's version. For an unknown version, return the newest dialect that is not newer
    than the version (or else the oldest dialect), and log one warning."""
    if version.startswith(EMBEDDED_PREFIX):
        return DIALECTS[-1]
    for dialect in DIALECTS:
        if dialect.version == version:
            return dialect
    older = [dialect for dialect in DIALECTS if release(dialect.version) <= release(version)]
    chosen = older[-1] if older else DIALECTS[0]
    logger.warning("SGLang %s is untested: it is treated as %s", version, chosen.version)
    return chosen
