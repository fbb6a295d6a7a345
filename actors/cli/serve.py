"""The commands `headrace serve ...`: an inference engine, a helper model, a retriever, sandboxes, or a gateway.

Invariant: each prints its URL once it answers; with `--json -` that line is JSON, and with a file, it is also there.
"""

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

from headrace.actors.cli.output import Host, IdleSeconds, Json, KeyFile, Port, addressed, announce, say, with_records
from headrace.actors.errors import ConfigError, RunError
from headrace.serve.gateway.http.options import StandaloneOptions
from headrace.serve.sandbox_servers.exec.options import ServeOptions

if TYPE_CHECKING:
    from headrace.policies.processes.server_process import ServerProcess

serve_app = typer.Typer(
    no_args_is_help=True, help="Serve an engine, a helper model, a retriever, sandboxes or a gateway."
)


class EngineProgram(StrEnum):
    """Program that serves the model."""

    CPU = "cpu"
    """The embedded engine, which serves small Qwen3 and Qwen2.5 models and needs no installation of its own."""
    SGLANG = "sglang"
    """SGLang, in the environment of the guide 'SGLang' or in another one."""


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


@serve_app.command("engine")
def serve_engine(
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
    json: Json = None,
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
        asyncio.run(serve_until_signalled(server, json))


@serve_app.command("model")
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
    json: Json = None,
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

    address_file, announced = addressed(json)
    options = ListenOptions(
        host=host, port=port, address_file=address_file, idle_s=idle_s, key_file=key_file, parent_pid=parent_pid
    )
    foreign = {"device": device.value, "tensor_parallel": tensor_parallel, "dtype": dtype, "python": python}
    with tempfile.TemporaryDirectory(prefix="headrace-model-") as temporary:
        # The engine's log of a run's service is kept, in a folder beside its address file.
        directory = Path(temporary) if address_file is None else address_file.with_suffix("")
        common = {"model": model, "directory": directory, "max_context": max_context}
        process = server_process(backend, common, {**foreign, "arguments": ()}, {"weights": ()})
        asyncio.run(serve_until_idle(model, process, options, announced))


@serve_app.command("retriever")
def serve_corpus(
    corpus: Annotated[Path, typer.Option(help='JSONL file of passages: {"id", "contents"}.')],
    host: Host = "127.0.0.1",
    port: Port = 0,
    json: Json = None,
    idle_s: IdleSeconds = 1800.0,
    key_file: KeyFile = None,
    parent_pid: Annotated[
        int | None, typer.Option(help="Parent process; if it dies before the corpus is indexed, so does the retriever.")
    ] = None,
) -> None:
    """Serve a corpus by BM25: POST /retrieve {queries, topk, return_scores}, as retrievers of Search-R1. Prints the
    URL once the corpus is indexed; stops on SIGTERM or SIGINT."""
    from headrace.actors.services.local_server import ListenOptions
    from headrace.actors.services.retriever_server import serve_retriever

    address_file, announced = addressed(json)
    options = ListenOptions(
        host=host, port=port, address_file=address_file, idle_s=idle_s, key_file=key_file, parent_pid=parent_pid
    )
    serve_retriever(corpus, options, announced)


@serve_app.command("gateway")
@with_records
def serve_gateway(options: StandaloneOptions, json: Json = None) -> None:
    """Serve a token-exact proxy in front of engines. Agents use Anthropic Messages, OpenAI Chat Completions or
    Responses; you get every sampled token: POST /sessions opens a session, POST /sessions/ID/finish returns it."""
    from headrace.serve.gateway.processes.program import serve_gateway

    serve_gateway(options, lambda url: announce(url, json))


@serve_app.command("sandbox")
@with_records
def serve_sandboxes(options: ServeOptions, json: Json = None) -> None:
    """Serve sandboxes over E2B's API (set E2B_API_URL and E2B_SANDBOX_URL to the printed URL), over the API of the
    provider `remote`, and as a drop-in for swe_exec_server and swe_env_pool_server."""
    from headrace.actors.evaluation.graders.patch import apply_patch
    from headrace.serve.sandbox_servers.exec.server import serve

    serve(options, lambda url: announce(url, json), apply_patch)


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


async def serve_until_signalled(server: ServerProcess, json: Path | None) -> None:
    """Run a server until SIGTERM or SIGINT. Raises EngineStartFailed, and RunError if the server exits by itself."""
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
                announce(server.url, json)
                say(f"log: {server.log_path}")
                code = await server.wait()
    except TimeoutError:
        if until_signalled.expired():
            return
        raise
    raise RunError(f"the engine exited by itself with code {code}: {server.log_tail()}")
