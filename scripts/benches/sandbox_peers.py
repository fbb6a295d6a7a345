"""The costs of bwrap and runc on this machine, for comparison in `scripts/bench sandbox`.

Invariant: the two programs are called as one would call them by hand, with the host's programs read-only and without
network access; a program that is not installed or does not run here is reported with the reason, never as zero.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

_SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT_S: Final = 60.0
_MAX_MESSAGE: Final = 300
_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class PeerFailed(Exception):
    """The program is installed but fails here; the message is the program's own."""


async def measure_peers(
    *, cycles: int = 20, boots: int = 64, widths: Sequence[int] = (1, 8, 32)
) -> dict[str, dict[str, float] | str]:
    """Return the figures of `bwrap` and `runc`: create_destroy_ms, exec_p50_ms, boots_per_s_c<width>; or the reason why
    there are none.

    bwrap has no persistent sandbox: a command in a new one counts as create, destroy and exec. For runc, a boot is
    `run` and a destroy is `delete --force`; the bundle is written beforehand.
    """
    results: dict[str, dict[str, float] | str] = {}
    for name, measure in (("bwrap", _measure_bwrap), ("runc", _measure_runc)):
        program = shutil.which(name, path=_SEARCH_PATH)
        if program is None:
            results[name] = f"{name} is not installed"
            continue
        try:
            results[name] = await measure(program, cycles, boots, widths)
        except (PeerFailed, OSError, TimeoutError) as error:
            results[name] = f"{name} does not run here: {error}"
    return results


def _system_folders() -> list[str]:
    """Return the host folders that are mounted unchanged."""
    own = [f"/{name}" for name in _SYSTEM if Path(f"/{name}").is_dir() and not Path(f"/{name}").is_symlink()]
    return ["/usr", *own]


async def _measure_bwrap(program: str, cycles: int, boots: int, widths: Sequence[int]) -> dict[str, float]:
    binds = [word for path in _system_folders() for word in ("--ro-bind", path, path)]
    paths = (Path(f"/{name}") for name in ("bin", "lib", "lib64", "sbin"))
    links = [word for path in paths if path.is_symlink() for word in ("--symlink", str(path.readlink()), str(path))]
    command = [
        *(program, "--unshare-all", "--die-with-parent", *binds, *links),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/usr/bin/true"),
    ]

    async def once() -> None:
        await _run(*command)

    p50_ms = await _p50_ms(once, cycles)
    return {"create_destroy_ms": p50_ms, "exec_p50_ms": p50_ms, **await _rates(once, boots, widths)}


async def _measure_runc(program: str, cycles: int, boots: int, widths: Sequence[int]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as folder:
        bundles = _RuncBundles(program, Path(folder))
        await asyncio.to_thread(bundles.make_root)
        await bundles.configure()

        async def cycle() -> None:
            await bundles.delete(await bundles.boot())

        try:
            create_ms = await _p50_ms(cycle, cycles)
            name = await bundles.boot()
            exec_ms = await _p50_ms(lambda: bundles.execute(name), cycles)
            return {"create_destroy_ms": create_ms, "exec_p50_ms": exec_ms, **await _rates(cycle, boots, widths)}
        finally:
            for name in list(bundles.names):
                await asyncio.shield(bundles.delete(name))


class _RuncBundles:
    """Containers of one bundle with runc's default configuration and the host's programs."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.names: set[str] = set()

    def make_root(self) -> None:
        root = self._folder / "rootfs"
        for name in ("proc", "dev", "sys", *(path[1:] for path in _system_folders())):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path(f"/{name}").is_symlink():
                (root / name).symlink_to(Path(f"/{name}").readlink())

    async def configure(self) -> None:
        await _run(self._program, "spec", "--bundle", str(self._folder))
        path = self._folder / "config.json"
        config: dict[str, Any] = json.loads(path.read_bytes())
        config["process"] |= {"terminal": False, "args": ["/usr/bin/sleep", "3600"], "rlimits": []}
        config["mounts"] = [mount for mount in config["mounts"] if mount["type"] != "cgroup"]
        config["mounts"] += [
            {"destination": name, "type": "bind", "source": name, "options": ["rbind", "ro"]}
            for name in _system_folders()
        ]
        path.write_text(json.dumps(config))

    def _command(self, *words: str) -> list[str]:
        return [self._program, "--root", str(self._folder / "state"), *words]

    async def boot(self) -> str:
        name = f"headrace-peer-{os.getpid()}-{secrets.token_hex(4)}"
        self.names.add(name)
        await _run(*self._command("run", "--detach", "--bundle", str(self._folder), name))
        return name

    async def execute(self, name: str) -> None:
        await _run(*self._command("exec", name, "/usr/bin/true"))

    async def delete(self, name: str) -> None:
        self.names.discard(name)
        await _run(*self._command("delete", "--force", name))


async def _run(*command: str) -> None:
    """Run a command. Raises PeerFailed with its standard error."""
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env={"PATH": _SEARCH_PATH},
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code != 0:
            stderr.seek(0)
            raise PeerFailed(stderr.read()[-_MAX_MESSAGE:].decode(errors="replace").strip() or f"ended with {code}")


async def _p50_ms(call: Callable[[], Awaitable[None]], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        times.append(1000 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


async def _rates(call: Callable[[], Awaitable[None]], boots: int, widths: Sequence[int]) -> dict[str, float]:
    """Return calls per second by the number of concurrent calls."""
    rates = {}
    for width in widths:

        async def one(gate: asyncio.Semaphore) -> None:
            async with gate:
                await call()

        gate, started = asyncio.Semaphore(width), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(boots):
                group.create_task(one(gate))
        rates[f"boots_per_s_c{width}"] = boots / (time.perf_counter() - started)
    return rates
