"""The command `headrace model serve`, which serves a helper model over Chat Completions in the foreground."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.engine import (
    Backend,
    DataType,
    Device,
    EngineBackend,
    MaxContext,
    ModelFolder,
    SGLangPython,
    TensorParallel,
    server_process,
)
from headrace.actors.cli.output import AddressFile, Host, IdleSeconds, KeyFile, Port

model_app = typer.Typer(no_args_is_help=True, help="Serve helper models to environments and evaluators.")


@model_app.command()
def serve(
    model: ModelFolder,
    backend: EngineBackend = Backend.CPU,
    device: Annotated[Device, typer.Option(help="For sglang: device.")] = (Device.CPU),
    tensor_parallel: TensorParallel = 1,
    dtype: DataType = "auto",
    python: SGLangPython = None,
    max_context: MaxContext = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    address_file: AddressFile = None,
    idle_s: IdleSeconds = 1800.0,
    key_file: KeyFile = None,
    parent_pid: Annotated[
        int | None, typer.Option(help="Parent process; if it dies before the model is loaded, so does the server.")
    ] = None,
) -> None:
    """Serve a model: POST /v1/chat/completions, with the request's own temperature and top_p. The engine belongs to no
    run. Prints the URL once it answers; stops on SIGTERM or SIGINT."""
    from headrace.actors.services.local_server import ListenOptions
    from headrace.actors.services.model_server import serve_model

    options = ListenOptions(
        host=host, port=port, address_file=address_file, idle_s=idle_s, key_file=key_file, parent_pid=parent_pid
    )
    foreign = {"device": device.value, "tensor_parallel": tensor_parallel, "dtype": dtype, "python": python}
    with tempfile.TemporaryDirectory(prefix="headrace-model-") as temporary:
        # The engine's log of a run's service is kept, in a folder beside its address file.
        directory = Path(temporary) if address_file is None else address_file.with_suffix("")
        common = {"model": model, "directory": directory, "max_context": max_context}
        process = server_process(backend, common, {**foreign, "arguments": ()}, {"weights": ()})
        asyncio.run(serve_model(model, process, options, typer.echo))
