"""Table of engines, for the commands that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.actors.engine_group.members_file import EngineStatus


def engine_table(engines: Iterable[EngineStatus]) -> Table:
    """Return the engines as a table."""
    table = Table("engine", "from", "state", "version", "load", "url", "why not", box=None)
    for engine in engines:
        table.add_row(
            engine.engine_id,
            engine.origin.value,
            engine.state.value,
            engine.version or "-",
            engine.load,
            engine.url or "-",
            engine.reason,
        )
    return table
