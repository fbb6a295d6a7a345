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
@pytest.mark.parametrize("sandboxes", [1, 16, 32])
def test_default_processes_and_descriptors_fit_the_host(host: HostLimits, sandboxes: int) -> None:
    allowed = allowed_to_sandboxes(host, None, None)
    one = share(allowed, sandboxes, None, None)
    processes, open_files = one.of_all(sandboxes)
    assert processes <= allowed.processes < host.processes
    assert open_files <= allowed.open_files < host.open_files
    assert one.processes >= 64
    assert one.open_files >= 64


@pytest.mark.parametrize(("host", "live"), [(SYSTEMD, 64), (CONTAINER_HOST, 64), (SMALL, 48)])
def test_the_default_number_of_sandboxes_fits(host: HostLimits, live: int) -> None:
    allowed = allowed_to_sandboxes(host, None, None)
    assert default_live(allowed) == live
    assert share(allowed, live, None, None).fits(live, allowed)


def test_a_host_with_systemd_limits_gets_full_shares() -> None:
    assert share(allowed_to_sandboxes(SYSTEMD, None, None), 64, None, None) == (512, 4096)


def test_configured_values_are_used_even_if_they_do_not_fit() -> None:
    allowed = allowed_to_sandboxes(CONTAINER_HOST, None, None)
    chosen = share(allowed, 64, 480, 4093)
    assert chosen == (480, 4093)
    assert not chosen.fits(64, allowed)
    assert share(allowed, 64, None, 200).fits(64, allowed)
    assert share(allowed, 64, 200, None).fits(64, allowed)


def test_lower_limits_of_enclosing_groups_apply_to_the_launcher() -> None:
    allowed = allowed_to_sandboxes(SYSTEMD, 8 * GIB, 1000)
    assert allowed.memory_bytes == 7 * GIB
    assert allowed.processes == 750
