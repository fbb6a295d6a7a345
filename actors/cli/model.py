"""The command `headrace model serve`, which serves a helper model over Chat Completions in the foreground."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.engine import Backend, Device, server_process

model_app = typer.Typer(no_args_is_help=True, help="Serve helper models to environments and evaluators.")


@model_app.command()
def serve(
    model: Annotated[Path, typer.Option(help="Model directory, with config.json.")],
    backend: Annotated[Backend, typer.Option(help="The embedded engine, or SGLang.")] = Backend.CPU,
    device: Annotated[Device, typer.Option(help="For sglang: device.")] = (Device.CPU),
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="For sglang: number of processes that share the model.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="For sglang: data type; auto, bfloat16, float16 or float32.")] = "auto",
    python: Annotated[
        Path | None, typer.Option(help="Python interpreter of another environment to run SGLang in.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Maximum number of tokens in prompt and output together.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; any address other than loopback requires --key-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0,
    address_file: Annotated[
        Path | None, typer.Option(help='File to write {"url", "pid", ...} to once the server answers.')
    ] = None,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Seconds without a request after which it ends.")] = 1800.0,
    key_file: Annotated[
        Path | None, typer.Option(help="Private file with the key that each request must carry.")
    ] = None,
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
