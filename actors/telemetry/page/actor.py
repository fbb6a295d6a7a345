"""The observer of a run: an actor on the node of its state that sends chosen traces to a collector, and serves the page
and the metrics of the run.

Invariants:
- The run does not need it: its files are read and never written to by the actors that it observes, and no failure of
  it, of the collector or of a port ends the run.
- It holds no state that its cursor file does not have; a restarted one continues and repeats nothing.
- A collector that does not answer delays no exit: its thread is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from headrace.actors.errors import ConfigError, RunMissing
from headrace.actors.telemetry.page.server import ObserveOptions, page_server
from headrace.actors.telemetry.spans.exporting import FOLDER, TraceExport
from headrace.actors.telemetry.spans.receiver import Receiver
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.primitives.daemon_thread import start_in_thread
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.serve.tracing.telemetry import TelemetrySection

PAGE: Final = "page.json"
"""Address and token of the page."""
EVERY_S: Final = 10.0
"""Least time between two rounds of the export ..."""
RESTS: Final = 20.0
"""... which also rests for this many times the duration of a round, so that it takes at most 5 % of a core."""
LAST_ROUND_S: Final = 3.0
"""Time that the export gets when the run ends."""
NOT_SENT: Final = "some traces are not at the collector: `headrace trace export %s --otlp %s` sends them"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverStatus:
    """What was sent so far. `failing` is true while the collector does not take spans."""

    traces: int
    spans: int
    unconfirmed: int
    failing: bool


class Observer(ResourceOwner):
    """Actor that observes one run."""

    def __init__(self, run_dir: Path, config: TelemetrySection) -> None:
        super().__init__()
        self._run_dir, self._config = run_dir, config
        self._export: TraceExport | None = None
        self._sending: asyncio.Task[None] | None = None
        self._failing = False

    async def __aenter__(self) -> Self:
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        if self._config.page is not None:
            host, _, port = self._config.page.rpartition(":")
            options = ObserveOptions(
                host=host.strip("[]"),
                port=int(port),
                key_file=self._config.page_key_file,
                address_file=self._run_dir / FOLDER / PAGE,
            )
            try:
                (self._run_dir / FOLDER).mkdir(exist_ok=True)
                await self._stack.enter_async_context(page_server(self._run_dir, options))
            except (ConfigError, RunMissing, OSError) as error:
                logger.warning("the page of the run is not served (telemetry.page): %s", error)
        if self._config.otlp_endpoint is not None:
            receiver = Receiver(self._config.otlp_endpoint, self._config.otlp_protocol)
            try:
                self._export = TraceExport(self._run_dir, receiver, self._config.otlp_share)
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.error("no traces are sent, since the record of sent ones cannot be read: %s", error)
                return self
            self._sending = group.create_task(self._send(self._export))
            self._stack.callback(self._export.stop)
            self._stack.callback(self._sending.cancel)
        return self

    async def finish(self) -> None:
        """Send what the end of the run leaves, within `LAST_ROUND_S`; what is left is told in the log. Called when all
        actors have ended whose spans are sent. Idempotent."""
        export, done = self._export, False
        if export is None or self._sending is None:
            return
        self._sending.cancel()
        try:
            async with asyncio.timeout(LAST_ROUND_S):
                while not done:
                    done = await start_in_thread(lambda: export.round(grace_s=0.0), name="last-traces")
                    if self._failing and not done:
                        break
        except TimeoutError:
            pass
        except (OSError, LedgerRefused) as error:
            logger.warning("the last traces could not be sent: %s", error)
        if not done:
            logger.warning(NOT_SENT, self._run_dir, self._config.otlp_endpoint)

    async def status(self) -> ObserverStatus:
        cursor = self._export.cursor if self._export else None
        return ObserverStatus(
            traces=cursor.traces if cursor else 0,
            spans=cursor.spans if cursor else 0,
            unconfirmed=cursor.unconfirmed if cursor else 0,
            failing=self._failing,
        )

    async def _send(self, export: TraceExport) -> None:
        """Send until cancelled."""
        while True:
            began_s = time.monotonic()
            try:
                complete = await start_in_thread(export.round, name="traces")
            except (OSError, LedgerRefused) as error:
                complete = False
                # A run that begins has no ledger yet.
                logger.log(
                    logging.WARNING if export.cursor.through_s else logging.INFO, "traces cannot be sent now: %s", error
                )
            failing = not complete and bool(export.cursor.open)
            if failing and not self._failing:
                logger.warning("%s does not take spans; they are sent when it does", self._config.otlp_endpoint)
            self._failing = failing
            await asyncio.sleep(max(EVERY_S, RESTS * (time.monotonic() - began_s)))
