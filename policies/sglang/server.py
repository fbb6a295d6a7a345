"""SGLang server process, in the environment of `scripts/install sglang` or in another one.

Invariants:
- From the start, the server and its child processes die with this process, even if this process is killed with kill -9.
- The server inherits only those environment variables that describe the machine (paths, devices, caches).
- The key is in no argument: the server reads it from a private YAML file (`--config`), in its own process.
- The server is ready when it is itself listening and answers /health with 200: by then the weights have been loaded and
  one warm-up generation is done. /health never generates, so that it answers during pauses.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from headrace.buffer.primitives.durable_files import write_private
from headrace.policies.errors import EngineSettingsInvalid, EngineStartFailed
from headrace.policies.processes import parent_death
from headrace.policies.processes.engine_keys import read_engine_key
from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess, option_list
from headrace.policies.sglang.installation import SHIMS, environment_python
from headrace.policies.sglang.sources import check_sources
from headrace.policies.sglang.versions import DEFAULT_VERSION, release
from headrace.sandboxes.host.child_environment import child_environment

PORT_ATTEMPTS = 3
OWN_OPTIONS = ("--api-key", "--admin-api-key", "--config")
"""Options that would contradict the key that the server gets from us."""
ASK_TIMEOUT_S = 10.0
CPU_TOTAL_TOKENS = 20_000
INHERITED = (
    *("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "HF_HOME"),
)
INHERITED_PREFIXES = ("LC_", "NCCL_", "GLOO_")
PASSED_PREFIXES = ("SGLANG_", "FLASHINFER_", "TORCHINDUCTOR_", "TRITON_", "NCCL_", "GLOO_")
"""Beginnings of the variables that a recipe may give to servers."""
OWN_ENVIRONMENT = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # Longer than clients keep idle connections, else a call may use one that the server is just closing.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "300",
}


class SGLangServerConfig(ServerConfig):
    """Settings of one SGLang server process."""

    python: Path | None = None
    """Interpreter of the environment with SGLang; None uses the installed one (guide 'SGLang')."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the server: `cpu` needs none of SGLang's kernels; `cuda` needs an environment with all of SGLang's
    requirements."""
    devices: tuple[str, ...] = ()
    """CUDA devices of the server, as CUDA_VISIBLE_DEVICES names them; if empty, it sees those of this process."""
    name: str = "sglang"
    """Stem of the log file's name."""
    max_running: int | None = Field(default=None, gt=0)
    """Maximum number of sequences decoded concurrently; None uses SGLang's default."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Number of processes, and devices, over which the model is split."""
    nodes: int = Field(default=1, gt=0)
    """Number of hosts among which these devices are divided, with one server process on each; it divides them."""
    rank: int = Field(default=0, ge=0)
    """Number of this host among them; only the one on host 0 answers requests."""
    coordinator: str = ""
    """HOST:PORT on host 0, at which they find each other."""
    data_parallel: int = Field(default=1, gt=0)
    """Groups of these devices that compute attention for requests of their own."""
    expert_parallel: int = Field(default=1, gt=0)
    """Number of these devices among which the experts of a layer are divided."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the served weights; `auto` uses the model's."""
    report_times: bool = True
    """Start the server with `--enable-metrics`: each reply then reports the time in the queue and to the first token,
    and the server answers /metrics, without a key."""
    traces_url: str = ""
    """OTLP/HTTP receiver to which the server sends spans of its requests (`--enable-trace`); empty for none."""
    arguments: tuple[str, ...] = ()
    """Additional options for sglang.launch_server; they override the others."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the server."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Time limit from start to the first answer; on a CPU, imports take most of it."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """Time from SIGTERM, after which SGLang finishes running requests, to SIGKILL."""


class SGLangProcess(ServerProcess):
    """SGLang server process: `async with SGLangProcess(config) as server: server.url`. Raises EngineStartFailed with
    the end of the log."""

    def __init__(self, config: SGLangServerConfig) -> None:
        super().__init__(config)
        self._config = config
        self._port = config.port

    async def start(self) -> None:
        """Start the server and wait until it answers. If its free port has been taken in the meantime, try another one.
        Raises EngineStartFailed, without leaving a process behind."""
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._port = self._config.port or free_port(self._config.host)
            try:
                return await super().start()
            except EngineStartFailed as error:
                lost = not self._config.port and "address already in use" in str(error).lower()
                if not lost or attempt == PORT_ATTEMPTS:
                    raise
        return None

    async def _prepare(self) -> ServerCommand:
        config = self._config
        if not (config.model / "config.json").is_file():
            raise EngineSettingsInvalid(f"engine {config.name}: {config.model} has no config.json")
        if config.port and is_taken(config.host, config.port):
            raise EngineSettingsInvalid(f"engine {config.name}: port {config.port} of {config.host} is taken")
        python = find_python(config.python, config.device)
        version, package = await installed_package(python)
        await asyncio.to_thread(check_sources, package)
        watched = (sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()))
        options = (*self._key_options(), *server_arguments(config, self._port, version))
        served = (str(python), "-m", "sglang.launch_server", *options)
        return ServerCommand(arguments=(*watched, *served), environment=server_environment(config))

    def _key_options(self) -> tuple[str, ...]:
        key = read_engine_key(self._config.key_file, f"engine {self.name}: key file")
        if key is None:
            return ()
        if refused := [name for argument in self._config.arguments if (name := argument.split("=")[0]) in OWN_OPTIONS]:
            raise EngineSettingsInvalid(
                f"engine {self.name}: {refused[0]} cannot be combined with a key file; remove it"
            )
        path = self._config.directory / f"{self.name}.yaml"
        # A JSON string is a YAML string, also if all its characters are digits.
        write_private(path, f"api-key: {json.dumps(key)}\n".encode())
        return ("--config", str(path))

    async def _ready_url(self) -> str | None:
        # Another process that listens there must not be taken for our server.
        if not await asyncio.to_thread(listens, self.pid, self._port):
            return None
        url = f"http://{reachable(self._config.host)}:{self._port}"
        return url if await is_healthy(url) else None


def find_python(named: Path | None, device: str) -> Path:
    """Return the interpreter to start: the given one; on a CPU that of the installed environment, whose build has no
    kernels for GPUs, and there this process's own. Raises EngineStartFailed with instructions if there is none."""
    python = named or (environment_python() if device == "cpu" else Path(sys.executable))
    if device == "cuda" and named is None and find_spec("sglang") is None:
        raise EngineSettingsInvalid(
            f"SGLang for CUDA is not in the environment of {sys.executable}: set engines.sglang.python (--python) to "
            f"the interpreter of one that has it (`pip install sglang=={DEFAULT_VERSION}` in an environment of its own)"
        )
    if python is None:
        raise EngineSettingsInvalid(
            f"SGLang {DEFAULT_VERSION} is not installed: run `python -m headrace.policies.sglang.installation`"
        )
    if not os.access(python, os.X_OK):
        raise EngineSettingsInvalid(f"{python} is not executable: set the python of an environment with SGLang")
    return python


async def installed_package(python: Path) -> tuple[str, Path]:
    """Return the version and the directory of SGLang in that environment, which is not imported. Raises
    EngineStartFailed."""
    code = (
        "from importlib import metadata, util; print(metadata.version('sglang')); "
        "print(util.find_spec('sglang').submodule_search_locations[0])"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", code, stdout=pipe, stderr=pipe, env=child_environment()
    )
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise EngineStartFailed(f"{python} did not report its version of SGLang within {ASK_TIMEOUT_S} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise EngineSettingsInvalid(f"{python} has no SGLang: {reason}")
    version, package = output.decode().split("\n")[:2]
    return version, Path(package)


def server_arguments(config: SGLangServerConfig, port: int, version: str) -> tuple[str, ...]:
    """Return the arguments for sglang.launch_server. The user's come last, and take precedence."""
    options = {
        "--model-path": config.model,
        "--host": config.host,
        "--port": port,
        "--weight-version": config.weight_version,
        "--random-seed": config.seed,
        "--tp-size": config.tensor_parallel,
        "--dtype": config.dtype,
        "--max-running-requests": config.max_running,
        "--context-length": config.max_context,
    }
    if config.nodes > 1:
        options |= {"--nnodes": config.nodes, "--node-rank": config.rank, "--dist-init-addr": config.coordinator}
    if config.expert_parallel > 1:
        options["--ep-size"] = config.expert_parallel
    groups: tuple[str, ...] = ()
    if config.data_parallel > 1:
        # The older spelling is deprecated since 0.5.23.
        old = ("--dp-size", str(config.data_parallel), "--enable-dp-attention")
        groups = ("--attn-dp-size", str(config.data_parallel)) if release(version) >= (0, 5, 23) else old
    device = cpu_arguments(version) if config.device == "cpu" else ("--device", "cuda")
    times = ("--enable-metrics",) if config.report_times else ()
    traces = ("--enable-trace", "--otlp-traces-endpoint", config.traces_url) if config.traces_url else ()
    return (*option_list(options), *groups, *device, *times, *traces, *config.arguments)


def cpu_arguments(version: str) -> tuple[str, ...]:
    """Return arguments for plain torch: SGLang's CPU kernels need AMX and a separate build."""
    graphs: tuple[str, ...] = ("--disable-cuda-graph",)
    # Deprecated since 0.5.22.
    if release(version) >= (0, 5, 22):
        graphs = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
    plain = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    memory = ("--max-total-tokens", str(CPU_TOTAL_TOKENS), "--mem-fraction-static", "0.2")
    # Without --sleep-on-idle the scheduler spins and occupies a core.
    return ("--device", "cpu", *plain, *memory, *graphs, "--sleep-on-idle")


def server_environment(config: SGLangServerConfig) -> dict[str, str]:
    """Return the server's environment: inherited variables, and settings that SGLang reads from the environment."""
    settings = OWN_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    if config.device == "cpu":
        settings |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS)}
        settings |= {"TOKENIZERS_PARALLELISM": "false"}
        if config.tensor_parallel > 1:
            # Without this SGLang requires a NUMA node for each rank.
            settings |= {"SGLANG_CPU_OMP_THREADS_BIND": shares_of(os.sched_getaffinity(0), config.tensor_parallel)}
    if config.traces_url:
        settings |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    if config.devices:
        settings |= {"CUDA_VISIBLE_DEVICES": ",".join(config.devices)}
    inherited = {
        key: value for key, value in os.environ.items() if key in INHERITED or key.startswith(INHERITED_PREFIXES)
    }
    return inherited | config.environment | settings


def shares_of(cores: Iterable[int], ranks: int) -> str:
    """Return each rank's cores in SGLang's format, `0,2|1,3`. With fewer cores than ranks, some ranks share a core."""
    given = sorted(cores)
    return "|".join(",".join(map(str, given[rank::ranks] or [given[rank % len(given)]])) for rank in range(ranks))


def free_port(host: str) -> int:
    """Return a port on which nothing is listening now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_taken(host: str, port: int) -> bool:
    """Return True if the port is taken: SGLang itself would notice only after loading the model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def listens(pid: int, port: int) -> bool:
    """Return True if the process itself is listening on the port."""
    try:
        sockets: Iterable[psutil.pconn] = psutil.Process(pid).net_connections("tcp")
        return any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in sockets)
    except psutil.NoSuchProcess:
        return False


def reachable(host: str) -> str:
    """Return the address at which a server bound to `host` can be called."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


async def is_healthy(url: str) -> bool:
    """Return True if /health answers 200."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
