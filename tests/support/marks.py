"""Marks that several test files share."""

from __future__ import annotations

from typing import Final

import pytest

from support import hosts

NEEDS_HOSTS: Final = (
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
    # A machine has one network of hosts at a time.
    pytest.mark.xdist_group("hosts"),
)
"""Of tests on hosts of namespaces."""
