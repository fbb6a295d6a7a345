"""Builder of images: a base, build steps, and their layers in the image store.

The steps are those of E2B's build API, to which `dockerfile` converts a Dockerfile. RUN and COPY make a layer each: a
sandbox boots from the layers so far, the step runs in it, the sandbox is frozen, and what it has written is copied into
the store.

Invariants:
- Whatever comes from the client runs inside a sandbox only, without a network unless the builder was made with the
  host's.
- A layer is cached under a digest of its parent, the step, the content of the copied files, and everything that the
  step sees (environment, user, folder, network). Equal builds at the same time make it once.
- The layers of a build are leased while it runs. A build that fails leaves no image; its finished layers stay as a
  cache, which the store evicts when it needs the space.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.base import Network, Sandbox
from headrace.sandboxes.images.build_steps import (
    E2B_USER,
    MAX_STEPS,
    BuildLimits,
    BuildRefused,
    BuildStep,
    Recipe,
    StepKind,
)
from headrace.sandboxes.images.catalog import BUILT, StoredImage
from headrace.sandboxes.images.folders import StoreFolder
from headrace.sandboxes.images.layer_maker import (
    HOST,
    BuildHost,
    BuildSandboxes,
    ImageState,
    LayerRun,
    Log,
    digest_of,
    no_log,
)

_POLL_S: Final = 0.2
_MAX_LINE_CHARACTERS: Final = 2000


class ImageBuilder:
    """Builds images with the sandboxes of one provider. `network` is what RUN gets; the provider must allow it."""

    def __init__(
        self,
        sandboxes: BuildSandboxes,
        *,
        network: Network = Network.NONE,
        limits: BuildLimits | None = None,
        most_at_once: int = 8,
    ) -> None:
        self._host = BuildHost(sandboxes, network, limits or BuildLimits(), most_at_once)

    @property
    def files(self) -> StoreFolder:
        """The files of the store."""
        return self._host.files

    async def evict(self) -> None:
        """Keep the store within its size, after build contexts have been added. Raises OSError."""
        await self._host.sandboxes.store.evict()

    async def prepare(self) -> None:
        """Make the store's folders, and kill the sandboxes of builds that an earlier process has left to this provider.
        Call it once, before the first build. Raises SandboxError, OSError."""
        await asyncio.to_thread(self.files.prepare)
        await self._host.end_lost()

    @property
    def limits(self) -> BuildLimits:
        return self._host.limits

    @property
    def network(self) -> Network:
        """The network of RUN."""
        return self._host.network

    async def build(
        self, recipe: Recipe, *, log: Log = no_log, may_boot: Callable[[], None] | None = None
    ) -> StoredImage:
        """Build an image. `may_boot()` is called before every sandbox; an error that it raises ends the build. Raises
        BuildRefused, and other SandboxErrors if this host cannot build now."""
        if len(recipe.steps) > MAX_STEPS:
            raise BuildRefused(f"{len(recipe.steps)} steps: an image may have at most {MAX_STEPS}", "base")
        layers = LayerRun(self._host, log, may_boot or (lambda: None), force=recipe.force)
        try:
            async with asyncio.timeout(self.limits.total_s):
                return await _Build(self._host, layers, recipe, log).run()
        except TimeoutError as error:
            raise BuildRefused(f"the build took longer than {self.limits.total_s:g} s", layers.step) from error
        finally:
            await layers.release()
            if layers.made:
                await self._host.sandboxes.store.evict()


class _Build:
    """One build: its steps, one after the other."""

    def __init__(self, host: BuildHost, layers: LayerRun, recipe: Recipe, log: Log) -> None:
        self._host = host
        self._layers = layers
        self._recipe = recipe
        self._log = log

    @property
    def step(self) -> str:
        return self._layers.step

    async def run(self) -> StoredImage:
        recipe = self._recipe
        self._log("info", f"FROM {recipe.source or recipe.base}", "base")
        state = await self.base()
        base_user, base_folder = state.user, state.folder
        explicit_user = explicit_folder = False
        has_default_user = bool(recipe.default_user) and any(step.kind is not StepKind.ENV for step in recipe.steps)
        if has_default_user:
            state.user, state.folder = recipe.default_user, ""
            state.pending.append(self._user_operation(recipe.default_user))
        else:
            state.folder = state.folder or "/"
        for number, step in enumerate(recipe.steps, 1):
            self._layers.step = str(number)
            try:
                step.check()
                match step.kind:
                    case StepKind.ENV:
                        pairs = zip(step.arguments[::2], step.arguments[1::2], strict=True)
                        values = {name: state.expand(value) for name, value in pairs}
                        state.environment = {**state.environment, **values}
                        self._log("info", f"ENV {' '.join(values)}", self.step)
                    case StepKind.WORKDIR:
                        explicit_folder = True
                        self.set_folder(state, step)
                    case StepKind.USER:
                        explicit_user = True
                        state.user = state.expand(step.arguments[0])
                        state.pending.append(self._user_operation(state.user))
                    case StepKind.RUN | StepKind.COPY:
                        await self._make_layer(state, step)
            except ValueError as error:
                raise BuildRefused(f"{step.kind}: {error}", self.step) from error
        self._layers.step = "finalize"
        if state.pending:
            await self._make_layer(state, None)
        if not explicit_user and not has_default_user:
            state.user = base_user
        if not explicit_folder:
            state.folder = base_folder
        return await self.finish(state)

    async def size_of(self, state: ImageState) -> int:
        """Return the bytes of all layers in the store. Raises BuildRefused beyond the recipe's limit."""
        files = self._host.files
        digests = [digest for digest in state.layers if not digest.startswith("/")]
        size = sum(await asyncio.to_thread(lambda: [files.layer_bytes(digest) for digest in digests]))
        most = self._recipe.max_bytes
        if most is not None and size > most:
            raise BuildRefused(f"the image has {size} bytes, and {max(0, most)} are left of the key's quota", self.step)
        return size

    async def finish(self, state: ImageState) -> StoredImage:
        recipe = self._recipe
        reference = await self._host.record(state)
        if recipe.start_command or recipe.ready_command:
            self._layers.may_boot()
            async with self._host.sandbox(state, "", Network.NONE) as (_, sandbox):
                await self.try_start(state, sandbox)
        return StoredImage(
            name="",
            source=recipe.base,
            digest=f"sha256:{reference.removeprefix(BUILT)}",
            layers=state.layers,
            environment=state.environment,
            folder=state.folder,
            user=state.user,
            shows_host=state.shows_host,
            size_bytes=await self.size_of(state),
            created_at=time.time(),
            start_command=recipe.start_command,
            ready_command=recipe.ready_command,
            network=self._host.network.value,
            history=tuple(f"{step.kind} {' '.join(step.arguments)}"[:200] for step in recipe.steps),
            cached_layers=state.cached,
            made_layers=self._layers.made,
        )

    async def base(self) -> ImageState:
        """Return the base's layers. For the image `host` these are the files that a sandbox of it begins with."""
        base = self._recipe.base
        if base == HOST:
            # The files of /etc that a sandbox of the host gets depend on the host's libraries.
            libraries = await asyncio.to_thread(_host_libraries)
            state = ImageState(
                key=digest_of({"base": HOST, "libraries": libraries}),
                layers=(),
                environment={},
                folder="",
                user="",
                shows_host=True,
            )
            await self._layers.add_layer(state, None, state.key)
            return state
        image = await self._host.sandboxes.store.resolve(base)
        home = self._host.files.home / "layers"
        layers = tuple(path.parent.name if path.is_relative_to(home) else str(path) for path in image.layers)
        await self._layers.lease(layers)
        return ImageState(
            key=digest_of({"base": image.digest, "layers": layers}),
            layers=layers,
            environment=dict(image.environment),
            folder="" if image.folder == "/" else image.folder,
            user=image.user if image.user != "root" else "",
            shows_host=image.shows_host,
        )

    def set_folder(self, state: ImageState, step: BuildStep) -> None:
        path = state.expand(step.arguments[0])
        if not path.startswith("/"):
            path = posixpath.join(state.folder or state.home, path)
        state.folder = posixpath.normpath(path)
        if state.folder != "/":
            operation = {"op": "folder", "path": state.folder, "user": state.user or "root", "step": self.step}
            state.pending.append(operation)

    def _user_operation(self, name: str) -> dict[str, Any]:
        return {"op": "user", "name": name, "create": name == E2B_USER, "step": self.step}

    async def _make_layer(self, state: ImageState, step: BuildStep | None) -> None:
        """Run a step, after the operations that wait for a layer, unless the cache has its layer."""
        shown = "" if step is None else f"{step.kind} {' '.join(step.arguments)}"
        if step is not None and step.kind is StepKind.COPY:
            state.pending.append(self.copy_operation(state, step))
        described = [{name: value for name, value in one.items() if name != "step"} for one in state.pending]
        key = digest_of(
            {
                "parent": state.key,
                "operations": described,
                "run": list(step.arguments) if step is not None and step.kind is StepKind.RUN else [],
                "context": "" if step is None else step.context,
                "environment": state.environment,
                "folder": state.folder,
                "user": state.user,
                "network": self._host.network.value,
            }
        )
        if shown:
            self._log("info", shown[:_MAX_LINE_CHARACTERS], self.step)
        await self._layers.add_layer(state, step, key)
        await self.size_of(state)

    def copy_operation(self, state: ImageState, step: BuildStep) -> dict[str, Any]:
        source, target, owner, mode, *_ = (*step.arguments, "", "")
        if not step.context:
            raise BuildRefused(f"COPY {source}: its files are missing; upload them again", self.step)
        if source.startswith("/") or ".." in source.split("/"):
            raise BuildRefused(f"COPY {source}: the path leads out of the build context", self.step)
        if mode and not (mode.isascii() and mode.isdigit() and len(mode) <= 4 and set(mode) <= set("01234567")):
            raise BuildRefused(f"COPY: the mode {mode[:20]!r} is not an octal number such as 0755", self.step)
        return {
            "op": "copy",
            "source": source,
            "target": state.expand(target),
            "workdir": state.folder or state.home,
            "owner": state.expand(owner) or state.user or "root",
            "mode": int(mode, 8) if mode else None,
            "step": self.step,
        }

    async def try_start(self, state: ImageState, sandbox: Sandbox) -> None:
        """Start the image's command and wait until its ready command succeeds. Raises BuildRefused."""
        recipe, limits = self._recipe, self._host.limits
        user, cwd = state.user or "root", state.folder or "/"
        try:
            if recipe.start_command:
                words = ["/bin/bash", "-c", recipe.start_command]
                await sandbox.spawn(words, user=user, env=state.environment, cwd=cwd)
            if is_check(recipe.ready_command):
                async with asyncio.timeout(limits.ready_s):
                    await wait_until_ready(
                        sandbox, recipe.ready_command, limits.ready_s, user=user, env=state.environment, cwd=cwd
                    )
        except TimeoutError as error:
            message = f"the ready command did not succeed within {limits.ready_s:g} s: {recipe.ready_command[:200]}"
            raise BuildRefused(message, "finalize") from error


def is_check(ready_command: str) -> bool:
    """Return False for an empty ready command, and for one that only sleeps: it would tell nothing about a start
    command, and every create would have to wait for it."""
    words = ready_command.split()
    return bool(words) and not (words[0] == "sleep" and len(words) == 2)


async def wait_until_ready(
    sandbox: Sandbox, command: str, most_s: float, *, user: str, env: Mapping[str, str], cwd: str
) -> None:
    """Repeat the ready command until it succeeds. The caller sets the time limit. Raises SandboxError."""
    while True:
        result = await sandbox.exec(command, user=user, env=dict(env), cwd=cwd, timeout_s=most_s)
        if result.exit_code == 0:
            return
        await asyncio.sleep(_POLL_S)


def _host_libraries() -> str:
    cache = Path("/etc/ld.so.cache")
    return hashlib.sha256(cache.read_bytes() if cache.exists() else b"").hexdigest()
