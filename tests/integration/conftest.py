"""Fixtures shared by the integration tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from headrace.sandboxes.local.provider import LocalProvider

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[LocalProvider]:
    """Provider of local sandboxes for all tests of a module, which run in the module's event loop."""
    async with LocalProvider() as provider:
        yield provider
