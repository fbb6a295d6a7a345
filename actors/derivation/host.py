"""Facts of the host that values of a run are derived from: memory, cores and GPUs. They are totals, never what is free
just now, so that a recipe comes to the same values each time."""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from headrace.actors.engines.devices import VISIBLE, visible_devices
from headrace.sandboxes.linux.cgroups import find_mounts
from headrace.sandboxes.linux.host_limits import allowed_to_sandboxes, lowest_above, read_host
from headrace.serve.gateway.http.placement import most_processes

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 10.0
_PER_CORE: Final = 32
"""Sandboxes that share a core; Endless Terminals and Echo run 32 at once. Agents mostly wait for the policy."""
MOST_SANDBOXES: Final = 256
_PROCESSES_EACH: Final = 97
"""Smallest share of processes of a sandbox, with those that serve it (`host_limits.default_live`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory in bytes, cores that this process may use, memory of each visible GPU in bytes, and the number of
    processes that all sandboxes together may hold."""

    memory_bytes: int
    cores: int
    gpus: tuple[int, ...] = ()
    processes: int = 1 << 15

    def sandboxes(self, taken_bytes: int = 0, limit_bytes: int | None = None) -> tuple[int, str]:
        """Return how many sandboxes with this limit of memory (2 GiB by default) run at once beside what holds
        `taken_bytes`, and what bounds their number."""
        memory_bytes = max(0, self.memory_bytes * 7 // 8 - taken_bytes)
        # A limit is for the worst command; on average a sandbox holds far less.
        each_bytes = (limit_bytes or 2 << 30) // 8
        bounds = {
            f"{_PER_CORE} for each of {self.cores} cores": _PER_CORE * self.cores,
            f"{gigabytes(each_bytes)} GB each of {gigabytes(memory_bytes)} GB": memory_bytes // each_bytes,
            f"{self.processes:,} processes for all": self.processes // _PROCESSES_EACH,
            "the most for one launcher": MOST_SANDBOXES,
        }
        reason, most = min(bounds.items(), key=lambda bound: bound[1])
        return max(8, most), reason


@cache
def this_host() -> Host:
    """Return the facts of this host. The limits of the control groups around this process count."""
    texts = (Path(f"/proc/self/{name}").read_text(encoding="utf-8") for name in ("mountinfo", "cgroup"))
    folders = [mount.folder for mount in find_mounts(*texts)]

    def around(*files: str) -> int | None:
        found = [lowest_above(folder, file) for folder in folders for file in files]
        return min((limit for limit in found if limit is not None), default=None)

    limits, processes_around = read_host(), around("pids.max")
    return Host(
        memory_bytes=min(limits.memory_bytes, around("memory.max", "memory.limit_in_bytes") or limits.memory_bytes),
        cores=most_processes(),
        gpus=_gpus(),
        processes=allowed_to_sandboxes(limits, None, processes_around).processes,
    )


def _gpus() -> tuple[int, ...]:
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")  # torch would take seconds
    try:
        told = subprocess.run(query, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, text=True).stdout
        found = tuple(int(line) << 20 for line in told.splitlines())
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        # A device without memory of its own has "[N/A]".
        said = f"{getattr(error, 'stdout', '')}{getattr(error, 'stderr', '')}".strip()
        logger.warning("nvidia-smi does not tell the memory of this host's GPUs: they are not used: %s %s", error, said)
        return ()
    return found if VISIBLE not in os.environ else found[: len(visible_devices())]


def gigabytes(amount_bytes: float) -> str:
    """Return an amount in units of 1e9 bytes, as figures of models have it."""
    return f"{amount_bytes / 1e9:.{0 if amount_bytes >= 10e9 else 1}f}"
