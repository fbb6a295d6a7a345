"""The pages of runs below the control API: who sees them, and the processes that serve them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from headrace.actors.cluster.runs.records import RunId
from headrace.actors.errors import RunError
from headrace.actors.telemetry.page import access, page_processes
from headrace.actors.telemetry.page.page_processes import MountedPages, PageRequest
from support.control_rig import KEYS, Answer, ControlRig, write_keys
from support.observer_rig import simulated_run
from support.runs_without_services import RECIPE

pytestmark = pytest.mark.timeout(120)
BROWSER = {"accept": "text/html,*/*"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("page") / "run")


@asynccontextmanager
async def pages_of(rig: ControlRig, folder: Path | None) -> AsyncIterator[RunId]:
    """A run of alice whose files are in `folder`."""
    body = {"name": "a", "recipe": RECIPE}
    run = RunId((await rig.call("POST", "/v1/runs", body, idempotency_key="k")).document["run_id"])
    if folder is not None:
        rig.runs.folders[run] = folder
    try:
        yield run
    finally:
        await rig.runs.pages.close()


async def log_in(rig: ControlRig, run: RunId, key: str, path: str = "") -> Answer:
    form = f"token={key}&next=/v1/runs/{run}/page/{path}".encode()
    return await rig.call("POST", f"/v1/runs/{run}/page/login", form, key="")


def cookie_of(answer: Answer) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


@pytest.mark.whole
async def test_every_view_is_served_to_a_key_that_may_see_the_run(tmp_path: Path, run_folder: Path) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        for path in ("", "running", "slow", "steps", "engines", "pushes", "data/reward.json", "metrics"):
            answer = await rig.call("GET", f"/v1/runs/{run}/page/{path}", key="alice-read", **BROWSER)
            assert answer.status == 200, (path, answer.body[:200])
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        slow = await rig.call("GET", f"/v1/runs/{run}/page/slow?part=boot", key="alice-read", **BROWSER)
        assert b"boot" in slow.body
        assert rig.runs.pages is not None
        missing = await rig.call("GET", f"/v1/runs/{run}/page/nothing", key="alice-read", **BROWSER)
        assert (missing.status, b"nothing" in missing.body) == (404, True)
        away = await rig.call("GET", f"/v1/runs/{run}/page", key="")
        assert (away.status, away.headers["location"]) == (303, "page/")


async def test_a_browser_gives_its_key_once(tmp_path: Path, run_folder: Path) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        form = await rig.call("GET", f"/v1/runs/{run}/page/slow", key="", **BROWSER)
        assert (form.status, b"This page needs its key" in form.body) == (401, True)
        # The links of the form lead to files that need no key.
        for link in re.findall(rb'(?:src|href)="(static/[^"]+)"', form.body):
            assert (await rig.call("GET", f"/v1/runs/{run}/page/{link.decode()}", key="")).status == 200
        wrong = await log_in(rig, run, "guess")
        assert (wrong.status, b"This key does not open this page" in wrong.body) == (401, True)
        assert "set-cookie" not in wrong.headers
        answer = await log_in(rig, run, "alice-read", "slow")
        assert (answer.status, answer.headers["location"]) == (303, f"/v1/runs/{run}/page/slow")
        set_cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in set_cookie
        assert "samesite=strict" in set_cookie
        assert f"path=/v1/runs/{run}/page/;" in set_cookie
        assert "alice-read" not in set_cookie
        seen = await rig.call("GET", f"/v1/runs/{run}/page/slow", key="", cookie=cookie_of(answer), **BROWSER)
        assert (seen.status, b"<title>Slow" in seen.body) == (200, True)
        elsewhere = await rig.call("GET", f"/v1/runs/{run}/status", key="", cookie=cookie_of(answer))
        assert elsewhere.code == "key_missing"


async def test_cookies_of_others_and_old_ones_open_nothing(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, other = ControlRig(tmp_path), ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        path = f"/v1/runs/{run}/page/"
        of_bob = await rig.call("GET", path, key="", cookie=cookie_of(await log_in(rig, run, "bob")), **BROWSER)
        absent = await rig.call("GET", f"/v1/runs/{'0' * 32}/page/", key="bob", **BROWSER)
        assert (of_bob.status, of_bob.code) == (absent.status, absent.code) == (404, "run_unknown")
        good = cookie_of(await log_in(rig, run, "alice"))
        ends, digest, signature = good.partition("=")[2].split(".")
        foreign = cookie_of(await log_in(other, run, "alice"))
        for cookie in (
            foreign,
            f"headrace-page={int(ends) + 9}.{digest}.{signature}",
            f"headrace-page={ends}.{'0' * 64}.{signature}",
            *("headrace-page=", "headrace-page=a.b.c", "headrace-page=1..", "headrace-page=\xff.\xff.\xff"),
        ):
            refused = await rig.call("GET", path, key="", cookie=cookie, **BROWSER)
            assert refused.status == 401, cookie
        write_keys(rig.key_file)
        kept = [line for line in rig.key_file.read_text().splitlines() if not line.startswith(digest)]
        rig.key_file.write_text("\n".join(kept))
        removed = await rig.call("GET", path, key="", cookie=good, **BROWSER)
        assert removed.status == 401
        write_keys(rig.key_file)
        monkeypatch.setattr(access, "COOKIE_S", -1)
        late = await rig.call("GET", path, key="", cookie=cookie_of(await log_in(rig, run, "alice")), **BROWSER)
        assert late.status == 401


@pytest.mark.parametrize("target", ["//evil.example", "/\\evil.example", "https://evil.example", "/v1/runs", "a\r\nb"])
async def test_the_form_leads_nowhere_else(tmp_path: Path, run_folder: Path, target: str) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        form = f"token=alice&next={target}".encode()
        answer = await rig.call("POST", f"/v1/runs/{run}/page/login", form, key="")
        assert (answer.status, answer.headers["location"]) == (303, ".")


async def test_requests_without_a_key_and_oversized_forms_are_refused(tmp_path: Path) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, None) as run:
        program = await rig.call("GET", f"/v1/runs/{run}/page/data/reward.json", key="", accept="application/json")
        assert (program.status, program.code) == (401, "key_missing")
        wrong = await rig.call("GET", f"/v1/runs/{run}/page/", key="guess", **BROWSER)
        assert (wrong.status, wrong.code) == (401, "key_wrong")
        large = await rig.call("POST", f"/v1/runs/{run}/page/login", b"token=" + b"a" * 20_000, key="")
        assert (large.status, large.code) == (413, "body_too_large")
        nothing = await rig.call("GET", f"/v1/runs/{run}/page/", key="alice", **BROWSER)
        assert (nothing.status, nothing.code) == (409, "run_refused")
        assert "has no page" in nothing.document["error"]["message"]
        unknown = await rig.call("GET", f"/v1/runs/{run}/page/static/no.js", key="")
        assert (unknown.status, unknown.code) == (404, "route_unknown")
    assert len(KEYS) == 5


@pytest.mark.whole
async def test_prometheus_finds_the_metrics_of_each_run_that_a_key_may_see(tmp_path: Path, run_folder: Path) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        asked = "/v1/metrics/targets"
        [target] = (await rig.call("GET", asked, key="alice-read", host="control.example:8000")).document
        assert target["targets"] == ["control.example:8000"]
        assert (target["labels"]["instance"], target["labels"]["__scheme__"]) == (f"a-{run[:8]}", "http")
        answer = await rig.call("GET", target["labels"]["__metrics_path__"], key="alice-read")
        assert (answer.status, b"headrace_steps_total" in answer.body) == (200, True)
        assert (await rig.call("GET", asked, key="bob", host="control.example:8000")).document == []
        assert len((await rig.call("GET", asked, key="root", host="control.example:8000")).document) == 1
        await rig.call("POST", f"/v1/runs/{run}/stop", key="alice")
        assert (await rig.call("GET", asked, key="alice", host="control.example:8000")).document == []


@pytest.mark.whole
async def test_a_stream_of_events_ends_with_its_first_event(tmp_path: Path, run_folder: Path) -> None:
    rig = ControlRig(tmp_path)
    async with pages_of(rig, run_folder) as run:
        path = f"/v1/runs/{run}/page/events"
        answer = await rig.call("GET", path, key="alice", last_event_id="1", accept="text/event-stream")
        assert answer.headers["content-type"].startswith("text/event-stream")
        number = re.search(rb"id: (\d+)\nevent: changed\n", answer.body)
        assert number is not None
        # Nothing changes, so the next answer is the word that there is nothing, with the same number to continue from.
        later = await rig.call("GET", path, key="alice", last_event_id=number[1].decode(), accept="text/event-stream")
        assert b"event: changed" not in later.body
        assert b"id: " + number[1] in later.body


def pages_alive() -> list[psutil.Process]:
    """Children of this process, another test's zombies aside, that are a page."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "page.page_processes" in " ".join(child.cmdline())]


@pytest.mark.whole
async def test_a_page_that_died_is_started_again_and_idle_ones_end(tmp_path: Path, run_folder: Path) -> None:
    pages = MountedPages(idle_s=0.0)
    assert (await pages.get(run_folder, PageRequest(path=""))).status == 200
    # Its time without a request is over at once.
    (first,) = pages._pages.values()
    await first.process.wait()
    assert not pages_alive()
    assert (await pages.get(run_folder, PageRequest(path="metrics"))).status == 200
    await pages.close()
    assert not pages_alive()
    with pytest.raises(RunError, match="has no page"):
        await MountedPages().get(tmp_path, PageRequest(path=""))
    assert not pages_alive()


@pytest.mark.whole
async def test_the_page_that_was_asked_longest_ago_makes_room(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_processes, "MAX_PAGES", 1)
    pages, link = MountedPages(), tmp_path / "link"
    link.symlink_to(run_folder)
    await pages.get(run_folder, PageRequest(path=""))
    first = pages._pages[run_folder]
    await pages.get(link, PageRequest(path=""))
    await first.process.wait()
    assert len(pages_alive()) == 1
    await pages.close()
