"""Layers of images in the making: a step runs in a sandbox, and what it has written becomes a layer of the store.

Invariants:
- A layer is cached under a key that its caller computes from all that the step sees. Equal builds at the same time make
  it once.
- A sandbox is frozen before its files are copied, and killed whatever happens.
- The layers of a build are leased until `release`.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from e2b_dockerfile_utils import ShellLex

from headrace.sandboxes.base import (
    ImageRef,
    Network,
    ProgramRunner,
    Sandbox,
    SandboxId,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    Stream,
)
from headrace.sandboxes.errors import CapacityExceeded, ImageRefused, OutOfDisk, SandboxError, Unsupported
from headrace.sandboxes.images import in_build
from headrace.sandboxes.images.build_steps import BuildLimits, BuildRefused, BuildStep, StepKind
from headrace.sandboxes.images.catalog import BUILT
from headrace.sandboxes.images.folders import StoreFolder, new_owner
from headrace.sandboxes.images.layer_copy import OwnLayer, copy_layer
from headrace.sandboxes.images.layers import UnpackLimits
from headrace.sandboxes.images.store import ImageStore
from headrace.sandboxes.launcher.commands import SEARCH_PATH

HOST: Final = "host"
_PROGRAM: Final = Path(in_build.__file__).read_text(encoding="utf-8")
_RESOLVER: Final = "etc/resolv.conf"
_SKIPPED: Final = (in_build.CONTEXT.strip("/"),)
_PURPOSE: Final = "build"
_PROGRAM_TIMEOUT_S: Final = 300.0
_MAX_LINE_CHARACTERS: Final = 2000
_TAIL_LINES: Final = 20
_SIGKILL: Final = 9


_SHOWN: Final = {"user": "USER", "folder": "WORKDIR", "copy": "COPY"}


class BuildSandboxes(Protocol):
    """The provider as builds need it (`LocalProvider`)."""

    @property
    def store(self) -> ImageStore: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef: ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def destroy(self, sandbox: SandboxId) -> None: ...

    async def list(self) -> builtins.list[SandboxInfo]: ...

    async def drop_image(self, image: ImageRef) -> bool: ...

    async def own_layer(self, ref: SandboxRef) -> OwnLayer: ...


Log = Callable[[str, str, str], None]
"""Called with a level (`info`, `error`), a line and the step's number."""


def no_log(_level: str, _line: str, _step: str) -> None:
    """Discard a line."""


@dataclass(slots=True, kw_only=True)
class ImageState:
    """An image in the making. `key` identifies it in the cache; `homes` has the home folders of the users that steps
    have named."""

    key: str
    layers: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    user: str
    shows_host: bool
    homes: dict[str, str] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Operations of `in_build` that the next layer begins with, each with its step."""
    cached: int = 0

    @property
    def home(self) -> str:
        """The home folder of the user, before and after its layer has been made."""
        return self.homes.get(self.user) or {"user": "/home/user", "root": "/root"}.get(self.user, "/")

    def expand(self, text: str) -> str:
        """Return a text with its variables replaced. Raises ValueError."""
        known = {"PATH": SEARCH_PATH, **self.environment}
        lex = ShellLex("\\", skip_process_quotes=True, env=known, skip_unset_env=False)
        return lex.process_word(text)


class BuildHost:
    """What all builds of one builder share: the provider's sandboxes, its store, the network of RUN, limits, and at
    most `most_at_once` sandboxes."""

    def __init__(self, sandboxes: BuildSandboxes, network: Network, limits: BuildLimits, most_at_once: int) -> None:
        self.sandboxes = sandboxes
        self.files: StoreFolder = sandboxes.store.files
        self.network = network
        self.limits = limits
        self._places = asyncio.Semaphore(most_at_once)
        self._making: dict[str, tuple[asyncio.Lock, int]] = {}
        """Lock of each layer that is being made, and the number of builds that need it."""

    async def end_lost(self) -> None:
        """Kill the sandboxes of builds that an earlier process began. Raises SandboxError."""
        for info in await self.sandboxes.list():
            if info.labels.get("purpose") == _PURPOSE and info.idempotency_key.startswith("build-"):
                await self.sandboxes.destroy(info.id)

    @asynccontextmanager
    async def making(self, key: str) -> AsyncIterator[None]:
        """Hold the right to make one layer, so that equal builds make it once."""
        lock, users = self._making.get(key, (asyncio.Lock(), 0))
        self._making[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            _, users = self._making.pop(key)
            if users > 1:
                self._making[key] = lock, users - 1

    @asynccontextmanager
    async def sandbox(
        self, state: ImageState, context: str, network: Network
    ) -> AsyncIterator[tuple[SandboxRef, Sandbox]]:
        """Boot a sandbox from an image in the making, above which the files of `context` are shown, and kill it at the
        end."""
        layers = ((context,) if context else ()) + state.layers
        reference = HOST if not layers else await self.record(replace(state, layers=layers))
        spec = SandboxSpec(
            image=reference,
            ttl_s=self.limits.total_s + 60,
            disk_bytes=self.limits.layer_bytes,
            network=network,
            labels={"purpose": _PURPOSE},
            idempotency_key=f"build-{secrets.token_hex(8)}",
        )
        async with self._places:
            ref = await self.sandboxes.create(spec)
            try:
                yield ref, await self.sandboxes.attach(ref)
            finally:
                with suppress(SandboxError):
                    await asyncio.shield(self._end(ref, reference))

    async def _end(self, ref: SandboxRef, reference: str) -> None:
        await self.sandboxes.destroy(ref.id)
        if reference != HOST:
            # Otherwise the provider would keep the layers of every step from eviction.
            await self.sandboxes.drop_image(ImageRef(f"sha256:{reference.removeprefix(BUILT)}"))

    async def record(self, state: ImageState) -> str:
        """Store the record of an image and return its reference."""
        document = {
            "layers": list(state.layers),
            "environment": state.environment,
            "folder": state.folder or "/",
            "user": state.user or "root",
            "shows_host": state.shows_host,
        }
        key = digest_of(document)
        await asyncio.to_thread(self.files.write_record, key, {**document, "digest": f"sha256:{key}"})
        return f"{BUILT}{key}"


class LayerRun:
    """The layers of one build. `step` is the step that errors name; `may_boot()` is called before each sandbox and may
    raise an error."""

    def __init__(self, host: BuildHost, log: Log, may_boot: Callable[[], None], *, force: bool) -> None:
        self._host = host
        self._store = host.files
        self._log = log
        self.may_boot = may_boot
        self._force = force
        self._owner = new_owner()
        self.step = "base"
        self.made = 0
        """Number of layers that were not in the cache."""

    async def release(self) -> None:
        """Release the layers of this build."""
        await asyncio.to_thread(self._store.release, self._owner)

    async def add_layer(self, state: ImageState, step: BuildStep | None, key: str) -> None:
        """Add the layer of a step, and of the operations that wait for one, from the cache or by running them; `state`
        becomes the image with it. Raises BuildRefused, SandboxError."""
        force = self._force or (step is not None and step.force)
        async with self._host.making(key):
            record = None if force else await asyncio.to_thread(self._store.read_record, key)
            if record is not None and await self.lease(tuple(record["layers"]), quiet=True):
                state.cached += 1
            else:
                record = await self.make_layer(state, step, key)
                self.made += 1
        state.key, state.layers, state.homes = key, tuple(record["layers"]), record["homes"]
        state.pending = []

    async def make_layer(self, state: ImageState, step: BuildStep | None, key: str) -> dict[str, Any]:
        self.may_boot()
        runs = step is not None and step.kind is StepKind.RUN
        network = self._host.network if runs else Network.NONE
        context = "" if step is None else step.context
        if context:
            await self.lease((context, *state.layers))
        async with self._host.sandbox(state, context, network) as (ref, sandbox):
            homes = {**state.homes, **await self.operate(state, sandbox)}
            if step is not None and runs:
                await self.run_command(state, step, sandbox, homes, network)
            await sandbox.freeze()
            layer = await self._host.sandboxes.own_layer(ref)
            skip = (*_SKIPPED, *((_RESOLVER,) if network is Network.HOST else ()))
            limits = UnpackLimits(self._host.limits.layer_bytes, self._host.limits.entries)
            try:
                copied = await asyncio.to_thread(copy_layer, layer, self._store, limits, skip)
            except ImageRefused as error:
                raise BuildRefused(error.message, self.step) from error
            except OSError as error:
                raise OutOfDisk(f"the layer of step {self.step} could not be stored: {error}", 30.0) from error
        layers = (copied.digest, *state.layers) if copied.entries else state.layers
        await self.lease(layers)
        record = {
            "digest": f"sha256:{key}",
            "layers": list(layers),
            "environment": state.environment,
            "folder": state.folder or "/",
            "user": state.user or "root",
            "shows_host": state.shows_host,
            "homes": homes,
        }
        await asyncio.to_thread(self._store.write_record, key, record)
        return record

    async def operate(self, state: ImageState, sandbox: Sandbox) -> dict[str, str]:
        """Run the waiting operations inside; return the home folders of users. Raises BuildRefused."""
        if not state.pending:
            return {}
        if not isinstance(sandbox, ProgramRunner):
            raise Unsupported("builds need a provider that runs programs in its sandboxes: local")
        sent = json.dumps(state.pending).encode()
        result = await sandbox.run_program(_PROGRAM, stdin=sent, timeout_s=_PROGRAM_TIMEOUT_S)
        try:
            answer = json.loads(result.stdout)
        except ValueError as error:
            text = result.stderr[-500:].decode(errors="replace")
            raise BuildRefused(f"the step ended with exit code {result.exit_code}: {text}", self.step) from error
        if "failed" in answer:
            failed = state.pending[answer["failed"]]
            raise BuildRefused(f"{_SHOWN[failed['op']]}: {answer['message']}"[:1000], failed["step"])
        homes: dict[str, str] = answer["homes"]
        return homes

    async def run_command(
        self, state: ImageState, step: BuildStep, sandbox: Sandbox, homes: Mapping[str, str], network: Network
    ) -> None:
        """Run the command of a RUN step. Raises BuildRefused with the end of its output."""
        user = (step.arguments[1] if len(step.arguments) > 1 else "") or state.user or "root"
        if network is Network.HOST:
            with suppress(OSError, SandboxError):
                await sandbox.write(f"/{_RESOLVER}", await asyncio.to_thread(Path("/etc/resolv.conf").read_bytes))
        process = await sandbox.spawn(
            ["/bin/bash", "-c", step.arguments[0]],
            user=user,
            env=state.environment,
            cwd=state.folder or homes.get(user) or "/",
            timeout_s=self._host.limits.total_s,
        )
        tail: list[str] = []
        try:
            rest = {Stream.STDOUT: b"", Stream.STDERR: b""}
            async for piece in process.output():
                *lines, last = (rest.get(piece.stream, b"") + piece.data).split(b"\n")
                rest[piece.stream] = last[-_MAX_LINE_CHARACTERS:]
                tail = (tail + [self._show(line) for line in lines])[-_TAIL_LINES:]
            tail += [self._show(line) for line in rest.values() if line]
            code = await process.wait()
        except BaseException:
            with suppress(SandboxError):
                await asyncio.shield(process.signal(_SIGKILL))
            raise
        if code != 0:
            said = "\n".join(tail[-_TAIL_LINES:])
            raise BuildRefused(f"RUN {step.arguments[0][:200]}: exit code {code}\n{said}".strip(), self.step)

    def _show(self, line: bytes) -> str:
        text = line[:_MAX_LINE_CHARACTERS].decode(errors="replace").rstrip("\r")
        self._log("info", text, self.step)
        return text

    async def lease(self, layers: Sequence[str], *, quiet: bool = False) -> bool:
        """Keep layers for as long as the build runs. Raises CapacityExceeded if one is gone, unless `quiet`."""
        digests = [digest for digest in layers if not digest.startswith("/")]
        held = await asyncio.to_thread(self._store.lease, self._owner, digests)
        if not held and not quiet:
            raise CapacityExceeded("a layer of the build was evicted: raise image_bytes (max_bytes of the image store)")
        return held


def digest_of(document: object) -> str:
    """Return a digest of a document for JSON."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
