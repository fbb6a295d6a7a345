"""Runs without services: the calls of the actor of runs over its real table, with nothing behind it that trains.

The table, the quotas and the checks of recipes are those of the product. What a service would do, tests decide with
`go` and `note`.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from headrace.actors.cluster.runs.contract import (
    EngineChange,
    EventPage,
    LogPage,
    NodeDrained,
    NodeStatus,
    Readiness,
    perform,
)
from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.quotas import Quotas, next_to_start, refuse_oversized
from headrace.actors.cluster.runs.records import (
    RAY_USER,
    ActualState,
    ApiRole,
    Build,
    Caller,
    Demands,
    DesiredState,
    Recipe,
    RunId,
    RunRecord,
    Submission,
)
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.engines.registry import EngineState, Origin
from headrace.actors.errors import ConfigError, EngineUnknown, RunError, RunRefused
from headrace.actors.run.changes import changed_document
from headrace.actors.run.config import RunConfig, resolve, validated
from headrace.actors.run.node_drain import RunLeft
from headrace.actors.telemetry.page.access import PageAnswer
from headrace.actors.telemetry.page.page_processes import MountedPages, PageRequest
from headrace.actors.training.external_loop import ExternalTrainerLoop
from headrace.actors.training.trainer_calls import TrainerCall
from headrace.policies.engine import EngineId

RECIPE: dict[str, dict[str, Any]] = {
    "engines": {"backend": "simulated"},
    "learner": {"kind": "simulated"},
    "agent": {"kind": "simulated"},
}

ALICE = replace(RAY_USER, owner="alice")
"""Caller of `RunsApi` whose runs those of the key `alice` are."""

NODE = NodeStatus(
    node="ab" * 28,
    address="10.0.0.1",
    role="rollout",
    cpus=2.0,
    gpus=0.0,
    memory_bytes=1 << 30,
    free_disk_bytes=1 << 30,
    free_memory_bytes=1 << 29,
)


def config_of(recipe: Recipe, read: Callable[[dict[str, Any], Path, Path], RunConfig]) -> RunConfig:
    document = {table: copy.deepcopy(dict(keys)) for table, keys in recipe.items()}
    return read(document, Path("recipe"), Path("/run"))


def build_of(recipe: Recipe) -> Build:
    """Return what a recipe asks for. Raises ConfigError."""
    config = config_of(recipe, resolve)
    demands = Demands(
        rollouts=config.dispatcher.slots_per_worker * config.service.workers, engines=config.engines.count
    )
    digest = hashlib.sha256(orjson.dumps(config.model_dump(mode="json"))).hexdigest()
    return Build(config_digest=digest, headrace_version="0", demands=demands, restarts=3)


class RunsWithoutServices:
    """Implements `RunsApi`; the table is in `folder`, or in memory."""

    def __init__(self, folder: Path | None = None, quotas: Quotas | None = None) -> None:
        self._table = RunsTable.in_memory() if folder is None else RunsTable.open(folder)
        self._quotas = quotas or Quotas()
        self._changed = asyncio.Condition()
        self._engines: dict[str, dict[str, str]] = {}
        self.error: Exception | None = None
        """Raised by calls of users instead while it is set, as when the actor is away."""
        self.lost = 0
        self._lost = asyncio.Event()
        self.learner: ExternalTrainerLoop | None = None
        """Learner that trainers call, whatever their run is."""
        self.folders: dict[RunId, Path] = {}
        """Folders of runs that have a page."""
        self.pages = MountedPages()

    async def perform(self, name: str, caller: Caller, arguments: Mapping[str, Any]) -> Any:
        if self.error is not None:
            self.lost += 1
            self._lost.set()
            raise self.error
        return await perform(self, name, caller, arguments)

    async def until_lost(self, times: int) -> None:
        """Wait until calls were lost this often in all."""
        while self.lost < times:
            self._lost.clear()
            await self._lost.wait()

    async def submit(self, caller: Caller, name: str, recipe: Recipe, idempotency_key: str) -> RunRecord:
        submission = Submission(name=name, owner=caller.owner, recipe=recipe, idempotency_key=idempotency_key)
        build = self._build(submission.recipe, submission.owner, caller)
        refuse_oversized(submission.owner, build.demands, self._quotas)
        record = self._table.submit(submission, build, run_id=RunId(uuid.uuid4().hex), now_s=time.time(), caller=caller)
        await self._start_next()
        return self._table.get(record.run_id)

    async def runs(self, caller: Caller) -> tuple[RunRecord, ...]:
        return self._table.runs(None if caller.role is ApiRole.ADMIN else caller.owner)

    async def run(self, caller: Caller, run_id: RunId) -> RunRecord:
        return self._table.get(run_id)

    async def drain(self, caller: Caller, run_id: RunId) -> RunRecord:
        return await self._end(run_id, DesiredState.DRAINED, caller)

    async def stop(self, caller: Caller, run_id: RunId) -> RunRecord:
        return await self._end(run_id, DesiredState.STOPPED, caller)

    async def upgrade(self, caller: Caller, run_id: RunId) -> RunRecord:
        # Without a service there is nothing to save.
        self._table.renew(run_id, build_of(self._table.recipe(run_id)), now_s=time.time())
        await self._start_next()
        return self._table.get(run_id)

    async def nodes(self, caller: Caller) -> tuple[NodeStatus, ...]:
        """Return one node, which has all live runs."""
        live = tuple(record.run_id for record in self._table.runs() if record.is_live)
        return (replace(NODE, runs=live),)

    async def drain_node(self, caller: Caller, node: str, deadline_s: float = 60.0) -> NodeDrained:
        if node not in (NODE.node, NODE.address):
            raise ConfigError(f"no living node has the address or id {node!r}")
        left = {run_id: RunLeft(workers=1, ended=2) for run_id in (await self.nodes(caller))[0].runs}
        return NodeDrained(node=NODE.node, address=NODE.address, runs=left)

    async def resume(self, caller: Caller, run_id: RunId, changes: tuple[str, ...] = ()) -> RunRecord:
        recipe = changed_document(self._table.recipe(run_id), changes)
        build = self._build(recipe, self._table.get(run_id).owner, caller)
        self._table.requeue(run_id, build, recipe=recipe, now_s=time.time(), caller=caller)
        await self._start_next()
        return self._table.get(run_id)

    async def events(self, caller: Caller, run_id: RunId, after: int, wait_s: float) -> EventPage:
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._page(run_id, after) != EventPage(events=(), ended=False))
        except TimeoutError:
            pass
        return self._page(run_id, after)

    async def status(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        record = self._table.get(run_id)
        return {"run": record.name, "state": record.actual.value}

    async def report(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        self._table.get(run_id)
        return {"steps": 0}

    async def show(self, run_id: RunId, folder: Path) -> None:
        """Let a run have the page of the one in `folder`."""
        self.folders[run_id] = folder

    async def page(self, run_id: RunId, request: PageRequest) -> PageAnswer:
        self._table.get(run_id)
        try:
            return await self.pages.get(self.folders.get(run_id, Path("/nowhere") / run_id), request)
        except RunError as error:
            raise RunRefused(str(error)) from error

    async def engines(self, caller: Caller, run_id: RunId) -> tuple[EngineStatus, ...]:
        self._table.get(run_id)
        return tuple(
            EngineStatus(
                engine_id=EngineId(name),
                origin=Origin.ATTACHED,
                place="",
                state=EngineState.SERVING,
                url=url,
                version=None,
            )
            for name, url in self._engines.get(run_id, {}).items()
        )

    async def add_engine(self, caller: Caller, run_id: RunId, url: str, timeout_s: float = 120.0) -> EngineChange:
        engines = self._live_engines(run_id)
        known = [name for name, its_url in engines.items() if its_url == url]
        name = known[0] if known else f"added-{len(engines) + 1}"
        engines[name] = url
        return EngineChange(engine_id=name, done="add")

    async def remove_engine(
        self, caller: Caller, run_id: RunId, engine_id: str, timeout_s: float = 120.0
    ) -> EngineChange:
        if self._live_engines(run_id).pop(engine_id, None) is None:
            raise EngineUnknown(f"there is no engine {engine_id}")
        return EngineChange(engine_id=engine_id, done="remove")

    async def trainer(self, caller: Caller, run_id: RunId, call: TrainerCall) -> bytes:
        self._live_engines(run_id)
        if self.learner is None:
            raise RunRefused("the run trains by itself")
        return await self.learner.call(call)

    async def logs(
        self,
        caller: Caller,
        run_id: RunId,
        actor: str | None = None,
        after: str = "",
        limit_bytes: int = 1 << 20,
    ) -> LogPage:
        """Return the events as log lines, those about a loss as warnings; the only actor is `service`."""
        if actor not in (None, "service"):
            raise RunRefused(f"run {run_id} has no actor {actor}: its actors are service")
        if after and not after.isdecimal():
            raise RunRefused(f"the cursor {after!r} is not of this run: leave it out")
        lines, cursor = [], after
        for event in self._table.events(run_id, after=int(after or 0)):
            level = "WARNING" if "lost" in event.text else "INFO"
            said = {"time": event.time_s, "level": level, "actor": "service", "message": event.text}
            line = orjson.dumps(said | {"number": event.number}).decode()
            limit_bytes -= len(line) + 1
            if limit_bytes < 0:
                break
            lines.append(line)
            cursor = str(event.number)
        return LogPage(lines=tuple(lines), cursor=cursor)

    async def ready(self, caller: Caller, run_id: RunId) -> Readiness:
        runs = self._table.get(run_id).actual is ActualState.RUNNING
        serves = bool(self._engines.get(run_id))
        problems = () if serves else ("no engine serves",)
        return Readiness(ledger_writable=True, engine_serving=serves, learner_in_time=runs, problems=problems)

    async def go(self, run_id: RunId, state: ActualState, reason: str = "", exit_code: int | None = None) -> RunRecord:
        """Let a run pass to a state."""
        record = self._table.move(run_id, state, now_s=time.time(), reason=reason, exit_code=exit_code)
        await self._start_next()
        return record

    async def note(self, run_id: RunId, text: str) -> int:
        """Append an event to a run and return its number."""
        number = self._table.note(run_id, text, now_s=time.time()).number
        await self._tell()
        return number

    async def _start_next(self) -> None:
        plan = next_to_start(self._table.runs(), self._quotas, now_s=time.time())
        for run_id in plan.start:
            self._table.move(run_id, ActualState.STARTING, now_s=time.time())
        for run_id, reason in plan.reasons.items():
            self._table.explain(run_id, reason, now_s=time.time())
        await self._tell()

    def _build(self, recipe: Recipe, owner: str, caller: Caller) -> Build:
        Rights(owner=owner, caller=caller, quotas=self._quotas).check_recipe(config_of(recipe, validated))
        return build_of(recipe)

    async def _end(self, run_id: RunId, desired: DesiredState, caller: Caller) -> RunRecord:
        record = self._table.want(run_id, desired, now_s=time.time(), caller=caller)
        if record.is_live:
            # Without a service there is nothing to save, so the run ends at once.
            record = self._table.move(run_id, ActualState(desired), now_s=time.time(), exit_code=4)
        await self._start_next()
        return record

    def _live_engines(self, run_id: RunId) -> dict[str, str]:
        if not self._table.get(run_id).is_live:
            raise RunRefused(f"run {run_id} is not live, so its engines cannot be changed: resume it first")
        return self._engines.setdefault(run_id, {})

    def _page(self, run_id: RunId, after: int) -> EventPage:
        events = self._table.events(run_id, after=after)
        return EventPage(events=events, ended=not self._table.get(run_id).is_live)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI app over HTTP, and yield its URL."""
    import socket

    import uvicorn

    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://{host}:{port}"
            finally:
                server.should_exit = True


__all__ = ["ALICE", "NODE", "RECIPE", "RunsWithoutServices", "build_of", "serving"]
