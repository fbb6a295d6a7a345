"""Limits that an operator sets for a sandbox server and for its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import SpecRefused
from headrace.serve.sandbox_servers.e2b_state.errors import RpcError
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits, parse_ceilings, parse_size
from headrace.serve.sandbox_servers.e2b_state.watchers import ScanBudget
from headrace.serve.sandbox_servers.exec.options import ServeOptions
from headrace.serve.sandbox_servers.exec.server import provider_config


@pytest.mark.parametrize(
    ("text", "size"), [("1M", 1 << 20), ("2G", 2 << 30), ("3GiB", 3 << 30), ("1048576", 1 << 20), ("1TB", 1 << 40)]
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "2", "G", "-1G", "1.5G", "2 G", "2g", "99999999999999999999G", "9999999T", "٣G"])
def test_other_sizes_are_refused_by_name(text: str) -> None:
    with pytest.raises(SpecRefused, match="--memory"):
        parse_size(text, "--memory")


def test_ceilings_are_read() -> None:
    found = parse_ceilings("memory=2G,disk=512M,processes=100,cpus=2,lifetime=3600", "x")
    assert found == SandboxLimits(memory_bytes=2 << 30, disk_bytes=512 << 20, processes=100, cpus=2, lifetime_s=3600)


@pytest.mark.parametrize(
    "text",
    ["", "memory", "memory=", "cpu=1", "cpus=0", "cpus=0.5", "processes=0", "lifetime=x", "disk=1G,disk=2G", "a=b"],
)
def test_bad_ceilings_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(SpecRefused, match=r"^x"):
        parse_ceilings(text, "x")


def test_key_files_may_have_ceilings(tmp_path: Path) -> None:
    write_private(tmp_path / "keys", b"a:one\nb:two:3\nc:three::memory=1G\nd:four:5:lifetime=60\n")
    keys = load_keys(tmp_path / "keys")
    found = {name: keys.identify(key) for name, key in (("a", "one"), ("b", "two"), ("c", "three"), ("d", "four"))}
    assert {name: owner and owner.max_sandboxes for name, owner in found.items()} == {
        "a": None,
        "b": 3,
        "c": None,
        "d": 5,
    }
    assert found["c"] is not None
    assert found["c"].ceilings == SandboxLimits(memory_bytes=1 << 30)
    for line in (b"a:one:", b"a:one:x", b"a:one:1:", b"a:one:1:x=1", b"a:one:1:memory=1G:more"):
        write_private(tmp_path / "keys", line)
        if line == b"a:one:1:":
            assert load_keys(tmp_path / "keys").named("a").ceilings == SandboxLimits()
        else:
            with pytest.raises(SpecRefused, match="line 1"):
                load_keys(tmp_path / "keys")


def test_ceilings_lower_a_specification_and_refuse_more() -> None:
    ceilings = SandboxLimits(memory_bytes=1 << 30, processes=50, cpus=2, lifetime_s=100)
    lowered = ceilings.applied_to(SandboxSpec(ttl_s=100, memory_bytes=1 << 20), "a")
    assert (lowered.memory_bytes, lowered.disk_bytes, lowered.pids) == (1 << 20, None, 50)
    assert (lowered.cpu, ceilings.applied_to(SandboxSpec(ttl_s=1, cpu=0.5), "a").cpu) == (2, 0.5)
    asked: list[dict[str, Any]] = [{"memory_bytes": 2 << 30}, {"pids": 51}, {"cpu": 2.1}, {"ttl_s": 101}]
    for more in asked:
        with pytest.raises(SpecRefused, match="key 'a' allows at most"):
            ceilings.applied_to(SandboxSpec(**{"ttl_s": 1, **more}), "a")


def options(**more: Any) -> ServeOptions:
    return ServeOptions(**more)


def test_options_become_the_providers_limits() -> None:
    given = {"max_sandboxes": 1000, "memory": "1G", "disk": "64M", "processes": 100, "files": 200}
    local = provider_config(options(**given))
    assert (local.max_sandboxes, local.memory_bytes, local.layer_bytes) == (1000, 1 << 30, 64 << 20)
    assert (local.pids, local.open_files, local.max_live) == (100, 200, 1000)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"memory": "x"}, "--memory"),
        ({"memory": "1M"}, "--memory"),
        ({"disk": "1K"}, "--disk"),
        ({"processes": 1}, "--processes"),
        ({"files": 1}, "--files"),
        ({"max_sandboxes": 10**9}, "--max-sandboxes"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecRefused, match=named):
        provider_config(options(**given))


def test_watchers_share_the_budgets_of_their_sandbox_and_server() -> None:
    server = ScanBudget(100)
    one, other = ScanBudget(60, server), ScanBudget(60, server)
    one.change(60)
    with pytest.raises(RpcError, match="this sandbox"):
        one.change(1)
    with pytest.raises(RpcError, match="this server"):
        other.change(41)
    assert (one.used_bytes, other.used_bytes, server.used_bytes) == (60, 0, 60)
    one.change(-60)
    other.change(50)
    assert server.used_bytes == 50
