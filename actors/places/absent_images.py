"""Images that a run's tasks name and no sandbox of it can ever boot: refused before anything starts.

Invariant: only what cannot come to be is refused. A host that does not answer now may have the image; a suite of
debootstrap is looked for when it is built.
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
    from collections.abc import Callable, Iterable

    from headrace.actors.places.config import SandboxSection
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.remote.provider import RemoteProvider

ANSWER_S: Final = 15.0
"""A server that says for so long not which images it has is asked again when the run boots them."""

logger = logging.getLogger(__name__)


def refuse_absent_images(section: SandboxSection, tasks: Iterable[Task]) -> None:
    """Asks other hosts where sandboxes are `remote`. Raises ConfigError, SecretRefused, SpecRefused."""
    named = {task.image: task for task in tasks if task.image != HOST}
    if not named or section.provider is SandboxKind.SIMULATED:
        return
    check = _check_of(section)
    for image, task in named.items():
        try:
            check(image)
        except PermanentSandboxError as error:
            raise ConfigError(f"task {task.id}: {error}; mend its image in the task file") from error


def _check_of(section: SandboxSection) -> Callable[[str], None]:
    """Raises for an image that cannot be booted."""
    if section.provider is SandboxKind.SUBPROCESS:
        return lambda image: _require(image, frozenset(), "sandbox.provider subprocess has only `host`")
    if section.provider is not SandboxKind.REMOTE:
        return check_reference
    # Callers may run in an event loop.
    with ThreadPoolExecutor(1) as thread:
        lent = thread.submit(lambda: asyncio.run(_lent(section))).result()
    if lent is None:
        return lambda _: None
    return lambda image: _require(image, lent, f"no host of sandbox.remote.urls has it, they have {_some_of(lent)}")


def _require(image: str, known: frozenset[str], why: str) -> None:
    if image not in known:
        raise ImageUnknown(f"image {image!r}: {why}")


def _some_of(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"


async def _lent(section: SandboxSection) -> frozenset[str] | None:
    """What any of the hosts boots; None when one of them did not say."""
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
        logger.warning("host %s does not say which images it has: %s", host.url, error or "no answer")
        return None
    finally:
        await host.detach()
