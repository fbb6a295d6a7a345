"""Recovery of an earlier server's sandboxes: live ones are adopted, overdue ones ended and dead ones forgotten.

Invariants: the provider's list is authoritative. An interrupted boot is found by its idempotency key at the provider.
Its sandbox is adopted if the client can repeat the request with its own key; otherwise it is killed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from headrace.sandboxes.errors import SandboxError
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes, spec_of
from headrace.serve.sandbox_servers.e2b_state.table import State

logger = logging.getLogger(__name__)


async def recover(sandboxes: Sandboxes) -> None:
    """Recover all rows. Call this once, before the server accepts requests. Overdue sandboxes end when the expiry clock
    starts. Raises SandboxError if the provider cannot list its sandboxes."""
    rows = sandboxes.tables.sandboxes.all()
    if not rows:
        return
    infos = await sandboxes.backend.list()
    alive = {str(info.id) for info in infos}
    keys = {info.idempotency_key for info in infos}
    for row in rows:
        try:
            if row.state is State.BOOTING and row.boot_key in keys:
                ref = await sandboxes.backend.create(spec_of(row))
                now = time.time()
                done = replace(row, ref=ref, state=State.RUNNING, started_at=now, end_at=now + row.timeout_s)
                live = await sandboxes.adopt(done, ref)
                if not row.client_key:
                    await sandboxes.kill(live)
            elif row.state is not State.BOOTING and row.ref is not None and str(row.ref.id) in alive:
                await sandboxes.adopt(row, row.ref)
            else:
                sandboxes.tables.sandboxes.drop(row.id)
        except SandboxError as error:
            logger.warning("cannot recover sandbox %s: %s", row.id, error)
            sandboxes.tables.sandboxes.drop(row.id)
