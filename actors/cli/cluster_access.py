"""Access of commands to the runs of a cluster: over its control API (`--url`), which needs no Ray here, or over Ray on
one of its nodes (`--address`), which needs no API there."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, get_type_hints

import orjson
import typer

from headrace.actors.cluster.runs.contract import Method, RunsApi, RunsClient
from headrace.actors.cluster.runs.records import Caller, Recipe, RunId
from headrace.actors.errors import ConfigError, RunUnknown

if TYPE_CHECKING:
    from headrace.actors.run.placement import ClusterSection

P = ParamSpec("P")
R = TypeVar("R")

RUN_ID: Final = re.compile(r"[0-9a-f]{32}")


class Access(ABC):
    """Access to the runs of a cluster. A run is named by its id, or by its name: then the newest run of that name is
    meant."""

    @property
    @abstractmethod
    def options(self) -> str:
        """Options with which a command has this access."""

    @abstractmethod
    def ask(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        """Return the result of `work` with a client. Raises ConfigError and the errors of the client."""

    @abstractmethod
    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """Return the tables of a recipe, as they are submitted. Raises ConfigError."""

    def call(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of an operation."""
        return self.ask(lambda client: client.ask(method, *arguments, **named))

    def call_on(
        self,
        method: Callable[Concatenate[RunsApi, Caller, RunId, P], Awaitable[R]],
        run: str,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Return the result of an operation on the run that the user named."""

        async def work(client: RunsClient) -> R:
            return await client.ask(method, await run_id_of(client, run), *arguments, **named)

        return self.ask(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCluster(Access):
    """The runs of one owner, over Ray from a node of the cluster at `address`. `section` starts the actor that
    supervises runs, for a submission."""

    address: str
    owner: str
    quotas: Path | None = None
    section: ClusterSection | None = None

    @property
    def options(self) -> str:
        return f"--address {self.address} --owner {self.owner}"

    def ask(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        """See `Access.ask`. Raises StartFailed as well."""
        from headrace.actors.cluster.nodes.connection import connected
        from headrace.actors.cluster.runs.client import ClusterClient, find_runs, start_runs

        async def asked() -> R:
            section = self.section
            runs = await (find_runs() if section is None else start_runs(section, quotas=self.quotas))
            return await work(ClusterClient(runs, self.owner))

        with connected(self.address):
            return asyncio.run(asked())

    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """See `Access.document`. Paths are relative to the recipe: this is a node of the cluster."""
        from headrace.actors.run.config import absolute_paths, read_recipe

        return absolute_paths(read_recipe(recipe, overrides), recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Access):
    """A control API and the file with the user's key."""

    url: str
    key_file: Path | None

    @property
    def options(self) -> str:
        return f"--url {self.url}"

    def ask(self, work: Callable[[RunsClient], Awaitable[R]]) -> R:
        """See `Access.ask`."""
        from headrace.actors.cluster.api.client import ControlClient, read_key

        if self.key_file is None:
            raise ConfigError("--key-file is missing: name the file with your key for --url (or set HEADRACE_KEY_FILE)")
        key = read_key(self.key_file)

        async def asked() -> R:
            async with ControlClient(self.url, key) as client:
                return await work(client)

        return asyncio.run(asked())

    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """See `Access.document`. Paths must be absolute: this machine is no node of the cluster, and relative ones
        would mean nothing there."""
        from headrace.actors.run.config import named_paths, read_recipe

        document = read_recipe(recipe, overrides)
        for name, above, key in named_paths(document):
            if not Path(above[key]).is_absolute():
                raise ConfigError(
                    f"{recipe}: {name} {above[key]!r} is relative: on a cluster, write an absolute path of its nodes "
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a command that name a cluster."""

    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="Ray cluster, HOST:PORT of its head, or `auto` on one of its nodes (docs/cluster.md)."
        ),
    ] = None
    owner: Annotated[
        str, typer.Option("--owner", help="Owner of the runs, with --address; by default your user name.")
    ] = ""
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="HEADRACE_URL", help="Control API of a cluster, http://host:port (docs/control_api.md)."
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", envvar="HEADRACE_KEY_FILE", help="File with your key for --url, readable by you only."
        ),
    ] = None

    def access(self) -> Access | None:
        """Return the access that the options name; None for the runs of this machine. Raises ConfigError."""
        if self.address is not None:
            if self.url is not None:
                raise ConfigError("--url and --address name two ways to the runs: use one")
            return OnCluster(address=self.address, owner=self.owner or user_here())
        return None if self.url is None else Api(url=self.url, key_file=self.key_file)

    def required(self) -> Access:
        """Return the access that the options name. Raises ConfigError if they name none."""
        if (found := self.access()) is None:
            raise ConfigError("this is for runs of a cluster: name it with --address or --url")
        return found

    def submission(self, recipe: Path, overrides: Sequence[str], quotas: Path | None) -> Access | None:
        """Return the access to the cluster on which a recipe is to run, by the options or by its own
        `cluster.address`; None to run it here. Raises ConfigError."""
        from headrace.actors.run.config import read_recipe
        from headrace.actors.run.placement import LOCAL, cluster_section

        if self.url is not None:
            return self.access()
        given = read_recipe(recipe, overrides).get("cluster", {})
        is_ours = self.address is not None and isinstance(given, dict)
        section = cluster_section(given | {"address": self.address} if is_ours else given)
        if section.address == LOCAL:
            return None
        return OnCluster(
            address=section.address,
            owner=self.owner or user_here(),
            quotas=quotas and quotas.resolve(),
            section=section,
        )


def on_cluster(command: Callable[..., None], *, leave_out: Collection[str] = ()) -> Callable[..., None]:
    """Give a command the options of `ClusterOptions`, save those to leave out, in place of its parameter `cluster`."""
    hints = get_type_hints(ClusterOptions, include_extras=True)
    # A command may have a parameter of the same name, such as the URL of an engine.
    options = {f"cluster_{field.name}": field for field in fields(ClusterOptions) if field.name not in leave_out}
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in own if one.name != "cluster"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for name, field in options.items()
    ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        cluster = ClusterOptions(**{field.name: given.pop(name) for name, field in options.items()})
        command(**given, cluster=cluster)

    # Typer reads both.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


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
