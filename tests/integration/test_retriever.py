"""The retriever server, and retrievers that outlive the run that started them."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.services import started as starting
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.corpus import PassageIndex
from headrace.actors.services.local_server import ListenOptions
from headrace.actors.services.retriever_server import RetrieverServer, serve_retriever
from headrace.actors.services.started import (
    StartedService,
    answers,
    read_started,
    recorded_addresses,
    resolved,
    running_services,
    stop_services,
)
from headrace.sandboxes.host.key_files import make_key, read_key
from support.corpora import write_corpus

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "search-r1" / "example_corpus.jsonl"
HEADRACE = (sys.executable, "-c", "from headrace.actors.cli.app import main; main()")
START_S = 60.0
GOOD = '{"id": "1", "contents": "a"}\n'


@contextmanager
def served(corpus: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command for the block, and yield its process and its URL."""
    command = (*HEADRACE, "serve", "retriever", "--corpus", str(corpus), *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def posted(url: str, document: Any, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=document, headers=headers) as response:
        return response.status, await response.json()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", 50)


@asynccontextmanager
async def running(corpus: Path, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Start a retriever as a run does, and stop it after the block in any case."""
    try:
        async with running_services({"wiki": ServiceConfig(corpus=corpus)}, folder) as urls:
            yield urls
    finally:
        await stop_services(folder)


async def test_the_server_keeps_the_contract(corpus: Path, tmp_path: Path) -> None:
    with served(corpus, "--json", str(tmp_path / "address.json")) as (process, url):
        body = {"queries": ["town7", "town9 castle"], "topk": 2}
        status, plain = await posted(f"{url}/retrieve", body)
        assert status == 200
        assert [[list(passage) for passage in row] for row in plain["result"]] == [[["contents"]] * 2] * 2
        assert plain["result"][0][0]["contents"].startswith('"Town 7"\n')
        _, scored = await posted(f"{url}/retrieve", body | {"return_scores": True})
        assert [[entry["document"] for entry in row] for row in scored["result"]] == plain["result"]
        assert scored["result"][0][0]["score"] > scored["result"][0][1]["score"]
        status, refusal = await posted(f"{url}/retrieve", {"queries": ["x"], "topk": 101})
        assert (status, refusal) == (400, {"error": "topk: must be a whole number from 1 to 100"})
        address = read_started(tmp_path / "address.json")
        assert address is not None
        assert (address.url, address.pid) == (url, process.pid)
        assert address.process() is not None
        assert await answers(address)


async def test_the_example_corpus_is_searched_like_any_other() -> None:
    if not DATA.exists():
        pytest.skip("the example corpus is not on this machine")
    titles = [json.loads(line)["contents"].splitlines()[0] for line in DATA.read_text().splitlines()]
    with served(DATA) as (_, url):
        configs = {"wiki": ServiceConfig(url=url)}
        async with ServiceClients(configs) as clients:
            found = await clients.retriever("wiki").retrieve(titles, top_k=3)
    assert [row[0].contents.splitlines()[0] for row in found] == titles
    assert {len(row) for row in found} == {3}


async def test_a_signal_ends_the_server_at_once(corpus: Path) -> None:
    with served(corpus) as (process, url):
        async with aiohttp.ClientSession() as session:
            # A connection that stays open must not hold it up.
            async with session.get(f"{url}/health") as response:
                assert (await response.json())["passages"] == 50
            process.terminate()
            assert await asyncio.to_thread(process.wait, START_S) == 0


async def test_the_server_ends_by_itself_when_idle_and_not_while_it_is_used(corpus: Path) -> None:
    with served(corpus, "--idle-s", "1.5") as (process, url):
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < 2.0:
            await posted(f"{url}/retrieve", {"queries": ["castle"]})
            assert process.poll() is None, "requests keep it running"
            await asyncio.sleep(0.1)
        assert await asyncio.to_thread(process.wait, START_S) == 0


@pytest.mark.parametrize(
    ("rows", "host", "says"),
    [
        (None, "127.0.0.1", "--corpus {corpus}: No such file or directory"),
        (GOOD + "{}\n", "127.0.0.1", "--corpus {corpus}, line 2: not an object with id and contents"),
        (GOOD, "203.0.113.1", "--host 203.0.113.1 --port 0: "),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, rows: str | None, host: str, says: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    if rows is not None:
        corpus.write_text(rows)
    make_key(tmp_path / "key")
    with pytest.raises(ConfigError) as refused:
        serve_retriever(corpus, ListenOptions(host=host, key_file=tmp_path / "key"), str)
    assert str(refused.value).startswith(says.format(corpus=corpus))


def test_other_hosts_need_a_key(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: other hosts could use the service; name a file"):
        serve_retriever(corpus, ListenOptions(host="0.0.0.0"), str)


async def test_a_server_with_a_key_refuses_requests_without_it(corpus: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = read_key(tmp_path / "key", "key")
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = RetrieverServer(PassageIndex(corpus), key)
    serving = asyncio.create_task(server.serve(ListenOptions(), ready.set_result))
    url, body = await ready, {"queries": ["castle"]}
    assert (await posted(f"{url}/retrieve", body))[0] == 401
    assert (await posted(f"{url}/retrieve", body, Authorization="Bearer wrong"))[0] == 401
    assert (await posted(f"{url}/retrieve", body, Authorization=f"Bearer {key}"))[0] == 200
    configs = {"wiki": ServiceConfig(url=url, key_file=tmp_path / "key")}
    async with ServiceClients(configs) as clients:
        assert await clients.retriever("wiki").retrieve(["castle"], top_k=1)
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_run_starts_a_retriever_once_and_stops_it_when_it_has_finished(corpus: Path, tmp_path: Path) -> None:
    folder, configs = tmp_path / "services", {"wiki": ServiceConfig(corpus=corpus)}
    async with running(corpus, folder) as urls:
        async with ServiceClients(resolved(configs, urls)) as clients:
            [[passage]] = await clients.retriever("wiki").retrieve(["town3"], top_k=1)
        assert passage.contents.startswith('"Town 3"')
        first = read_started(folder / "wiki.json")
        assert first is not None
        async with running_services(configs, folder) as again:
            assert again == urls
            assert read_started(folder / "wiki.json") == first
        assert first.process() is not None, "leaving the block stops nothing"
    assert first.process() is None
    assert not (folder / "wiki.json").exists()
    await stop_services(folder)


async def test_another_corpus_gets_another_retriever(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "services"
    async with running(corpus, folder):
        first = read_started(folder / "wiki.json")
        assert first is not None
        write_corpus(corpus, 60)
        async with running_services({"wiki": ServiceConfig(corpus=corpus)}, folder):
            second = read_started(folder / "wiki.json")
            assert second is not None
            assert second.pid != first.pid
            assert first.process() is None


async def another_than(first: StartedService, path: Path) -> StartedService:
    """Wait until the file names another process."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        found = read_started(path)
        if found is not None and found.pid != first.pid:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("it was not started again")


async def test_a_retriever_that_has_died_is_started_again_at_its_address(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LOOK_S", 0.05)
    folder = tmp_path / "services"
    async with running(corpus, folder) as urls:
        first = read_started(folder / "wiki.json")
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        second = await another_than(first, folder / "wiki.json")
        assert second.url == urls["wiki"]
        assert await answers(second)


STARTER = """
import asyncio, sys
from pathlib import Path
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.started import running_services

async def main():
    async with running_services({"wiki": ServiceConfig(corpus=Path(sys.argv[1]))}, Path(sys.argv[2])) as urls:
        print(urls["wiki"], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def started_by_another(corpus: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that has started a retriever, and the retriever's URL. Wait for the process after the block."""
    command = (sys.executable, "-c", STARTER, str(corpus), str(folder))
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=null, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        yield driver, driver.stdout.readline().strip()


async def test_a_killed_run_leaves_its_retriever_to_the_next_one(corpus: Path, tmp_path: Path) -> None:
    """F10: SIGKILL of the driver, and of its whole process group, leaves the retriever untouched."""
    folder = tmp_path / "services"
    try:
        with started_by_another(corpus, folder) as (driver, url):
            os.killpg(driver.pid, signal.SIGKILL)
        first = read_started(folder / "wiki.json")
        assert first is not None
        assert await answers(first)
        async with running_services({"wiki": ServiceConfig(corpus=corpus)}, folder) as urls:
            assert urls == {"wiki": url}
            assert read_started(folder / "wiki.json") == first
    finally:
        await stop_services(folder)


def test_a_killed_run_leaves_no_retriever_that_still_indexes(tmp_path: Path) -> None:
    """The corpus is a pipe, so that the retriever reads until the test closes it."""
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "services"
    os.mkfifo(corpus)
    command = (sys.executable, "-c", STARTER, str(corpus), str(folder))
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver,
        # Opens only when the retriever reads.
        corpus.open("w") as rows,
    ):
        rows.write(GOOD)
        rows.flush()
        [retriever] = psutil.Process(driver.pid).children()
        handle = os.pidfd_open(retriever.pid)
        driver.kill()
        assert select.select([handle], [], [], START_S)[0], "the retriever still runs"
        os.close(handle)
    assert recorded_addresses(folder) == []


async def test_an_interrupted_run_leaves_its_retriever_running(corpus: Path, tmp_path: Path) -> None:
    """F10: closing the event loop must not kill the process either."""
    folder = tmp_path / "services"
    try:
        with started_by_another(corpus, folder) as (driver, _):
            driver.send_signal(signal.SIGINT)
        started = read_started(folder / "wiki.json")
        assert started is not None
        assert await answers(started)
    finally:
        await stop_services(folder)


def test_a_process_that_has_got_the_id_of_a_retriever_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as bystander:
        began_s = psutil.Process(bystander.pid).create_time()
        document = {"url": "http://127.0.0.1:9", "pid": bystander.pid, "sha256": "0"}
        (tmp_path / "wiki.json").write_text(json.dumps(document | {"started_s": began_s - 60.0}))
        asyncio.run(stop_services(tmp_path))
        assert bystander.poll() is None
        assert not (tmp_path / "wiki.json").exists()
        bystander.kill()


async def test_a_start_that_is_refused_leaves_nothing_behind(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "services"
    silent = ServiceConfig(url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="service web does not answer"):
        async with running_services({"wiki": ServiceConfig(corpus=corpus), "web": silent}, folder):
            pass
    assert recorded_addresses(folder) == []
    broken = tmp_path / "broken.jsonl"
    write_corpus(broken, 0)
    with pytest.raises(ConfigError, match=r"services\.wiki\.corpus: its retriever did not start: .*has no passage"):
        async with running_services({"wiki": ServiceConfig(corpus=broken)}, folder):
            pass
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]


def test_a_search_in_ten_thousand_passages_is_quick(tmp_path: Path) -> None:
    """A loose bound: less than 1 ms is usual, and 10 ms is the aim."""
    index = PassageIndex(write_corpus(tmp_path / "corpus.jsonl", 10_000))
    begun_s = time.perf_counter()
    for number in range(100):
        assert index.search([f"which castle is in town{number}"], 3)[0][0].contents == index.passages[number]
    assert time.perf_counter() - begun_s < 100 * 0.05
