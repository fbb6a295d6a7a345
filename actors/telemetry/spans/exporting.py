"""Sends chosen traces of a run to a collector: those of slow, failed and stuck rollouts, of what the run does meanwhile
(steps, pushes, evaluations), and a hashed share of the others.

Invariants:
- The ledger says in its own order which attempts have ended, whatever clocks say, and the span files have their spans:
  nothing is buffered, so an outage of the collector costs neither memory nor spans, and the traces follow when it is
  back.
- No span is sent twice, also after kill -9: what is about to be sent is recorded first, and what was being sent when
  the process died is not sent again, but counted as `unconfirmed`.
- A trace that the collector refuses for good is counted as `refused`, and the others follow.
- A stuck rollout is sent as far as it is known, and the rest when it has ended.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

import orjson

from headrace.actors.record.files.run_directory import RunDirectory, identity_of
from headrace.actors.telemetry.slow.in_flight import in_flight
from headrace.actors.telemetry.spans.attempts import FAILED, slow_traces
from headrace.actors.telemetry.spans.receiver import BATCH_SPANS, Sent
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.evidence import rows_of
from headrace.buffer.primitives.durable_files import replace_file
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import trace_id_text


class SendsSpans(Protocol):
    """A collector."""

    def send(self, spans: Collection[Mapping[str, Any]]) -> Sent: ...


FOLDER: Final = "observer"
"""Folder of the observer's files in the run's state."""
CURSOR: Final = "exported.json"
"""What has been sent, in that folder."""
GRACE_S: Final = 15.0
"""Time after the end of an attempt was seen until which its spans may still come: other processes write every second,
other nodes send their files every few seconds."""
DOUBTFUL_S: Final = 60.0
"""Time after the clock was set back until which a round has certainly noticed it."""
MAX_ATTEMPTS: Final = 500
"""Attempts that are decided in one round."""
TRACES_READ: Final = 64
"""Traces whose spans are in memory at once."""
SLOW_OR_FAILED, STUCK, MEANWHILE, SHARE = "slow_or_failed", "stuck", "meanwhile", "share"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Cursor:
    """Progress of an export. Attempts up to the end with number `through` are decided, and of other traces those that
    ended before `through_s`, but for `decided` ones, which end later because the clock was set back. `open` are the
    chosen traces that are still to be sent, with the time since which their spans count and the reason; `sending`
    those that are being sent now; `stuck` the end of what was sent of traces that go on. Times of spans are in
    nanoseconds."""

    through: int = 0
    seen: list[tuple[float, int]] = field(default_factory=list)
    """The newest end in each of the last rounds, after the time by the clock since boot, which is never set."""
    through_s: float = 0.0
    decided: dict[str, int] = field(default_factory=dict)
    open: dict[str, tuple[int, str]] = field(default_factory=dict)
    since_s: float = 0.0
    sending: list[str] = field(default_factory=list)
    stuck: dict[str, int] = field(default_factory=dict)
    spans: int = 0
    traces: int = 0
    unconfirmed: int = 0
    """Traces that were being sent when the process died, or that ended about when the clock was set back."""
    refused: int = 0
    """Spans that the collector refused for good."""

    @classmethod
    def read(cls, path: Path) -> Cursor:
        """Return the cursor in a file; a new one without it. Raises OSError, ValueError."""
        if not path.exists():
            return cls()
        document = orjson.loads(path.read_bytes())
        return cls(**document | {"open": {trace: (since, why) for trace, (since, why) in document["open"].items()}})


class TraceExport:
    """Export of one run to one collector. Blocking; one process at a time, whose rounds wait for each other."""

    def __init__(
        self, run_dir: Path, receiver: SendsSpans, share: float, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Continue where the run's last export ended. Raises OSError, ValueError for a damaged cursor."""
        self._directory = RunDirectory.at(run_dir)
        self._receiver, self._share, self._clock = receiver, share, clock
        self._store = SpanFolder.of_run(self._directory.path)
        self._path = self._directory.path / FOLDER / CURSOR
        self._path.parent.mkdir(exist_ok=True)
        self._one = Lock()
        self._stopped = False
        self.cursor = Cursor.read(self._path)
        if self.cursor.sending:
            self.cursor.unconfirmed += len(self.cursor.sending)
            logger.warning(
                "%d traces were being sent at the last end, and are not sent again", len(self.cursor.sending)
            )
            self._settle(self.cursor.sending)

    def round(self, *, grace_s: float = GRACE_S) -> bool:
        """Decide the attempts that have ended since the last round, and send what was chosen. Return whether everything
        that is known was sent. Raises OSError, LedgerRefused; the collector's failures are no errors."""
        with self._one:
            # What an outage or a restart left comes first.
            if self.cursor.open and not self._send_open():
                return False
            complete = self._decide(grace_s)
            return self._send_open() and complete

    def stop(self) -> None:
        """Send nothing more. A round that goes on in a thread would repeat what the next observer sends."""
        self._stopped = True

    def _send_open(self) -> bool:
        """Send the open traces; return whether the collector took them all."""
        cursor = self.cursor
        for batch in batches(self._store, cursor):
            sent = self._send(batch)
            if sent is Sent.REFUSED and len(batch) > 1:
                # One trace may spoil the request for the others.
                alone = (self._send({trace: spans}) for trace, spans in batch.items())
                sent = Sent.LATER if Sent.LATER in alone else Sent.TAKEN
            if sent is Sent.LATER:
                return False
        # What was chosen and has no span in the files (any more).
        self._settle(list(cursor.open))
        return True

    def _send(self, batch: Mapping[str, list[dict[str, Any]]]) -> Sent:
        """Send traces in one request, and settle them unless the collector is to be asked again. A refusal settles a
        single trace only."""
        if self._stopped:
            return Sent.LATER
        cursor, number = self.cursor, sum(map(len, batch.values()))
        cursor.sending = list(batch)
        self._store_cursor()
        sent = self._receiver.send([span for spans in batch.values() for span in spans])
        if sent is Sent.LATER or (sent is Sent.REFUSED and len(batch) > 1):
            cursor.sending = []
            self._store_cursor()
            return sent
        if sent is Sent.REFUSED:
            cursor.refused += number
            logger.warning("the collector refuses trace %s with %d spans", next(iter(batch)), number)
        else:
            cursor.spans += number
            cursor.traces += len(batch)
        for trace, spans in batch.items():
            if cursor.open[trace][1] == STUCK:
                cursor.stuck[trace] = max(span["end_ns"] for span in spans)
        self._settle(cursor.sending)
        return sent

    def _decide(self, grace_s: float) -> bool:
        """Choose among what has ended. Return False if there were too many attempts for one round."""
        cursor, now_s, run_id = self.cursor, self._clock(), identity_of(self._directory)
        with rows_of(self._directory.path) as rows:
            since_boot_s = time.monotonic()
            # What a round before a reboot saw may seem to come.
            cursor.seen = [mark for mark in cursor.seen if mark[0] <= since_boot_s] + [
                (since_boot_s, rows.newest_end())
            ]
            ripe = [number for at_s, number in cursor.seen if at_s <= since_boot_s - grace_s]
            del cursor.seen[: max(len(ripe) - 1, 0)]
            found = islice(rows.ends(cursor.through), MAX_ATTEMPTS)
            ended = [each for each in found if each.sequence <= max(ripe, default=0)]
        slow = slow_traces(self._directory.path) if ended else frozenset()
        chosen: dict[str, tuple[int, str]] = {}
        began_s = [now_s]
        for each in ended:
            trace = trace_id_text(run_id, each.rollout_id, each.attempt)
            if each.cause in FAILED or trace in slow or trace in cursor.stuck:
                chosen[trace] = cursor.stuck.pop(trace, 0), SLOW_OR_FAILED
            elif int(trace[:8], 16) < self._share * 2**32:
                chosen[trace] = 0, SHARE
            if trace in chosen:
                # After its end the clock was set back: the times of files say nothing.
                began_s.append(0.0 if (each.ended_at_s or 0.0) > now_s else each.began_at_s)
        for trace, age_s in stuck_traces(self._directory):
            if trace not in cursor.stuck:
                began_s.append(now_s - age_s)
                chosen.setdefault(trace, (0, STUCK))
        for trace, (start_ns, _) in self._meanwhile(now_s, now_s - grace_s).items():
            began_s.append(start_ns / 1e9)
            chosen[trace] = 0, MEANWHILE
        cursor.since_s = min(began_s) - 60.0
        cursor.open, cursor.through = chosen, ended[-1].sequence if ended else cursor.through
        self._store_cursor()
        return len(ended) < MAX_ATTEMPTS

    def _meanwhile(self, now_s: float, until_s: float) -> dict[str, tuple[int, int]]:
        """Return the traces of what is no rollout and has ended before a time, with the times of their roots."""
        cursor = self.cursor

        def ended(since_s: float, until_s: float) -> dict[str, tuple[int, int]]:
            roots = self._store.spans(since_s=since_s, until_s=until_s, roots=True)
            others = (
                each for each in roots if each["name"] != names.ROLLOUT and each["trace_id"] not in cursor.decided
            )
            return {each["trace_id"]: (each["start_ns"], each["end_ns"]) for each in others}

        if now_s < cursor.through_s:
            # The clock was set back. What has ended since then cannot be told from what ended at that time before. All
            # files are read, since their times say nothing.
            again = {trace: end_ns for trace, (_, end_ns) in ended(0.0, cursor.through_s).items()}
            cursor.unconfirmed += sum(now_s - DOUBTFUL_S <= end_ns / 1e9 < now_s for end_ns in again.values())
            cursor.decided |= again
            cursor.through_s = until_s
        found = ended(cursor.through_s, until_s)
        cursor.through_s = max(until_s, cursor.through_s)
        cursor.decided = {trace: end for trace, end in cursor.decided.items() if end >= cursor.through_s * 1e9}
        return found

    def _settle(self, traces: Iterable[str]) -> None:
        for trace in traces:
            self.cursor.open.pop(trace, None)
        self.cursor.sending = []
        self._store_cursor()

    def _store_cursor(self) -> None:
        replace_file(self._path, orjson.dumps(asdict(self.cursor)))


def batches(store: SpanFolder, cursor: Cursor) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield the spans of the open traces by trace, in batches of about `BATCH_SPANS`."""
    chosen = list(cursor.open)
    for start in range(0, len(chosen), TRACES_READ):
        traces = chosen[start : start + TRACES_READ]
        spans: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for span in store.spans(since_s=cursor.since_s, traces=traces):
            if span["end_ns"] > cursor.open[span["trace_id"]][0]:
                spans[span["trace_id"]].append(span)
        batch: dict[str, list[dict[str, Any]]] = {}
        for trace in traces:
            if trace in spans:
                batch[trace] = spans[trace]
                if cursor.open[trace][1] != STUCK:
                    join_strays(batch[trace])
            if sum(map(len, batch.values())) >= BATCH_SPANS:
                yield batch
                batch = {}
        if batch:
            yield batch


def join_strays(spans: list[dict[str, Any]]) -> None:
    """Put the agent's own spans of a whole trace below the span of the agent if their parents lead nowhere: they were
    never sent, or form a circle."""
    sent = {span["span_id"]: span for span in spans if span["attributes"].get(names.SENDER) == "agent"}
    rooted = {span["span_id"] for span in spans} - sent.keys()
    own = (span["span_id"] for span in spans if span["name"].startswith(names.AGENT) and span["span_id"] in rooted)
    if not sent or (agent := next(own, None)) is None:
        return
    for span in sent.values():
        way, each = {span["span_id"]}, span
        while each["parent_id"] in sent and each["parent_id"] not in rooted | way:
            each = sent[each["parent_id"]]
            way.add(each["span_id"])
        if each["parent_id"] not in rooted:
            each["parent_id"] = each["otlp"]["scopeSpans"][0]["spans"][0]["parentSpanId"] = agent
        rooted |= way


def stuck_traces(directory: RunDirectory) -> Iterator[tuple[str, float]]:
    """Yield the traces of rollouts that run far longer than their cohort, and their ages in seconds."""
    run_id = identity_of(directory)
    for row in in_flight(directory, driven=directory.is_driven()):
        if row.stuck and not row.interrupted:
            yield trace_id_text(run_id, row.rollout_id, row.attempt), row.age_s
