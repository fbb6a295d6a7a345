"""Options of commands that serve something over HTTP, which all of them spell alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Host: TypeAlias = Annotated[
    str, typer.Option(help="Address to bind; any address other than loopback requires --key-file.")
]
Port: TypeAlias = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
AddressFile: TypeAlias = Annotated[
    Path | None, typer.Option(help='File to write {"url", "pid", ...} to once the server answers.')
]
IdleSeconds: TypeAlias = Annotated[float, typer.Option(min=0.1, help="Seconds without a request after which it ends.")]
KeyFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Private file with the key that each request must carry.")
]
