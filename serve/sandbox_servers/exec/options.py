"""Options of `headrace serve sandbox`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the server. For an empty or missing limit, the provider has a default."""

    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0
    host: Annotated[str, Option(help="Address to bind; any address other than loopback requires --keys.")] = "127.0.0.1"
    image_map: Annotated[
        Path | None, Option(help="TOML or JSON file that maps template names to image references.")
    ] = None
    metadata_image_key: Annotated[str, Option(help="Metadata key of create requests that names the image.")] = ""
    keys: Annotated[
        Path | None, Option(help="File of API keys, one `name:key[:max_sandboxes]` per line, or more (docs).")
    ] = None
    state: Annotated[Path | None, Option(help="Folder for the sandbox table; by default it is kept in memory.")] = None
    keep_sandboxes: Annotated[
        bool, Option("--keep-sandboxes", help="Keep sandboxes at shutdown for the next server with the same --state.")
    ] = False
    domain: Annotated[
        str,
        Option(help="Domain of the host names of ports; by default localhost with the port of this server."),
    ] = ""
    sudo: Annotated[
        bool, Option("--sudo/--no-sudo", help="Let the users of E2B sandboxes run commands as root with sudo.")
    ] = True
    image_folder: Annotated[Path | None, Option(help="Folder of the image store; by default in the user's cache.")] = (
        None
    )
    max_sandboxes: Annotated[int | None, Option(min=1, help="Maximum number of sandboxes, alive or frozen.")] = None
    memory: Annotated[str, Option(help="Memory of a sandbox, such as 2G.")] = ""
    disk: Annotated[str, Option(help="Size of a sandbox's file layer, such as 1G.")] = ""
    processes: Annotated[int | None, Option(min=8, help="Maximum number of processes of a user in it.")] = None
    files: Annotated[int | None, Option(min=64, help="Maximum number of open files of a process in it.")] = None
    api: Annotated[str, Option(help="APIs to serve, separated by commas: e2b, exec, dropin.")] = "e2b,exec,dropin"
    lease_s: Annotated[float, Option(help="Seconds after which an unused drop-in container is removed.")] = 900
    host_url: Annotated[
        list[str] | None,
        Option(help="URL of an exec server whose sandboxes are served instead of local ones; may be repeated."),
    ] = None
    host_key: Annotated[Path | None, Option(help="File with the key of the exec servers given by --host-url.")] = None
    build_network: Annotated[
        str,
        Option(
            help="Network of the RUN steps of template builds: none, or host for the host's own.",
        ),
    ] = "none"
