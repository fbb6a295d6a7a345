"""What differs between versions of SGLang, as far as a client must know it.

Everything that is the same in all of them is not here: routes of loads, pauses and groups, and the refusals' texts.
A flush inside an update (`flush_cache=true`) is never asked for: since 0.5.22 it is refused with a 400 while something
runs, before that it is a bare assert that takes the scheduler down.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Final

from headrace.policies.sglang.versions import release

logger = logging.getLogger(__name__)
EMBEDDED_PREFIX: Final = "headrace-cpu "
"""How the embedded engine begins its version: it speaks the newest dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one version speaks."""

    version: str
    update_session: bool
    """Weights come between /begin_weight_update and /end_weight_update; before 0.5.21 these routes are not there."""
    version_spans: bool
    """A reply says which version sampled which token. Without (before 0.5.20) there is one version, that at the end,
    and it labels the whole output. That is right only where a pause aborts: a request that lives through a push by
    retract or in_place would have its first tokens labelled with weights that came later."""
    refuses_unknown_groups: bool
    """An update from a group that was never joined is a 400; before 0.5.21 it ends the server."""
    ready_route: bool
    """/ready answers 503 while generation is paused (from 0.5.20)."""


DIALECTS: Final = (
    Dialect(
        version="0.5.15.post1",
        update_session=False,
        version_spans=False,
        refuses_unknown_groups=False,
        ready_route=False,
    ),
    Dialect(version="0.5.21", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
    Dialect(version="0.5.23", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
)
"""Oldest first."""


@cache
def dialect_of(version: str) -> Dialect:
    """The dialect of what a server calls its version. An unknown one gets the newest that is not newer, or the oldest,
    with one warning."""
    if version.startswith(EMBEDDED_PREFIX):
        return DIALECTS[-1]
    for dialect in DIALECTS:
        if dialect.version == version:
            return dialect
    older = [dialect for dialect in DIALECTS if release(dialect.version) <= release(version)]
    chosen = older[-1] if older else DIALECTS[0]
    logger.warning("SGLang %s was never tried: it is spoken to as %s", version, chosen.version)
    return chosen
