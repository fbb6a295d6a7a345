"""The page of a run: who may see it, what it shows of sound and of damaged runs, and what agents cannot do to it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.errors import ConfigError, RunMissing
from headrace.actors.telemetry.page import app as application
from headrace.actors.telemetry.page.access import HEADERS
from headrace.actors.telemetry.page.app import build_app
from headrace.actors.telemetry.page.server import ObserveOptions, observe
from support.html_elements import Elements
from support.observer_rig import (
    HOSTILE,
    MARKUP,
    TOKEN,
    hostile_run,
    page_of,
    read,
    simulated_run,
    when_known,
    write_configuration,
)

GOLDEN = Path(__file__).parents[1] / "golden"
VIEWS = ("/", "/running", "/slow", "/steps", "/engines", "/pushes")
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("observer") / "run")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    write_configuration(tmp_path / "run")
    return tmp_path / "run"


async def test_without_the_token_nothing_of_the_run_is_told(simulated: Path) -> None:
    async with page_of(simulated) as client:
        for path in (*VIEWS, "/rollout?id=g000000-0", "/data/reward.json", "/events", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Cookie": "a=b"}):
                async with client.get(path, headers=headers) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert await answer.text() == (
                        "this page needs its token: open the URL that `headrace observe` printed, or send "
                        "Authorization: Bearer TOKEN\n"
                    )
            async with client.get(path, headers={"Accept": "text/html"}) as answer:
                text = await answer.text()
                assert answer.status == 401
                assert "This page needs its token" in text
                assert "simulated" not in text


@pytest.mark.parametrize(
    ("method", "path", "size"),
    [("GET", "/static/nothing.js", 0), ("POST", "/login", 1_000_000), ("GET", "/static/..%2f..%2fconfig.json", 0)],
)
async def test_errors_without_the_token_do_not_name_the_run(simulated: Path, method: str, path: str, size: int) -> None:
    headers = {"Accept": "text/html"}
    async with (
        page_of(simulated) as client,
        client.request(method, path, data={"token": "x" * size} if size else None, headers=headers) as answer,
    ):
        assert answer.status in (404, 413)
        assert (await answer.text()).count("\n") == 1


async def test_the_form_sets_a_cookie_that_opens_the_page(simulated: Path) -> None:
    async with page_of(simulated) as client:
        form = {"token": TOKEN, "next": "/slow?step=1"}
        async with client.post("/login", data=form, allow_redirects=False) as answer:
            assert answer.status == 303
            assert answer.headers["Location"] == "/slow?step=1"
            (cookie,) = answer.headers.getall("Set-Cookie")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        async with client.get("/slow") as answer:
            assert answer.status == 200
        async with client.post("/login", data={"token": "wrong"}, allow_redirects=False) as answer:
            assert answer.status == 401
            assert "This token does not open this page" in await answer.text()
            assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\evil.example", "https://evil.example/", "javascript:alert(1)", "/\r\nX: y", "", "é"]
)
async def test_the_form_leads_to_no_other_site(simulated: Path, path: str) -> None:
    async with (
        page_of(simulated) as client,
        client.post("/login", data={"token": TOKEN, "next": path}, allow_redirects=False) as answer,
    ):
        assert answer.status == 303
        assert answer.headers["Location"] == "."


async def test_a_foreign_host_name_gets_nothing(simulated: Path) -> None:
    async with page_of(simulated, hosts=["Trainer.Example"]) as client:
        for host, status in (
            ("evil.example", 421),
            ("localhost.evil.example:80", 421),
            ("", 421),
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:80", 200),
            ("trainer.example:9", 200),
        ):
            async with client.get("/engines", headers=BEARER | {"Host": host}) as answer:
                assert answer.status == status, host
                assert ("Host header" in await answer.text()) is (status == 421)


async def test_every_answer_has_the_headers_of_a_strict_page(simulated: Path) -> None:
    async with page_of(simulated) as client:
        paths = [
            (path, BEARER) for path in (*VIEWS, "/static/page.js", "/data/reward.json", "/nothing", "/rollout?id=x")
        ]
        for path, headers in [*paths, ("/", {}), ("/", {"Host": "evil.example"})]:
            async with client.get(path, headers=headers) as answer:
                for name, value in HEADERS.items():
                    assert answer.headers[name] == value, (path, name)
                assert "unsafe" not in answer.headers["Content-Security-Policy"]
                text = await answer.text()
            assert not re.search(r"<[^>]+\s(on\w+|style)=|<style|<script(?![^>]*\bsrc=)", text), path


async def test_links_are_relative_so_any_prefix_serves(simulated: Path) -> None:
    async with page_of(simulated) as client:
        for path in VIEWS:
            tags = Elements(await read(client, path))
            for tag, name in (("a", "href"), ("link", "href"), ("script", "src"), ("form", "action")):
                for attributes in tags.of(tag):
                    assert not str(attributes.get(name)).startswith(("/", "http")), attributes


async def test_a_run_with_a_slow_host_is_explained(simulated: Path) -> None:
    async with page_of(simulated) as client:
        text = await when_known(client, "/slow")
        assert "host host-1" in Elements(text).text
        assert "drain this host" in Elements(text).text
        ids = re.findall(r'href="rollout\?id=([^"]+)"', text)
        overview = Elements(await read(client, "/"))
        assert "Why rollouts were slow" in overview.text
        assert "host host-1" in overview.text
        rollout = await read(client, f"/rollout?id={ids[0]}")
        assert 'class="waterfall"' in rollout
        assert "Slow:" in Elements(rollout).text
        only = await read(client, "/slow?part=nothing")
        assert "No slow rollout fits the filter" in only


async def test_the_timeline_of_the_page_has_the_segments_of_its_data(tmp_path: Path) -> None:
    async with page_of(await hostile_run(tmp_path)) as client:
        page = Elements(await read(client, "/rollout?id=g000000-0"))
        (attempt,) = json.loads(await read(client, "/rollout.json?id=g000000-0"))["attempts"]
        assert await read(client, "/rollout.json?id=nothing", status=404, accept="*/*")
    assert attempt["began_at_s"] == 1_700_000_000.0
    boot, quick, slow = attempt["segments"]
    assert (boot["name"], boot["begin_at_s"], boot["end_at_s"]) == ("boot", 1_700_000_000.0, 1_700_000_030.0)
    assert (quick["name"], quick["end_at_s"] - quick["begin_at_s"], quick["detail"]) == ("tool.quick", 0.25, "ls")
    assert slow["begin_at_s"] == quick["begin_at_s"]
    drawn = [box for box in page.of("rect") if "data-name" in box]
    assert [(box["data-name"], box["data-turn"]) for box in drawn] == [("boot", "0"), ("tool.quick", "1"), (SLOW, "1")]
    begun = [attempt["began_at_s"] + float(box["data-begin"] or "") for box in drawn]
    assert begun == [each["begin_at_s"] for each in attempt["segments"]]
    tools = [float(box["y"] or "") for box in drawn[1:]]
    assert tools[1] > tools[0], "calls that overlap are beside each other"


SLOW = f"tool.{MARKUP}"


async def test_steps_pushes_and_series_are_shown(simulated: Path) -> None:
    async with page_of(simulated) as client:
        assert Elements(await read(client, "/steps")).text.count("UTC") == 0
        assert 'href="slow?step=8"' in await read(client, "/steps")
        assert "1.8" in Elements(await read(client, "/pushes")).text
        for series in ("reward", "learner", "staleness", "load"):
            document = json.loads(await read(client, f"/data/{series}.json"))
            assert all(len(one["y"]) == len(document["x"]) for one in document["series"]), series
        assert json.loads(await read(client, "/data/reward.json"))["x"][-1] == 8
        assert "not found" in await read(client, "/data/nothing.json", status=404, accept="*/*")


async def test_a_rollout_is_named_by_a_beginning_that_only_it_has(simulated: Path) -> None:
    async with page_of(simulated) as client:
        text = await read(client, "/rollout?id=g000003-5")
        assert "<h1>Rollout <bdi>g000003-5</bdi></h1>" in text
        assert "numbers of tokens" not in text
        for asked, line in (
            ("g999", "rollout g999: the run has none of this id"),
            ("g00000", "rollouts begin with this (g000000-0, g000000-1, g000000-2, ...); name one of them"),
            ("", "name a rollout: its id, or the beginning of one"),
            ("%00%ED%A0%80%25_", "the run has none of this id"),
            ("%27%20OR%201=1", "the run has none of this id"),
        ):
            assert line in await read(client, f"/rollout?id={asked}", status=404, accept="*/*")
            assert line.split(":")[-1] in Elements(await read(client, f"/rollout?id={asked}", status=404)).text


async def test_what_agents_write_is_text_and_nothing_else(tmp_path: Path) -> None:
    run = await hostile_run(tmp_path)
    async with page_of(run) as client:
        for path in ("/rollout?id=g000000-0", "/slow", "/running", "/"):
            text = await read(client, path)
            tags = Elements(text)
            assert not list(tags.of("img"))
            assert {attributes.get("src") for attributes in tags.of("script")} <= {
                "static/page.js",
                "static/series.js",
                "static/uPlot.iife.min.js",
            }
            assert not set("\x00\x1b\u202e\u200b") & set(text)
            assert "49" not in re.findall(r"\{\{ 7|49(?= \}\})", text)
        rollout = Elements(await read(client, "/rollout?id=g000000-0")).text
        assert MARKUP in rollout
        assert "\\u202eright to left" in rollout
        assert "\\x00\\x1b[2J" in rollout
        assert "{{ 7 * 7 }}" in rollout
        assert rollout.count("worker-0") == 1


async def test_turns_have_versions_and_masks(tmp_path: Path) -> None:
    run = await hostile_run(tmp_path)
    async with page_of(run) as client:
        text = await read(client, "/rollout?id=g000000-0")
    tags = Elements(text)
    assert [item["class"] for item in tags.of("li") if item.get("class") in ("given", "trained", "masked")] == [
        "given",
        "trained",
        "given",
        "trained",
    ]
    assert "turn 2 version 1.0, trained, mean log-probability -0.50" in " ".join(tags.text.split())


async def test_ten_megabytes_of_text_are_cut_with_a_note(tmp_path: Path) -> None:
    run = await hostile_run(tmp_path)
    long = "\x00<b>" + "x" * 10_000_000
    event = {"time": 1.0, "level": "ERROR", "actor": "a", "rollout": "g000000-0", "message": long}
    (run / "logs" / "a.jsonl").write_text(json.dumps(event) + "\n")
    async with page_of(run) as client:
        text = await read(client, "/rollout?id=g000000-0")
    assert len(text) < 1_000_000
    assert "more characters are not shown" in text
    assert "<b>x" not in text


async def test_the_answers_of_an_evaluation_are_shown_with_the_evaluators_log(simulated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "ledger", run)
    import sqlite3

    with sqlite3.connect(run / "ledger.db") as database:
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(evaluations)")]
        values: dict[str, Any] = dict.fromkeys(columns) | {
            "rollout_id": "base/t/0",
            "attempt": 1,
            "task_id": "t",
            "tag": "base",
            "version": "1.0",
            "cause": "failed",
            "solved": 0,
            "detail": "",
            "sampled": "[]",
            "recorded_at_s": 5.0,
            "host": "",
            "trace_id": "",
        }
        database.execute(
            f"INSERT INTO evaluations ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()]
        )
    database.close()
    folder = run / "evaluations" / "base" / "rollouts" / "t-0"
    folder.mkdir(parents=True)
    (run / "evaluations" / "base" / "results.jsonl").write_text(
        json.dumps({"rollout_id": "base/t/0", "folder": "../../base/rollouts/t-0"}) + "\n"
    )
    (folder / "evaluator.log").write_text(f"failed: {HOSTILE}")
    turn = json.dumps({"prompt": "p" * 10_000_000, "answer": "lone \ud800 surrogate"})
    (folder / "conversation.jsonl").write_text(f"{turn}\n{{cut")
    async with page_of(run) as client:
        text = await read(client, "/rollout?id=base/t/0")
    assert f"failed: {MARKUP}" in Elements(text).text
    assert "lone \\ud800 surrogate" in text
    assert "9\u202f980\u202f000 more characters are not shown" in text
    assert "This line of conversation.jsonl is cut or damaged" in text


async def test_an_empty_run_says_so_in_every_view(empty: Path) -> None:
    async with page_of(empty) as client:
        for path in VIEWS:
            assert "Nothing has been recorded yet" in await read(client, path)
        assert "name the directory of a run" in await read(client, "/rollout?id=g0", status=503, accept="*/*")


async def test_a_run_without_metrics_is_shown() -> None:
    async with page_of(GOLDEN / "ledger") as client:
        for path in VIEWS:
            await read(client, path)
        text = await when_known(client, "/slow")
        assert "no metrics.jsonl: evaluations, pushes and pacing are not compared" in Elements(text).text
        for rollout in ("g000000-0", "g000001-1"):
            assert "Attempts" in await read(client, f"/rollout?id={rollout}")


async def test_a_ledger_of_another_schema_is_one_clear_line(simulated: Path, tmp_path: Path) -> None:
    import sqlite3

    run = tmp_path / "run"
    shutil.copytree(simulated, run)
    with sqlite3.connect(run / "ledger.db") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    async with page_of(run) as client:
        for path in ("/", "/steps", "/slow"):
            text = Elements(await read(client, path)).text
            assert "The ledger cannot be read" in text
            assert "unreleased version" in text
        line = await read(client, "/running", status=503, accept="*/*")
        assert line.count("\n") == 1
        assert "unreleased version" in line


async def test_damaged_files_leave_the_rest_of_a_view(simulated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(simulated, run)
    for name in ("config.json", "summary.json", "sessions.jsonl"):
        (run / name).write_bytes(b"\xff{torn")
    (run / "engines").mkdir()
    (run / "engines" / "members.json").write_bytes(b"[1")
    (run / "running").mkdir()
    (run / "running" / "w.json").write_bytes(b"{}")
    lines = [
        b"\xff\x00 not json",
        b'{"kind": "step", "time_s": "soon"}',
        b'{"kind": "step", "time_s": 5, "step": "nine", "reward": [1], "staleness": {"x": 1}, "version": 7}',
        b'{"kind": "push", "time_s": 5, "seconds": 3, "updated": 7, "total_s": null}',
        b'{"kind": "stations", "time_s": 5, "seconds": 1, "stations": {"boot": 3}}',
        b'{"kind": "evaluation", "time_s": 1e308, "tag": null, "success": "all"}',
        b'{"kind": "mismatch_alarm", "time_s": 5}',
        b'{"kind": "stall", "time_s": 5}',
        b'{"kind": "step", "time_s": 5, "st',
    ]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(lines))
    async with page_of(run) as client:
        for path in (*VIEWS, "/data/reward.json", "/data/learner.json", "/data/load.json", "/data/staleness.json"):
            await read(client, path)
        assert 'href="slow?step=8"' in await read(client, "/steps")


async def test_the_overview_names_the_families_that_have_collapsed(simulated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(simulated, run)
    step = {"kind": "step", "time_s": 5.0, "step": 9, "collapsed": [f"{MARKUP} collapsed at step 9: all groups"]}
    async with page_of(run) as client:
        assert "collapsed at step" not in await read(client, "/")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step) + "\n")
    async with page_of(run) as client:
        assert f"{MARKUP} collapsed at step 9: all groups." in Elements(await read(client, "/")).text


async def test_changes_come_as_one_stream_and_streams_are_bounded(simulated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(simulated, run)
    async with page_of(run) as client:
        streams = [await client.get("/events", headers=BEARER) for _ in range(application.MAX_STREAMS)]
        async with client.get("/events", headers=BEARER) as refused:
            assert refused.status == 503
            assert f"{application.MAX_STREAMS} pages follow this run already" in await refused.text()
        assert all(stream.headers["Content-Type"] == "text/event-stream" for stream in streams)
        assert (await streams[0].content.readline()).startswith(b"id: ")
        assert await streams[0].content.readline() == b"\n"
        assert await streams[0].content.readline() == b"retry: 1000\n"
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "step", "time_s": 5, "step": 9}\n')
        async with asyncio.timeout(30):
            while (line := await streams[0].content.readline()) != b"event: changed\n":
                assert line
        for stream in streams:
            stream.close()
        async with asyncio.timeout(30):
            while (again := await client.get("/events", headers=BEARER)).status == 503:
                again.close()
        again.close()


async def test_only_a_run_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(RunMissing, match=r"not a run directory \(config\.json is missing\)"):
        build_app(tmp_path, TOKEN)


async def test_other_addresses_than_loopback_need_a_key(empty: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: other hosts could read the run"):
        await observe(empty, ObserveOptions(host="0.0.0.0"), print)
    key = tmp_path / "key"
    key.write_text("sixteen characters or more")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="--key-file"):
        await observe(empty, ObserveOptions(host="0.0.0.0", key_file=key), print)


async def test_the_url_has_the_token_and_a_port_in_use_is_one_line(empty: Path, tmp_path: Path) -> None:
    announced: asyncio.Queue[str] = asyncio.Queue()
    options = ObserveOptions(address_file=tmp_path / "address.json")
    serving = asyncio.create_task(observe(empty, options, announced.put_nowait))
    try:
        url, _, token = (await announced.get()).partition("#token=")
        document = json.loads((tmp_path / "address.json").read_text())
        assert document["url"] == url
        assert document["token"] == token
        assert len(token) > 40
        assert (tmp_path / "address.json").stat().st_mode & 0o777 == 0o600
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"--host 127\.0\.0\.1 --port {port}: .*; choose another port or 0"):
            await observe(empty, ObserveOptions(port=port), print)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
