"""The commands `headrace engine serve`, which runs one inference server, embedded or SGLang, in the foreground, and
`headrace model serve`, which serves a helper model over Chat Completions."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from pydantic import ValidationError

from headrace.actors.cli.output import AddressFile, Host, IdleSeconds, KeyFile, Port, say
from headrace.actors.errors import ConfigError, RunError

if TYPE_CHECKING:
    from headrace.policies.processes.server_process import ServerProcess

__all__ = ["model_app", "serve"]

model_app = typer.Typer(no_args_is_help=True, help="Serve helper models to environments and evaluators.")


class EngineProgram(StrEnum):
    """Program that serves the model."""

    CPU = "cpu"
    """The embedded engine, which serves small Qwen3 and Qwen2.5 models and needs no installation of its own."""
    SGLANG = "sglang"
    """SGLang, in the environment created by scripts/install sglang or in another one."""


class Device(StrEnum):
    """Device on which SGLang runs."""

    CPU = "cpu"
    CUDA = "cuda"


ModelFolder: TypeAlias = Annotated[Path, typer.Option(help="Model directory, with config.json.")]
EngineBackend: TypeAlias = Annotated[EngineProgram, typer.Option(help="The embedded engine, or SGLang.")]
TensorParallel: TypeAlias = Annotated[
    int, typer.Option(min=1, help="For sglang: number of processes that share the model.")
]
DataType: TypeAlias = Annotated[str, typer.Option(help="For sglang: data type; auto, bfloat16, float16 or float32.")]
SGLangPython: TypeAlias = Annotated[
    Path | None, typer.Option(help="Python interpreter of another environment to run SGLang in.")
]
MaxContext: TypeAlias = Annotated[
    int | None, typer.Option(min=2, help="Maximum number of tokens in prompt and output together.")
]


def serve(
    model: ModelFolder,
    backend: EngineBackend = EngineProgram.CPU,
    device: Annotated[
        Device, typer.Option(help="For sglang: device; cuda needs an environment of its own (--python).")
    ] = (Device.CPU),
    host: Host = "127.0.0.1",
    port: Port = 0,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Private file with the key that each request but /health must carry."),
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="For cpu: folder from which it may be told to load weights, besides --model; repeatable."),
    ] = None,
    weight_version: Annotated[str, typer.Option(help="Label of the weights on disk: epoch.step.")] = "1.0",
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampling.")] = 0,
    max_running: Annotated[int | None, typer.Option(min=1, help="Maximum number of sequences decoded at once.")] = None,
    max_context: MaxContext = None,
    tensor_parallel: TensorParallel = 1,
    dtype: DataType = "auto",
    python: SGLangPython = None,
    directory: Annotated[Path | None, typer.Option(help="Folder for the log; by default a temporary one.")] = None,
    announce: Annotated[
        Path | None, typer.Option(help='File to write {"url", "pid"} to once the server answers.')
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Additional options, passed to sglang.launch_server."),
    ] = None,
) -> None:
    """Serve a model over SGLang's HTTP API. Prints the URL once the server answers; stops on SIGTERM or SIGINT."""
    common = {
        "model": model,
        "host": host,
        "port": port,
        "key_file": key_file,
        "weight_version": weight_version,
        "seed": seed,
        "max_context": max_context,
        **({} if max_running is None else {"max_running": max_running}),
    }
    foreign = {
        "device": device.value,
        "tensor_parallel": tensor_parallel,
        "dtype": dtype,
        "python": python,
        "arguments": tuple(arguments or ()),
    }
    embedded = {"weights": tuple(weights or ())}
    with tempfile.TemporaryDirectory(prefix="headrace-engine-") as temporary:
        common["directory"] = directory or Path(temporary)
        server = server_process(backend, common, foreign, embedded)
        asyncio.run(serve_until_signalled(server, announce))


@model_app.command("serve")
def serve_model(
    model: ModelFolder,
    backend: EngineBackend = EngineProgram.CPU,
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
    from headrace.actors.services.model_server import serve_model as serve_until_idle

    options = ListenOptions(
        host=host, port=port, address_file=address_file, idle_s=idle_s, key_file=key_file, parent_pid=parent_pid
    )
    foreign = {"device": device.value, "tensor_parallel": tensor_parallel, "dtype": dtype, "python": python}
    with tempfile.TemporaryDirectory(prefix="headrace-model-") as temporary:
        # The engine's log of a run's service is kept, in a folder beside its address file.
        directory = Path(temporary) if address_file is None else address_file.with_suffix("")
        common = {"model": model, "directory": directory, "max_context": max_context}
        process = server_process(backend, common, {**foreign, "arguments": ()}, {"weights": ()})
        asyncio.run(serve_until_idle(model, process, options, typer.echo))


def server_process(
    backend: EngineProgram, common: dict[str, Any], foreign: dict[str, Any], embedded: dict[str, Any]
) -> ServerProcess:
    """Return the configured server, which has not been started yet. Raises ConfigError."""
    from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
    from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig

    if not (common["model"] / "config.json").is_file():
        raise ConfigError(f"--model {common['model']}: the directory has no config.json; name a model directory")
    try:
        if backend is EngineProgram.SGLANG:
            if embedded["weights"]:
                raise ConfigError("--weights: available only with --backend cpu; SGLang loads any directory")
            return SGLangProcess(SGLangServerConfig.model_validate(common | foreign))
        refuse_foreign(foreign, {key: SGLangServerConfig.model_fields[key].default for key in foreign})
        return EngineProcess(EngineProcessConfig.model_validate(common | embedded))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from error


def refuse_foreign(foreign: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse options that only SGLang has. Raises ConfigError."""
    given = [key for key, value in foreign.items() if value != defaults[key]]
    if given:
        names = [f"--{key.replace('_', '-')}" if key != "arguments" else f"-- {foreign[key][0]}" for key in given]
        raise ConfigError(f"{', '.join(names)}: available only with --backend sglang")


async def serve_until_signalled(server: ServerProcess, announcement: Path | None) -> None:
    """Run a server until SIGTERM or SIGINT. Raises EngineStartFailed, and RunError if the server exits by itself."""
    from headrace.policies.processes.server_process import announce

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as until_signalled:

            def end() -> None:
                # A second signal comes when the timeout is expiring already, and cannot be rescheduled.
                with suppress(RuntimeError):
                    until_signalled.reschedule(loop.time())

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end)
            async with server:
                if announcement is not None:
                    announce(announcement, server.url)
                typer.echo(server.url)
                say(f"log: {server.log_path}")
                code = await server.wait()
    except TimeoutError:
        if until_signalled.expired():
            return
        raise
    raise RunError(f"the engine exited by itself with code {code}: {server.log_tail()}")
