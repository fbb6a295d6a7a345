"""A restarted server and what its predecessor left: adopt what lives, end what is overdue, forget what is gone.

Invariants: the provider's list says what lives. A boot that was cut off is found by the key the provider knows it by:
it is adopted where the client can ask for it again with its own key, otherwise killed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError
from headrace.serve.e2b_sandboxes.lifecycle import spec_of
from headrace.serve.e2b_sandboxes.table import State

if TYPE_CHECKING:
    from headrace.serve.e2b_sandboxes.lifecycle import Sandboxes
    from headrace.serve.e2b_sandboxes.table import Row

logger = logging.getLogger(__name__)


async def recover(sandboxes: Sandboxes) -> None:
    """Call once, before the server serves. What is overdue ends as soon as its clock runs. Raises SandboxError when
    the provider cannot say what lives."""
    rows = sandboxes.table.rows()
    if not rows:
        return
    infos = await sandboxes.backend.list()
    alive = {str(info.id) for info in infos}
    keys = {info.idempotency_key for info in infos}
    for row in rows:
        try:
            await _recover_one(sandboxes, row, alive, keys)
        except SandboxError as error:
            logger.warning("sandbox %s is given up: %s", row.id, error)
            sandboxes.table.drop(row.id)


async def _recover_one(sandboxes: Sandboxes, row: Row, alive: set[str], keys: set[str]) -> None:
    if row.state is State.BOOTING:
        await _finish_boot(sandboxes, row, keys)
    elif row.ref is not None and str(row.ref.id) in alive:
        await sandboxes.adopt(row, row.ref)
    else:
        sandboxes.table.drop(row.id)


async def _finish_boot(sandboxes: Sandboxes, row: Row, keys: set[str]) -> None:
    if row.boot_key not in keys:
        sandboxes.table.drop(row.id)
        return
    ref = await sandboxes.backend.create(spec_of(row))
    now = time.time()
    done = replace(row, ref=ref, state=State.RUNNING, started_at=now, end_at=now + row.timeout_s)
    live = await sandboxes.adopt(done, ref)
    if not row.client_key:
        await sandboxes.kill(live)
