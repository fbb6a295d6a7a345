"""Copies of frozen data into a clean sandbox: what the agent left is the agent's, and a broken sandbox is not."""

from __future__ import annotations

import pytest

from headrace.sandboxes.base import FrozenMount, Sandbox, SandboxSpec
from headrace.sandboxes.e2b.frozen_data import copy_frozen
from headrace.sandboxes.errors import FrozenPathRefused, SandboxFileError
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
LEFT_BYTES = 12 << 20


async def booted(provider: LocalProvider, disk_bytes: int) -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(disk_bytes=disk_bytes)))


async def copy(source: Sandbox, target: Sandbox) -> None:
    mount = FrozenMount(source=source.id, path="/left", target="/frozen/left")
    await copy_frozen(source, target, mount, max_bytes=64 << 20)


async def test_data_that_does_not_fit_where_an_empty_archive_does_is_refused(provider: LocalProvider) -> None:
    source = await booted(provider, 64 << 20)
    await source.write("/left/file", bytes(LEFT_BYTES))
    whole, small = await booted(provider, 64 << 20), await booted(provider, 20 << 20)
    await copy(source, whole)
    assert len(await whole.read("/frozen/left/file", max_bytes=64 << 20)) == LEFT_BYTES
    with pytest.raises(FrozenPathRefused, match=r"cannot be unpacked: tar: "):
        await copy(source, small)


async def test_a_sandbox_that_unpacks_nothing_is_not_the_agents_fault(provider: LocalProvider) -> None:
    source, target = await booted(provider, 64 << 20), await booted(provider, 64 << 20)
    await source.write("/left/file", b"1")
    await target.write("/frozen", b"a file where the folder must be")
    with pytest.raises(SandboxFileError, match="frozen data cannot be unpacked") as raised:
        await copy(source, target)
    assert not isinstance(raised.value, FrozenPathRefused)
