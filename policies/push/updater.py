"""Transfer by a trainer's own weight updater, such as slime's: its processes send their weights to the engines.

Invariants:
- The updater speaks to engines only through `answer`, under slime's names. What a push does in phases of its own
  (pausing, flushing, resuming) is done when the updater asks for it, or is done afterwards: those calls do nothing.
- An engine's failure is never the updater's: it gets an answer, and the failure is in the report. An engine that did
  not join a collective leaves the trainer's processes waiting in it. Once no engine has answered for a while after a
  failure, the trainer is told to end them; what they had sent to is lost.
- The process groups are the trainer's, and last as long as its processes and the set of engines.
- The weights are those of one version: the trainer refuses when it has trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineError, PushError, SenderFailed, SenderTimeout
from headrace.policies.push.contract import GroupMember, PushConfig, Trainer
from headrace.policies.push.transfer import LEAVE_TIMEOUT_S, Failures, first_error
from headrace.policies.sglang.client import SGLangEngine
from headrace.policies.tensors import Bucket, TensorSpec

SILENCE_S: Final = 5.0
"""Time without an answer of any engine after which, if one has failed, the trainer is taken to hang."""
ENDING_S: Final = 40.0
"""Time that a trainer has after its own limit, which expires first because it knows what it waits for: it kills its
processes before it answers."""
NOTHING_TO_DO: Final = frozenset({"pause_generation", "flush_cache", "continue_generation"})
"""Calls of the updater for what the phases of a push do."""


class UpdaterTransfer:
    """Transfer of one push by the trainer, which serves the model with these parameters. Methods raise SenderFailed
    when the trainer cannot continue."""

    def __init__(
        self, version: PolicyVersion, trainer: Trainer, specs: Mapping[str, TensorSpec], config: PushConfig
    ) -> None:
        self._version, self._trainer, self._config = version, trainer, config
        trainer.push = self
        self._specs = dict(specs)
        self._engines: dict[EngineId, SGLangEngine] = {}
        self._failures = Failures()
        self._touched: Callable[[EngineId], None] = lambda _: None
        self._taken: dict[EngineId, int] = {}
        self._answers = 0
        self._failed = asyncio.Event()
        self.sent_bytes = 0

    async def load(self) -> None:
        """Return: the weights are in the trainer's memory."""

    def specs(self) -> dict[str, TensorSpec]:
        """Return the parameters of the model, which the trainer loaded; it sends those that it trains."""
        return self._specs

    def checksums(self) -> dict[str, str]:
        """Return none: engines are compared with one another."""
        return {}

    async def form(self, engines: Sequence[SGLangEngine], members: Sequence[GroupMember], failures: Failures) -> None:
        """Connect the trainer to these engines."""
        self._engines = {engine.engine_id: engine for engine in engines}
        limit_s = self._config.collective_timeout_s
        await self._run(self._trainer.connect_engines(self._version, members, limit_s), limit_s, failures)

    async def send(
        self, engines: Sequence[SGLangEngine], failures: Failures, touched: Callable[[EngineId], None]
    ) -> dict[EngineId, int]:
        """Have the trainer send all weights. Returns the bytes that each engine received."""
        self._taken = dict.fromkeys((engine.engine_id for engine in engines), 0)
        self._touched, limit_s = touched, self._config.read_timeout_s
        await self._run(self._trainer.update_engines(self._version, limit_s), limit_s, failures)
        self.sent_bytes += max(self._taken.values(), default=0)
        return self._taken

    async def disband(self) -> None:
        """Return: the groups stay for the next push."""

    async def answer(self, engine_id: EngineId, method: str, arguments: Mapping[str, Any]) -> None:
        """Do what the updater asks of one engine. Raises PushError for what cannot be done."""
        engine = self._engines.get(engine_id)
        if method == "destroy_weights_update_group":
            # The engine may be gone, or have left.
            if engine is not None:
                await self._leave(engine, arguments["group_name"])
        elif engine is None:
            raise PushError(f"{method} of {engine_id}: it takes part in no push")
        elif method == "init_weights_update_group":
            await self._join(engine, arguments)
        elif method == "update_weights_from_distributed":
            await self._receive(engine, arguments)
        elif method not in NOTHING_TO_DO:
            raise PushError(f"the trainer's updater calls {method} of an engine, which pushes by nccl do not have")

    async def _run(self, work: Coroutine[None, None, None], limit_s: float, failures: Failures) -> None:
        self._failures = failures
        self._failed.clear()
        async with first_error(), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._end_a_hang())
            try:
                async with asyncio.timeout(limit_s + ENDING_S):
                    await work
            except TimeoutError as error:
                raise SenderTimeout(f"the trainer has not answered within {limit_s + ENDING_S:g} s") from error
            finally:
                watching.cancel()

    async def _end_a_hang(self) -> None:
        await self._failed.wait()
        seen = -1
        while seen != self._answers:
            seen = self._answers
            await asyncio.sleep(SILENCE_S)
        reasons = (f"{engine_id}: {failure.message}" for engine_id, failure in self._failures.found.items())
        with suppress(SenderFailed):
            await self._trainer.give_up_push("; ".join(reasons))

    async def _join(self, engine: SGLangEngine, asked: Mapping[str, Any]) -> None:
        name, host, port = asked["group_name"], asked["master_address"], asked["master_port"]
        # One of the same name may be left, of processes that have ended.
        await self._leave(engine, name)
        joining = engine.join_group(
            name,
            host=host,
            port=port,
            rank=asked["rank_offset"],
            world_size=asked["world_size"],
            backend=asked["backend"],
        )
        await self._record(engine, f"joining {name} at {host}:{port}", joining)

    async def _leave(self, engine: SGLangEngine, name: str) -> None:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await engine.leave_group(name)

    async def _receive(self, engine: SGLangEngine, asked: Mapping[str, Any]) -> None:
        bucket = Bucket(
            names=tuple(asked["names"]),
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in asked["dtypes"]),
            shapes=tuple(map(tuple, asked["shapes"])),
        )
        self._touched(engine.engine_id)
        # With each of them: which one is the last is not known, and the engine is paused until then.
        receiving = engine.update(bucket, group=asked["group_name"], version=self._version, flattened=False)
        await self._record(engine, f"a bucket from {bucket.names[0]} on", receiving)
        if engine.engine_id not in self._failures.found:
            self._taken[engine.engine_id] += bucket.size_bytes

    async def _record(self, engine: SGLangEngine, what: str, call: Coroutine[None, None, None]) -> None:
        """Await a call of an engine, and keep its failure."""
        engine_id = engine.engine_id
        async with self._failures.of(engine_id, self._config.collective_timeout_s):
            await call
        self._answers += 1
        if (failure := self._failures.found.get(engine_id)) is not None:
            self._failures.found[engine_id] = replace(failure, message=f"{what}: {failure.message}")
            self._failed.set()
