"""Parts of the page: texts, numbers, readings, the incremental reader of metrics, and the files of others."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from markupsafe import Markup

from headrace.actors.errors import RunError
from headrace.actors.telemetry.page import computed, slow_verdicts
from headrace.actors.telemetry.page.changes import ChangeWatch
from headrace.actors.telemetry.page.computed import Busy, Computed, ComputedByKey
from headrace.actors.telemetry.page.drawing import WIDTH, histogram, stacked
from headrace.actors.telemetry.page.metrics_tail import KEPT_OF_OTHERS, MetricsTail
from headrace.actors.telemetry.page.rendering import duration, instant, name_of, number, share, size, whole
from headrace.actors.telemetry.page.slow_verdicts import explain_here, time_here, time_of
from headrace.actors.telemetry.page.text import name, shown, visible
from headrace.actors.telemetry.page.views import cut
from headrace.buffer.errors import LedgerRefused

ROOT = Path(__file__).parents[2]
DIGESTS = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files of uPlot 1.6.32 as its npm package has them."""


def test_the_files_of_uplot_are_those_of_its_release() -> None:
    static = ROOT / "actors/telemetry/page/static"
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in static.glob("uPlot*")}
    assert found == DIGESTS
    assert "MIT License" in (static / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain é 漢字 🙂\ttab\nline", "plain é 漢字 🙂\ttab\nline"),
        ("\x00\x1b[2J\x7f\x9b", "\\x00\\x1b[2J\\x7f\\x9b"),
        ("a\u202eb\u2066c\u200bd\ufeff", "a\\u202eb\\u2066c\\u200bd\\ufeff"),
        ("\ud800 alone", "\\ud800 alone"),
        ("one\r\ntwo\rthree", "one\ntwo\\x0dthree"),
    ],
)
def test_harmful_characters_become_visible(text: str, seen: str) -> None:
    assert visible(text) == seen
    assert visible(text).encode()


def test_long_texts_say_what_is_missing() -> None:
    assert shown("x" * 10, limit=4) == shown("xxxx" + "y" * 6, limit=4)
    assert shown("x" * 10, limit=4).cut == 6
    assert shown("x" * 4, limit=4).cut == 0
    assert name("two\nlines " + "x" * 300, 12) == "two\\nlines xx…"


def test_numbers_that_are_none_are_a_dash() -> None:
    for filter_of in (duration, share, number, whole, size, instant):
        for value in (None, "9", float("nan"), float("inf"), [1], {}):
            assert filter_of(value) == "\u2013", (filter_of, value)
    assert instant(1e300) == "\u2013"
    shown_as = [duration(value) for value in (0, 0.004, 0.25, 59.94, 61.2 * 60, 125)]
    assert shown_as == ["0 s", "4 ms", "0.2 s", "59.9 s", "1 h 01 min", "2 min 05 s"]
    assert (share(0.254), number(1234.5), whole(12345), size(2_500_000)) == (
        "25 %",
        "1\u202f234.50",
        "12\u202f345",
        "2.5 MB",
    )
    assert instant(0.5e9) == Markup('<time datetime="1985-11-05T00:53:20Z">1985-11-05 00:53:20</time>')


def test_names_are_escaped_and_isolated() -> None:
    assert name_of("<b>\u202e") == "<bdi>&lt;b&gt;\\u202e</bdi>"


def test_bars_and_histograms_stay_within_their_drawing() -> None:
    boxes = stacked([("a", 1.0), ("b", float("nan")), ("c", -2.0), ("d", 0.0), ("e", 3.0)], 4.0)
    assert [(box.kind, box.x, box.width) for box in boxes] == [("a", 0.0, 250.0), ("e", 250.0, 750.0)]
    assert all(box.x + box.width <= WIDTH for box in stacked([("a", 5.0), ("b", 5.0)], 1.0))
    columns = histogram({0: 1, 3: 3})
    assert [(column.label, column.count, column.share) for column in columns] == [
        ("0", 1, 0.25),
        ("1", 0, 0.0),
        ("2", 0, 0.0),
        ("3", 3, 0.75),
    ]
    assert histogram({}) == ()


def test_pages_of_a_list_have_all_its_entries() -> None:
    rows = list(range(25))
    assert [row for page in (1, 2, 3) for row in cut(rows, page, 10).rows] == rows
    assert cut(rows, 99, 10) == cut(rows, 3, 10)
    assert (cut([], 1).first, cut([], 1).last, cut([], 1).pages) == (0, 0, 1)


def test_metrics_are_read_once_over_rotation_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read().of("step") == ()
    path.write_bytes(line(1) + line(2)[:-5])
    assert [step["step"] for step in tail.read().of("step")] == [1]
    with path.open("ab") as file:
        file.write(line(2)[-5:])
    path.rename(tmp_path / "metrics-000001.jsonl")
    path.write_bytes(line(3))
    before = tail.mark()
    assert [step["step"] for step in tail.read().of("step")] == [1, 2, 3]
    assert tail.mark() == before
    assert [step["step"] for step in tail.read().of("step")] == [1, 2, 3], "nothing is read twice"


def test_old_metrics_are_counted_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"kind": "push", "time_s": n}) + b"\n" for n in range(KEPT_OF_OTHERS + 7)))
    records = MetricsTail(path).read()
    assert len(records.of("push")) == KEPT_OF_OTHERS
    assert records.left_out["push"] == 7
    assert records.of("push")[-1]["time_s"] == KEPT_OF_OTHERS + 6


def line(step: int) -> bytes:
    return orjson.dumps({"kind": "step", "time_s": float(step), "step": step, "reward": 0.5}) + b"\n"


class Source:
    """Something that is read when `may_read` is set."""

    def __init__(self) -> None:
        self.readings, self.mark = 0, 0
        self.may_read, self.lock = threading.Event(), threading.Lock()
        self.error: Exception | None = None

    def read(self) -> int:
        assert self.may_read.wait(30)
        with self.lock:
            self.readings += 1
            number = self.readings
        if self.error is not None:
            raise self.error
        return number


async def test_many_who_ask_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    with ThreadPoolExecutor(4) as executor:
        value = Computed(executor, source.read, lambda: source.mark)
        asking = [asyncio.create_task(value.now()) for _ in range(20)]
        assert await value.get(0.01) is None, "a view does not wait for a slow reading"
        asking[0].cancel()
        source.may_read.set()
        assert await asyncio.gather(*asking[1:]) == [1] * 19
        assert source.readings == 1
        source.mark += 1
        assert await value.now() == 1, "it is not read again so soon"
        monkeypatch.setattr(computed, "LEAST_S", 0.0)
        monkeypatch.setattr(computed, "REST", 0.0)
        value = Computed(executor, source.read, lambda: source.mark)
        assert [await value.now(), await value.now()] == [2, 2], "nothing has changed"
        source.mark += 1
        assert await value.now() == 3


async def test_an_error_reaches_those_who_ask_until_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "LEAST_S", 0.0)
    monkeypatch.setattr(computed, "REST", 0.0)
    source = Source()
    source.may_read.set()
    source.error = RunError("damaged")
    with ThreadPoolExecutor(1) as executor:
        value = Computed(executor, source.read, lambda: source.mark)
        with pytest.raises(RunError, match="damaged"):
            await value.now()
        source.error = None
        assert await value.now() == 2


async def test_readings_by_key_are_bounded() -> None:
    source = Source()
    with ThreadPoolExecutor(4) as executor:
        made: list[str] = []

        def make(key: str) -> Computed[int]:
            made.append(key)
            return Computed(executor, source.read, lambda: source.mark)

        values = ComputedByKey(make, kept=3, busy=2)
        asking = [asyncio.create_task(values.of(key).now()) for key in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            values.of("c")
        assert values.of("a").is_busy, "what is being read may be waited for"
        source.may_read.set()
        assert sorted(await asyncio.gather(*asking)) == [1, 2]
        for key in "cdef":
            await values.of(key).now()
        await values.of("f").now()
        assert made == list("abcdef")
        values.of("a")
        assert made == list("abcdefa"), "the oldest ones are forgotten"


async def test_changes_are_numbered_upwards_and_nobody_waits_beyond_the_end() -> None:
    mark = [0]

    async def marked() -> int:
        return mark[0]

    watch = ChangeWatch(marked)
    first = await watch.number()
    assert await watch.number() == first
    waiting = asyncio.create_task(watch.after(first))
    mark[0] = 1
    changes = await waiting
    assert [event.number > first for event in changes.events] == [True]
    waiting = asyncio.create_task(watch.after(changes.events[0].number))
    watch.close()
    assert (await waiting).ended


@pytest.mark.whole
def test_a_large_run_is_explained_by_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ROOT / "tests/golden/ledger"
    here, time_of_one = explain_here(run), time_here(run, "g000000-0")
    assert time_of_one is not None
    assert time_here(run, "none") is None
    monkeypatch.setattr(slow_verdicts, "LARGE_BYTES", 0)
    assert slow_verdicts.explained(run) == here
    assert time_of(run, "g000000-0") == time_of_one
    (tmp_path / "ledger.db").write_bytes(b"not a database at all")
    with pytest.raises(LedgerRefused, match=r"ledger\.db"):
        slow_verdicts.explained(tmp_path)
