"""Access of commands to the runs of a cluster: over its control API (`--url`), which needs no Ray here, or over Ray on
one of its nodes (`--address`), which needs no API there.

Invariant: a run is named by its id, or by its name: then the newest run of that name is meant.
"""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Concatenate, ParamSpec, TypeVar

import orjson
import typer

from headrace.actors.cluster.runs.contract import Method, RunsApi, RunsClient
from headrace.actors.cluster.runs.records import RUN_ID, Caller, Recipe, RunId
from headrace.actors.errors import ConfigError, RunUnknown

if TYPE_CHECKING:
    from headrace.actors.cluster.runs.runs import Runs
    from headrace.actors.run.placement import ClusterSection

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of a command that name a cluster, and access to its runs. Without `address` and `url` the command is for
    runs of this machine."""

    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Ray cluster: HOST:PORT of its head, or `auto` on a node (guide 'Runs on a cluster').",
        ),
    ] = None
    owner: Annotated[
        str, typer.Option("--owner", help="Owner of the runs, with --address; by default your user name.")
    ] = ""
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="HEADRACE_URL", help="Control API, http://host:port (guide 'Control API of a cluster')."
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", envvar="HEADRACE_KEY_FILE", help="File with your key for --url, readable by you only."
        ),
    ] = None

    def __bool__(self) -> bool:
        """Return True if a cluster is named. Raises ConfigError if two are."""
        if self.address is not None and self.url is not None:
            raise ConfigError("--url and --address name two ways to the runs: use one")
        return self.address is not None or self.url is not None

    def __str__(self) -> str:
        """Return the options, for a command to type."""
        return f"--url {self.url}" if self.address is None else f"--address {self.address} --owner {self.user}"

    @property
    def user(self) -> str:
        """Owner of the runs over Ray."""
        return self.owner or user_here()

    def ask(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        """Return the result of `work` with a client. Raises ConfigError, StartFailed, and the errors of the client."""
        if not self:
            raise ConfigError("this is for runs of a cluster: name it with --address or --url")
        if self.address is not None:
            from headrace.actors.cluster.nodes.connection import connected

            with connected(self.address):
                return asyncio.run(self._over_ray(work))
        return asyncio.run(self._over_http(work))

    async def _over_ray(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        from headrace.actors.cluster.runs.client import ClusterClient

        return await work(ClusterClient(await self._runs(), self.user))

    async def _runs(self) -> Runs:
        from headrace.actors.cluster.runs.client import find_runs

        return await find_runs()

    async def _over_http(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        from headrace.actors.cluster.api.client import ControlClient, read_key

        if self.key_file is None:
            raise ConfigError("--key-file is missing: name the file with your key for --url (or set HEADRACE_KEY_FILE)")
        assert self.url is not None
        async with ControlClient(self.url, read_key(self.key_file)) as client:
            return await work(client)

    def call(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of an operation."""
        return self.ask(lambda client: client.ask(method, *arguments, **named))

    def call_on(
        self,
        method: Callable[Concatenate[RunsApi, Caller, RunId, P], Awaitable[R]],
        run: object,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Return the result of an operation on the run that the user named."""

        async def work(client: RunsClient) -> R:
            return await client.ask(method, await run_id_of(client, str(run)), *arguments, **named)

        return self.ask(work)

    def document(self, recipe: Path, overrides: Sequence[str], on: Sequence[Path] = ()) -> Recipe:
        """Return the tables of a recipe with machine files, as they are submitted. On a node of the cluster, paths are
        relative to the file that has them. Elsewhere relative ones would mean nothing. Raises ConfigError."""
        from headrace.actors.run.config import absolute_paths, named_paths, read_file
        from headrace.actors.run.overlays import layered

        # Whoever submits to the API knows neither address nor folders of the cluster.
        document = layered(recipe, on, overrides, decided=() if self.address else ("cluster.",)).document
        if self.address is not None:
            return absolute_paths(document, recipe)
        for file, given in ((recipe, document), *((path, read_file(path)) for path in on)):
            for name, above, key in named_paths(given):
                if not Path(above[key]).is_absolute():
                    raise ConfigError(
                        f"{file}: {name} {above[key]!r} is relative: on a cluster, write an absolute path of its nodes "
                        f"(--set {name}=/...)"
                    )
        for table, keys in document.items():
            if not isinstance(keys, dict):
                raise ConfigError(f"{recipe}: {table} must be a table; write its keys below [{table}]")
        try:
            orjson.dumps(document)
        except orjson.JSONEncodeError as error:
            raise ConfigError(f"{recipe}: has a value that JSON cannot express ({error}): change it") from error
        return document


@dataclass(frozen=True, kw_only=True)
class FirstAccess(ClusterOptions):
    """Access for a submission over Ray, which starts the actor that supervises runs if there is none."""

    section: ClusterSection
    quotas: Path | None

    async def _runs(self) -> Runs:
        from headrace.actors.cluster.runs.client import start_runs

        return await start_runs(self.section, quotas=self.quotas)


def access_for(
    recipe: Path, overrides: Sequence[str], cluster: ClusterOptions, quotas: Path | None, on: Sequence[Path] = ()
) -> ClusterOptions | None:
    """Return the access to the cluster on which a recipe with machine files is to run, by the options or by its own
    `cluster.address`; None to run it here. Raises ConfigError."""
    from headrace.actors.run.overlays import layered
    from headrace.actors.run.placement import LOCAL, cluster_section

    if cluster and cluster.url is not None:
        return cluster
    section = cluster_section(layered(recipe, on, overrides).document.get("cluster", {}))
    if section.address == LOCAL:
        return None
    quotas = quotas and quotas.resolve()
    return FirstAccess(address=section.address, owner=cluster.owner, section=section, quotas=quotas)


def user_here() -> str:
    """Return the name of this process' user, who may have no account on this machine (in a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


async def run_id_of(client: RunsClient, run: str) -> RunId:
    """Return the id of the run that the user named. Raises RunUnknown."""
    if RUN_ID.fullmatch(run):
        return RunId(run)
    named = [record for record in await client.ask(RunsApi.runs) if record.name == run]
    if not named:
        raise RunUnknown(f"there is no run {run!r}: `headrace status` lists the runs that your key may see")
    return max(named, key=lambda record: record.submitted_s).run_id
