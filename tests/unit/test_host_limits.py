"""Shares of one host: the total of all sandboxes fits, whatever the host has."""

from __future__ import annotations

import pytest

from headrace.sandboxes.linux.host_limits import HostLimits, allowed_to_sandboxes, default_live, share

GIB = 1 << 30
SYSTEMD = HostLimits(64 * GIB, 4_194_304, (1 << 63) - 1)
"""systemd raises file-max and pid_max to the most there is."""
CONTAINER_HOST = HostLimits(24 * GIB, 32_768, 2_466_165)
SMALL = HostLimits(4 * GIB, 32_768, 400_000)


@pytest.mark.parametrize("host", [SYSTEMD, CONTAINER_HOST, SMALL], ids=["systemd", "no systemd", "small"])
@pytest.mark.parametrize("sandboxes", [1, 16, 64])
def test_each_sandbox_gets_what_programs_need_on_any_host(host: HostLimits, sandboxes: int) -> None:
    allowed = allowed_to_sandboxes(host, None, None)
    assert allowed.processes < host.processes
    assert allowed.open_files < host.open_files
    assert share(allowed, sandboxes, None, None, counted=True) == (512, 4096)


@pytest.mark.parametrize(("host", "live"), [(SYSTEMD, 64), (CONTAINER_HOST, 64), (SMALL, 48)])
def test_the_default_number_of_sandboxes_fits_with_small_shares(host: HostLimits, live: int) -> None:
    assert default_live(allowed_to_sandboxes(host, None, None)) == live


@pytest.mark.parametrize("sandboxes", [16, 48, 64])
def test_processes_that_nothing_counts_are_not_oversold(sandboxes: int) -> None:
    allowed = allowed_to_sandboxes(CONTAINER_HOST, None, None)
    one = share(allowed, sandboxes, None, None, counted=False)
    assert 64 <= one.processes <= 512
    assert one.of_all(sandboxes)[0] <= allowed.processes


def test_configured_values_are_used_even_if_they_do_not_fit() -> None:
    allowed = allowed_to_sandboxes(CONTAINER_HOST, None, None)
    assert share(allowed, 64, 480, 4093, counted=True) == (480, 4093)
    assert share(allowed, 64, 20_000, 1 << 20, counted=False) == (20_000, 1 << 20)


def test_lower_limits_of_enclosing_groups_apply_to_the_launcher() -> None:
    allowed = allowed_to_sandboxes(SYSTEMD, 8 * GIB, 1000)
    assert allowed.memory_bytes == 7 * GIB
    assert allowed.processes == 750
