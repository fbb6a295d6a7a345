"""Pure parts of the exec server and its client: error documents, output windows, repeated requests, bundles."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sandboxes import errors
from headrace.sandboxes.base import Output, Stream
from headrace.sandboxes.errors import CapacityExceeded, PermanentSandboxError, SandboxError, SpecRefused
from headrace.sandboxes.remote.error_documents import from_document, status_of, to_document
from headrace.sandboxes.remote.file_bundle import pack_files, unpack_files
from headrace.sandboxes.remote.http import NotConnected
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.exec.dropin import MAX_STORED, IdempotentRequests
from headrace.serve.sandbox_servers.exec.processes import WINDOW_BYTES, OutputWindow

ABSTRACT = (SandboxError, errors.TransientSandboxError, PermanentSandboxError)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SandboxError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_document_preserves_the_kind(kind: type[SandboxError]) -> None:
    error = kind("what went wrong")
    back = from_document(json.loads(json.dumps(to_document(error))))
    assert back.transient is error.transient
    if kind not in ABSTRACT:
        assert (type(back), str(back)) == (kind, str(error))
    assert 400 <= status_of(error) < 600


def test_a_client_side_error_is_encoded_as_the_base_class() -> None:
    assert type(from_document(to_document(NotConnected("x")))) is errors.ProviderUnreachable


@given(st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.booleans()))
def test_a_retry_delay_is_preserved_within_bounds(wait_s: object) -> None:
    back = from_document({"error": "RateLimited", "message": "", "retry_after_s": wait_s})
    assert isinstance(back, CapacityExceeded)
    assert 0 <= back.retry_after_s <= 3600


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), st.binary()))
def test_a_bundle_contains_its_files(files: dict[str, bytes]) -> None:
    assert unpack_files(pack_files(files)) == files


@given(st.binary())
def test_an_arbitrary_body_is_refused_or_parsed_completely(body: bytes) -> None:
    try:
        files = unpack_files(body)
    except (SpecRefused, errors.SandboxFileError):
        return
    assert sum(map(len, files.values())) <= len(body)


async def test_a_window_buffers_exactly_the_unacknowledged_pieces() -> None:
    window, piece = OutputWindow(), Output(stream=Stream.STDOUT, data=b"x" * (WINDOW_BYTES // 2))
    await window.append(piece)
    await window.append(piece)
    third = asyncio.create_task(window.append(piece))
    assert await window.after(0, 1) == ([piece, piece], False)
    assert await window.after(0, 1) == ([piece, piece], False)
    assert not third.done()
    assert await window.after(1, 1) == ([piece], False)
    await third
    await window.close()
    assert await window.after(1, 1) == ([piece, piece], True)
    assert await window.after(3, 1) == ([], True)
    for number in (0, 4):
        with pytest.raises(SpecRefused):
            await window.after(number, 1)
    assert await OutputWindow().after(0, 0.01) == ([], False)


async def test_equal_requests_run_once_until_the_result_is_delivered() -> None:
    runs = 0
    go = asyncio.Event()

    async def work() -> int:
        nonlocal runs
        runs += 1
        number = runs
        await go.wait()
        if number == 4:
            raise PermanentSandboxError("fourth")
        return number

    async with ServerTasks() as tasks:
        requests = IdempotentRequests(tasks)
        asked = [asyncio.create_task(requests.run("a", work, named=False)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        go.set()
        assert await requests.run("a", work, named=False) == 1
        assert await requests.run("a", work, named=False) == 2
        assert [await requests.run("b", work, named=True) for _ in range(3)] == [3, 3, 3]
        with pytest.raises(PermanentSandboxError):
            await requests.run("c", work, named=True)
        assert await requests.run("c", work, named=True) == 5
        for number in range(MAX_STORED):
            await requests.run(f"other-{number}", work, named=True)
        assert await requests.run("b", work, named=True) > 5
