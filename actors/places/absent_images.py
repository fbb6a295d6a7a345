"""The check for task images that no sandbox of a run could boot, before anything starts.

Invariant: only images that can never boot are refused. A host that does not answer now may have the image, and a suite
of debootstrap is checked when it is built.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from headrace.actors.errors import ConfigError
from headrace.actors.places.config import SandboxKind
from headrace.sandboxes.errors import ImageUnknown, PermanentSandboxError, ProviderUnreachable
from headrace.sandboxes.images.store import check_reference
from headrace.sandboxes.local.images import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.actors.places.config import SandboxSection
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.remote.provider import RemoteProvider

ANSWER_S: Final = 15.0
"""Timeout for the image list of a host; without an answer, images are checked when they boot."""

logger = logging.getLogger(__name__)


def refuse_absent_images(section: SandboxSection, tasks: Iterable[Task]) -> None:
    """Check the images of all tasks, with calls to hosts of `remote` sandboxes. Raises ConfigError, SecretRefused,
    SpecRefused."""
    named = {task.image: task for task in tasks if task.image != HOST}
    if not named or section.provider is SandboxKind.SIMULATED:
        return
    available: frozenset[str] | None = None
    if section.provider is SandboxKind.REMOTE:
        # In a thread, since the caller may run in an event loop.
        with ThreadPoolExecutor(1) as thread:
            available = thread.submit(lambda: asyncio.run(_available(section))).result()
        if available is None:
            return
    for image, task in named.items():
        try:
            if section.provider is SandboxKind.SUBPROCESS:
                raise ImageUnknown(f"image {image!r}: sandbox.provider subprocess has only `host`")
            if available is None:
                check_reference(image)
            elif image not in available:
                names = ", ".join(sorted(available)[:20]) or "none"
                raise ImageUnknown(f"image {image!r}: no host of sandbox.remote.urls has it, they have {names}")
        except PermanentSandboxError as error:
            raise ConfigError(f"task {task.id}: {error}; correct its image in the task file") from error


async def _available(section: SandboxSection) -> frozenset[str] | None:
    """Return the images of all hosts; None if a host did not answer."""
    from headrace.sandboxes.remote.multi_host import remote_hosts

    hosts = remote_hosts(section.remote.urls, section.remote.key_file)
    answers = await asyncio.gather(*map(_images_of, hosts))
    if None in answers:
        return None
    return frozenset(image for images in answers for image in images or ())


async def _images_of(host: RemoteProvider) -> frozenset[str] | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return frozenset(await host.images())
    except (ProviderUnreachable, TimeoutError) as error:
        logger.warning("host %s did not return its image list: %s", host.url, error or "no answer")
        return None
    finally:
        await host.detach()
