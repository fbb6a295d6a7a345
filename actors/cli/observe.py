"""The command `headrace observe`, which serves the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.listening import AddressFile, Host, KeyFile, Port  # noqa: TC001 - typer reads them

__all__ = ["observe"]


def observe(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    key_file: KeyFile = None,
    address_file: AddressFile = None,
) -> None:
    """Serve the page of a run: what it does, which rollouts were slow and why, each rollout with its text. It reads the
    run directory only, so the run may be going on, over, killed, or a copy. Prints the URL with the token that the page
    needs (without it if --key-file has one); stops on SIGTERM or SIGINT."""
    import asyncio

    from headrace.actors.observer.server import ObserveOptions
    from headrace.actors.observer.server import observe as serve_page

    options = ObserveOptions(host=host, port=port, key_file=key_file, address_file=address_file)
    asyncio.run(serve_page(run_dir, options, typer.echo))
