"""How weights reach engines, part by part; `scripts/bench push` prints the parts' figures as one object.

Invariants:
- A part is one function that takes an empty folder and returns its own keys; parts know nothing of each other.
- What is compared runs in turns within one part, on processes that were warmed up, and is told as medians.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.engine_process import EngineProcess, EngineProcessConfig
from headrace.policies.errors import PushError
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.execution import PushConfig, push
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.tiny import model_config
from headrace.serve.measuring.plain_broadcast import open_pair
from headrace.serve.measuring.random_model import write_random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.policies.engine import RequestId
    from headrace.policies.push.execution import PushReport
    from headrace.policies.push.machine import Phase
    from headrace.serve.measuring.plain_broadcast import PlainPair

BYTES_BY_KEY: Mapping[str, int] = {"": 10**9, "_100mb": 10**8}
ROUNDS = 7


class OpenGates:
    """Gates of no gateway: nobody sends anything."""

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        """Nothing to close."""

    async def open(self, engine_id: EngineId) -> Sequence[RequestId]:
        return ()


@dataclass(slots=True, kw_only=True)
class Bench:
    """One idle engine, the sender, and the two processes of the yardstick."""

    engine: SGLangEngine
    sender: SenderProcess
    pair: PlainPair
    path: Path
    sha256: str
    pushes: int = 0

    async def push(self) -> PushReport:
        """Raises PushError when the engine did not take it."""

        async def journal(push_id: str, wave: int, phase: Phase) -> None:
            """Nothing is taken up again here."""

        self.pushes += 1
        snapshot = WeightsSnapshot(version=PolicyVersion(1, self.pushes), path=self.path, sha256=self.sha256)
        report = await push(snapshot, [self.engine], self.sender, OpenGates(), journal, PushConfig())
        if len(report.updated) != 1:
            raise PushError(f"the engine was not updated: {report.engines}")
        return report


def measure(parts: Sequence[str], folder: Path) -> dict[str, Any]:
    """The figures of the named parts. Raises KeyError for a part that is not there."""
    figures: dict[str, Any] = {}
    for part in parts:
        place = folder / part
        place.mkdir()
        figures |= PARTS[part](place)
    return figures


def measure_bandwidth(folder: Path) -> dict[str, Any]:
    """The whole way of 1 GB, and of 100 MB, into one engine (sender, HTTP, gloo, storage, swap: the push's phase
    `broadcast`) beside plain broadcasts of the same buckets that are copied into parameters. `bandwidth_ratio` is the
    push's bandwidth over the plain one's; the seconds of all phases are medians too, `load` with the file's SHA-256 and
    `verify` with the engine's own checksums."""
    figures: dict[str, Any] = {"rounds": ROUNDS, "bucket_bytes": PushConfig().bucket_bytes}
    for key, total_bytes in BYTES_BY_KEY.items():
        measured = asyncio.run(compare(folder / f"model{key}", total_bytes))
        figures |= {f"{name}{key}": value for name, value in measured.items()}
    return figures


async def compare(folder: Path, total_bytes: int) -> dict[str, Any]:
    """Both ways in turns; the first round of each warms up."""
    path = write_random_model(folder / "model", total_bytes)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    async with AsyncExitStack() as stack:
        config = EngineProcessConfig(model=path.parent, directory=folder, max_running=1, max_context=64)
        process = await stack.enter_async_context(EngineProcess(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = SGLangConfig(vocab_size=model_config()["vocab_size"])
        bench = Bench(
            engine=SGLangEngine(EngineId("bench"), process.url, session, client),
            sender=await stack.enter_async_context(SenderProcess(SenderConfig())),
            pair=await stack.enter_async_context(open_pair(path, folder / "meeting", PushConfig().bucket_bytes)),
            path=path,
            sha256=sha256,
        )
        rounds = [(await bench.push(), await bench.pair.round_s()) for _ in range(ROUNDS + 1)][1:]
    path.unlink()
    return figures_of([report for report, _ in rounds], [plain_s for _, plain_s in rounds])


def figures_of(reports: Sequence[PushReport], plain_s: Sequence[float]) -> dict[str, Any]:
    size_gb = reports[0].sent_bytes / 1e9
    push_s = statistics.median(report.seconds["broadcast"] for report in reports)
    seconds = {phase: statistics.median(report.seconds[phase] for report in reports) for phase in reports[0].seconds}
    load_s = statistics.median(report.total_s - sum(report.seconds.values()) for report in reports)
    return {
        "bandwidth_ratio": statistics.median(plain_s) / push_s,
        "gb": size_gb,
        "push_gb_per_s": size_gb / push_s,
        "plain_gb_per_s": size_gb / statistics.median(plain_s),
        "push_s": [report.seconds["broadcast"] for report in reports],
        "plain_s": list(plain_s),
        "seconds": {"load": load_s, **seconds},
    }


PARTS: Mapping[str, Callable[[Path], dict[str, Any]]] = {"bandwidth": measure_bandwidth}
