"""A gateway's session table, which opens, finds, finishes and forgets sessions, and restores them after a restart.

Invariants:
- At most one session with a given id is open at a time; its token is random and identifies only this session.
- After a restart logged sessions remain available under their tokens; each is read when it is first needed.
- If there is a log, finishing a session again within `finished_grace_s` returns the same report.
- If there is a folder for exports, a session is exported before it leaves the table: after a crash in between, it is
  restored, and exported when it is finished again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.serve.gateway.capture.coverage import CoverageWindow
from headrace.serve.gateway.capture.rows import SessionReport, conversation_of, report_of, tree_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_log import Opened, SessionLog
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.errors import ExportUnknown, LogBroken, SessionExists, SessionUnfinished
from headrace.serve.gateway.exports.export_form import ExportForm
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.exports import ExportFolder
from headrace.serve.gateway.http.placement import token_prefix
from headrace.serve.gateway.http.turns import LiveSession, Turns
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class FinishedSession:
    """A closed session with its report."""

    report: SessionReport
    session: Session

    @property
    def tree(self) -> list[dict[str, object]]:
        """The session's trie as JSON."""
        return tree_of(self.session)

    def with_conversation(self, decode: Callable[[Sequence[int]], str]) -> SessionReport:
        """Return the report, including every sampled turn as text."""
        return replace(self.report, conversation=conversation_of(self.session, decode))


class SessionTable:
    """Open sessions by id and token. `clock` is monotonic; `tasks` holds the turns in flight. Finished sessions are
    written to `exports`, if it is given."""

    def __init__(
        self,
        turns: Turns,
        log: SessionLog | None,
        clock: Callable[[], float],
        tasks: asyncio.TaskGroup,
        config: GatewayConfig,
        *,
        exports: ExportFolder | None = None,
    ) -> None:
        self.coverage = CoverageWindow()
        self._turns = turns
        self._token_prefix = "" if config.place is None else token_prefix(config.place)
        self._log = log
        self._clock = clock
        self._tasks = tasks
        self._config = config
        self._exports = exports
        # The other forms need no answers, which are as long as all that was sampled.
        self._keeps_answers = exports is not None and exports.form is ExportForm.ATIF
        self._live: dict[SessionId, LiveSession] = {}
        self._unread: dict[SessionId, Opened] = {}
        """Logged sessions of an earlier process that have not been needed yet."""
        self._ids: dict[str, SessionId] = {}
        self._sweep_at = 0.0
        if log is not None:
            now = clock()
            for opened in list(log.known()):
                if opened.opened_at > now:
                    # A log of schema 1 has times of a clock that restarts with the host: this session was opened before
                    # the last boot.
                    log.remove(opened.spec.session_id)
                    continue
                self._unread[opened.spec.session_id] = opened
                self._ids[opened.token] = opened.spec.session_id

    def __len__(self) -> int:
        return len(self._ids)

    async def idle(self) -> None:
        """Wait for a moment without a turn in progress."""
        while busy := next((live for live in self._live.values() if len(live.running)), None):
            await busy.running.ended()
            # The end of a run is noted in the next round of the loop.
            await asyncio.sleep(0)

    def open(self, spec: SessionSpec) -> LiveSession:
        """Open a session. Raises SessionExists, LogBroken."""
        if spec.session_id in self._live or spec.session_id in self._unread:
            raise SessionExists(f"session {spec.session_id} is already open.", "session_id")
        opened = Opened(spec=spec, token=self._token_prefix + secrets.token_urlsafe(24), opened_at=self._clock())
        if self._log is not None:
            self._log.remove(spec.session_id)
            try:
                self._log.open(opened)
            except LogBroken:
                self._log.remove(spec.session_id)
                raise
        return self._enter(opened, Session(spec, opened.opened_at, keeps_answers=self._keeps_answers))

    def _enter(self, opened: Opened, core: Session) -> LiveSession:
        live = LiveSession(
            core=core,
            token=opened.token,
            log=self._log,
            running=SingleFlight(self._tasks),
            # Of a session of an earlier process, the time until now is unknown.
            usage=UsageClock(since_s=self._clock()),
        )
        self._live[opened.spec.session_id] = live
        self._ids[opened.token] = opened.spec.session_id
        return live

    def by_token(self, token: str) -> LiveSession | None:
        """Return the session with this token, or None. Raises LogBroken if its log cannot be read."""
        session_id = self._ids.get(token)
        return self.get(session_id) if session_id is not None else None

    def get(self, session_id: SessionId) -> LiveSession | None:
        """Return the session with this id, or None. Raises LogBroken if its log cannot be read."""
        live = self._live.get(session_id)
        if live is None and self._log is not None and (opened := self._unread.get(session_id)) is not None:
            live = self._enter(opened, self._log.load(session_id, keeps_answers=self._keeps_answers))
            del self._unread[session_id]
        return live

    async def finish(self, session_id: SessionId) -> FinishedSession | None:
        """Close a session and return its report; this also works for a session that was finished recently. Return None
        if the session is unknown. Raises LogBroken."""
        live = self.get(session_id)
        if live is not None:
            ROLLOUT_ATTEMPT.set(live.attempt)
        if live is None:
            known = self._log.load_finished(session_id) if self._log else None
            if known is None:
                return None
            finished = FinishedSession(report_of(known), known)
            await self._export(finished)
            return finished
        # The session stays in the table until its turns have ended: the caller may disconnect before that, and retry.
        report = await self._turns.close(live)
        await self._export(FinishedSession(report, live.core))
        if self._drop(live):
            if live.core.spec.sampling.exact:
                # Otherwise nothing is trained, as the caller wants it.
                self.coverage.add(report.coverage)
            if self._log is not None:
                self._log.finish(session_id)
        return FinishedSession(report, live.core)

    async def _export(self, finished: FinishedSession) -> None:
        """Write a session to the folder for exports, if there is one. Never fails."""
        if self._exports is not None:
            # A caller that disconnects must not leave a thread that writes while the next export begins.
            await asyncio.shield(self._tasks.create_task(self._exports.write(finished.session, finished.report)))

    async def finished(self, session_id: SessionId) -> FinishedSession:
        """Return a session that was finished recently, with its answers. Raises SessionUnfinished, ExportUnknown."""
        if session_id in self._live or session_id in self._unread:
            raise SessionUnfinished(f"Session {session_id} is still open: POST /sessions/{session_id}/finish first.")
        if self._log is None:
            raise ExportUnknown(
                "This gateway keeps no finished sessions; start it with --state, a folder for session logs."
            )
        known = await asyncio.to_thread(self._log.load_finished, session_id)
        if known is None:
            raise ExportUnknown(
                f"No session with this id was finished in the last {self._config.finished_grace_s:.0f} s "
                "(gateway.finished_grace_s)."
            )
        return FinishedSession(report_of(known), known)

    async def forget(self, session_id: SessionId) -> bool:
        """Close a session without a report; return False if it is unknown."""
        known = session_id in self._live or session_id in self._unread
        if (live := self._live.get(session_id)) is not None:
            await self._turns.close(live)
            if not self._drop(live):
                return known
        elif (opened := self._unread.pop(session_id, None)) is not None:
            del self._ids[opened.token]
        if self._log is not None:
            self._log.remove(session_id)
        return known

    def _drop(self, live: LiveSession) -> bool:
        """Remove the session from the table; return False if it has already been removed."""
        session_id = live.core.spec.session_id
        if self._live.get(session_id) is not live:
            return False
        del self._live[session_id], self._ids[live.token]
        return True

    async def expire(self) -> None:
        """Forget old reports, and sessions that were not finished in time because their worker is dead."""
        now = self._clock()
        ends = {session_id: live.core.wall_left_s(now) for session_id, live in self._live.items()}
        ends |= {
            session_id: opened.opened_at + opened.spec.budgets.wall_s - now
            for session_id, opened in self._unread.items()
        }
        expired = [session_id for session_id, left_s in ends.items() if left_s < -self._config.expire_grace_s]
        if expired:
            logger.warning("closing %d sessions that were never finished", len(expired))
        for session_id in expired:
            await self.forget(session_id)
        if self._log is not None and now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY_S
            self._log.remove_finished(self._config.finished_grace_s)

    async def end_turns(self) -> None:
        """Close all sessions because the gateway is stopping; their logs remain."""
        async with asyncio.TaskGroup() as group:
            for live in self._live.values():
                group.create_task(self._turns.close(live))
