"""Parts of the E2B server and provider: paths, keys, images, entries, errors."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import e2b
import httpx
import pytest

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.e2b.errors import SdkOperation, classify
from headrace.sandboxes.errors import (
    BootFailed,
    BootTimeout,
    CapacityExceeded,
    ExecTimeout,
    ImageRefused,
    ImageUnknown,
    LauncherGone,
    OutOfDisk,
    ProviderUnreachable,
    RateLimited,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
    Unsupported,
)
from headrace.serve.sandbox_servers.e2b_state.entries import Account, parse_entries
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, RpcError, api_error
from headrace.serve.sandbox_servers.e2b_state.images import BootQueue, load_images
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("", "/home/a"),
        ("x", "/home/a/x"),
        ("./x/../y", "/home/a/y"),
        ("../../../etc", "/etc"),
        ("~", "/home/a"),
        ("~/x", "/home/a/x"),
        ("/x/../y", "/x/../y"),
        ("~b/x", None),
        ("a\0b", None),
        ("/" + "x" * 5000, None),
    ],
)
def test_paths_are_resolved_as_in_envd(path: str, wanted: str | None) -> None:
    account = Account(name="a", home="/home/a", folder="/home/a")
    if wanted is None:
        with pytest.raises(RpcError):
            account.resolve(path)
    else:
        assert account.resolve(path) == wanted


def test_keys_can_be_plain_or_digests(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret-b").hexdigest()
    write_private(tmp_path / "keys", f"\n# people\na:secret-a\nb:{digest}:5\n".encode())
    keys = load_keys(tmp_path / "keys")
    found = [keys.identify(key) for key in ("secret-a", "secret-b", digest, "", "secret-")]
    assert [owner and (owner.name, owner.max_sandboxes) for owner in found] == [("a", None), ("b", 5), None, None, None]


def test_images_come_only_from_the_map(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"a": "host", "acme/swe:1": "/images/swe.tar"}')
    images = load_images(tmp_path / "map.json", "acme")
    assert images.resolve("base", {}, {}) == "host"
    assert images.resolve("base", {"acme/image": "acme/swe:1"}, {}) == "/images/swe.tar"
    assert images.resolve("base", {"acme": "a", "acme/image": "b"}, {}) == "host"
    assert images.resolve("s1", {}, {"s1": "snapshot-1"}) == "snapshot-1"
    for template in ("host", "/etc", "b"):
        with pytest.raises(ImageUnknown):
            images.resolve(template, {}, {})
    for text in ("[1]", '{"a": 1}', "{", '{"a": ""}'):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(SpecRefused):
            load_images(tmp_path / "map.json", "")


def test_entries_with_unusual_names_are_parsed() -> None:
    record = b"7\0l\0d\0005\x00777\0lrwxrwxrwx\0root\0root\x001700000000.25\0to\nthere\0/a b\n\xff/c\0"
    [entry] = parse_entries(record)
    document = entry.to_json()
    assert (document["name"], document["type"], document["symlinkTarget"]) == ("c", "FILE_TYPE_DIRECTORY", "to\nthere")
    assert (document["size"], document["mode"], document["modifiedTime"]) == ("5", 0o777, "2023-11-14T22:13:20.250000Z")
    assert len(parse_entries(record * 3)) == 3
    assert parse_entries(b"") == []


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (CapacityExceeded("x", 2.5), 429, None),
        (RateLimited("x"), 429, None),
        (OutOfDisk("x"), 429, None),
        (ImageUnknown("x"), 400, None),
        (ImageRefused("x"), 400, None),
        (SpecRefused("x"), 400, None),
        (Unsupported("x"), 501, None),
        (SecretRefused("x"), 403, None),
        (SandboxGone("x"), 404, None),
        (BootTimeout("x"), 504, "true"),
        (BootFailed("x"), 503, "true"),
        (LauncherGone("x"), 503, "true"),
        (ProviderUnreachable("x"), 503, "false"),
        (SandboxError("x"), 500, None),
    ],
)
def test_every_error_maps_to_a_response(error: SandboxError, status: int, retry: str | None) -> None:
    answer = api_error(error, repeatable=False).response()
    assert (answer.status, answer.headers.get("Should-Retry")) == (status, retry)
    assert (answer.headers.get("Retry-After") is not None) == (status == 429)
    if isinstance(error, CapacityExceeded) and error.retry_after_s == 2.5:
        assert answer.headers["Retry-After"] == "3"


def test_an_api_error_is_an_object_with_code_and_message() -> None:
    assert ApiError(418, "tea", error_code="pot").response().text == (
        '{"code": 418, "message": "tea", "error_code": "pot"}'
    )


@pytest.mark.parametrize(
    ("error", "step", "kind"),
    [
        (e2b.RateLimitException("429: slow"), SdkOperation.CREATE, RateLimited),
        (e2b.AuthenticationException("401"), SdkOperation.CREATE, SecretRefused),
        (e2b.NotFoundException("404"), SdkOperation.CREATE, ImageUnknown),
        (e2b.NotFoundException("404"), SdkOperation.SANDBOX, SandboxGone),
        (e2b.NotFoundException("404"), SdkOperation.FILE, SandboxFileError),
        (e2b.InvalidArgumentException("bad"), SdkOperation.SANDBOX, SpecRefused),
        (e2b.NotEnoughSpaceException("full"), SdkOperation.FILE, SandboxFileError),
        (e2b.TimeoutException("timed out"), SdkOperation.CREATE, ProviderUnreachable),
        (e2b.TimeoutException("deadline"), SdkOperation.SANDBOX, ExecTimeout),
        (e2b.TimeoutException("The sandbox was not found"), SdkOperation.SANDBOX, SandboxGone),
        (e2b.SandboxException("502: gateway"), SdkOperation.CREATE, ProviderUnreachable),
        (e2b.SandboxException("503: gateway"), SdkOperation.SANDBOX, ProviderUnreachable),
        (e2b.SandboxException("400: template 'x' unknown"), SdkOperation.CREATE, ImageUnknown),
        (e2b.SandboxException("400: timeout"), SdkOperation.CREATE, SpecRefused),
        (e2b.SandboxException("403: no"), SdkOperation.CREATE, SecretRefused),
        (httpx.ConnectError("refused"), SdkOperation.CREATE, ProviderUnreachable),
        (httpx.ReadTimeout("slow"), SdkOperation.FILE, ProviderUnreachable),
    ],
)
def test_sdk_errors_map_to_typed_errors(error: Exception, step: SdkOperation, kind: type[SandboxError]) -> None:
    found = classify(error, step)
    assert type(found) is kind


async def test_a_full_boot_queue_returns_a_retry_delay() -> None:
    queue = BootQueue(boots=1, max_waiting=1)
    order: list[str] = []

    async def wait() -> None:
        async with queue:
            order.append("second")

    async with asyncio.TaskGroup() as group, queue:
        group.create_task(wait())
        await asyncio.sleep(0)
        with pytest.raises(CapacityExceeded) as caught:
            await queue.__aenter__()
        order.append("first")
    assert (order, caught.value.retry_after_s) == (["first", "second"], 1.0)
    async with queue:
        order.append("third")


def test_an_unknown_exception_is_not_converted() -> None:
    assert classify(KeyError("x"), SdkOperation.CREATE) is None
