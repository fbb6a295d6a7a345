"""A genuine SGLang server of ours, in the environment that `scripts/install_sglang` made or in another one.

Invariants:
- It and all that it starts die with this process, also under kill -9 of it, from the first moment on.
- Nothing of this process's environment reaches it but what names the machine (paths, devices, caches).
- It counts as ready when it listens itself, and answers /health with 200: weights are loaded and one warm-up
  generation is done. /health never generates, so that it answers through pauses.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import Field

from headrace.policies.errors import EngineSettingsInvalid, EngineStartFailed
from headrace.policies.processes import parent_death
from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess, option_list
from headrace.policies.sglang.installation import SHIMS, environment_python
from headrace.policies.sglang.versions import DEFAULT_VERSION, release

if TYPE_CHECKING:
    from collections.abc import Iterable

PORT_ATTEMPTS = 3
ASK_TIMEOUT_S = 10.0
CPU_TOTAL_TOKENS = 20_000
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "HF_HOME"),
)
PASSED_ON_PREFIXES = ("LC_", "NCCL_", "GLOO_")


class SGLangServerConfig(ServerConfig):
    """How to start one SGLang server."""

    python: Path | None = None
    """Interpreter of the environment that SGLang is in; None takes what scripts/install_sglang made."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu needs none of SGLang's kernels; cuda needs an environment with all that SGLang asks for."""
    name: str = "sglang"
    """Stem of the log's file name."""
    max_running: int | None = Field(default=None, gt=0)
    """Sequences decoded at once; None takes SGLang's default."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Processes, and devices, that share the model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the weights while they are served; auto takes the model's own."""
    arguments: tuple[str, ...] = ()
    """More options of sglang.launch_server; they override ours."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """From start to the first answer; on a CPU most of it is imports."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """From SIGTERM, at which SGLang lets running requests end, to SIGKILL."""


class SGLangProcess(ServerProcess):
    """`async with SGLangProcess(config) as server: server.url`. Raises EngineStartFailed with the end of the log."""

    def __init__(self, config: SGLangServerConfig) -> None:
        super().__init__(config)
        self._config = config
        self._port = config.port

    async def start(self) -> None:
        """Start and wait until it answers. A free port that somebody else took meanwhile is tried again with another.
        Raises EngineStartFailed; nothing is left behind then."""
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
            raise EngineSettingsInvalid(f"engine {config.name}: there is no config.json in {config.model}")
        if config.port and is_taken(config.host, config.port):
            raise EngineSettingsInvalid(f"engine {config.name}: port {config.port} of {config.host} is taken")
        python = find_python(config.python)
        version = await installed_version(python)
        watched = (sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()))
        served = (str(python), "-m", "sglang.launch_server", *server_arguments(config, self._port, version))
        return ServerCommand(arguments=(*watched, *served), environment=server_environment(config))

    async def _ready_url(self) -> str | None:
        # Whoever else listens there must not be taken for our server.
        if not await asyncio.to_thread(listens, self.pid, self._port):
            return None
        url = f"http://{reachable(self._config.host)}:{self._port}"
        return url if await is_healthy(url) else None


def find_python(named: Path | None) -> Path:
    """The interpreter to start: the named one, or that of our own environment. Raises EngineStartFailed, which says how
    to get one."""
    python = named or environment_python()
    if python is None:
        raise EngineSettingsInvalid(f"SGLang {DEFAULT_VERSION} is not installed: run `scripts/install_sglang`")
    if not os.access(python, os.X_OK):
        raise EngineSettingsInvalid(f"{python} cannot be run: name the python of an environment with SGLang")
    return python


async def installed_version(python: Path) -> str:
    """The version of SGLang in that environment. Raises EngineStartFailed."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(python, "-I", "-c", code, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise EngineStartFailed(f"{python} did not tell its version of SGLang within {ASK_TIMEOUT_S} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise EngineSettingsInvalid(f"{python} has no SGLang: {reason}")
    return output.decode().strip()


def server_arguments(config: SGLangServerConfig, port: int, version: str) -> tuple[str, ...]:
    """Of sglang.launch_server. The user's own come last, and win."""
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
    device = cpu_arguments(version) if config.device == "cpu" else ("--device", "cuda")
    return (*option_list(options), *device, *config.arguments)


def cpu_arguments(version: str) -> tuple[str, ...]:
    """Plain torch everywhere: SGLang's CPU kernels need AMX and a build of their own."""
    graphs: tuple[str, ...] = ("--disable-cuda-graph",)
    # Deprecated from then on.
    if release(version) >= (0, 5, 22):
        graphs = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
    plain = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    memory = ("--max-total-tokens", str(CPU_TOTAL_TOKENS), "--mem-fraction-static", "0.2")
    # Else the scheduler spins, and takes a core from everybody else.
    return ("--device", "cpu", *plain, *memory, *graphs, "--sleep-on-idle")


def server_environment(config: SGLangServerConfig) -> dict[str, str]:
    """What is passed on, and what SGLang is told by the environment only."""
    told = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "HF_HUB_OFFLINE": "1"}
    # A client must give up idle connections first, else a call meets one that the server is just closing.
    told |= {"SGLANG_TIMEOUT_KEEP_ALIVE": "300"}
    if config.device == "cpu":
        told |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS)}
        told |= {"TOKENIZERS_PARALLELISM": "false"}
        if config.tensor_parallel > 1:
            # Without it SGLang wants a NUMA node for each rank.
            told |= {"SGLANG_CPU_OMP_THREADS_BIND": shares_of(os.sched_getaffinity(0), config.tensor_parallel)}
    return {key: value for key, value in os.environ.items() if _is_passed_on(key)} | told


def shares_of(cores: Iterable[int], ranks: int) -> str:
    """Each rank's cores, as SGLang reads them: `0,2|1,3`. Where there are fewer cores than ranks, some share one."""
    given = sorted(cores)
    return "|".join(",".join(map(str, given[rank::ranks] or [given[rank % len(given)]])) for rank in range(ranks))


def _is_passed_on(key: str) -> bool:
    return key in PASSED_ON or key.startswith(PASSED_ON_PREFIXES)


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_taken(host: str, port: int) -> bool:
    """Somebody listens there: better known now than after SGLang loaded a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def listens(pid: int, port: int) -> bool:
    """The process itself listens on the port."""
    try:
        sockets: Iterable[psutil.pconn] = psutil.Process(pid).net_connections("tcp")
        return any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in sockets)
    except psutil.NoSuchProcess:
        return False


def reachable(host: str) -> str:
    """An address to call a server at that is bound to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


async def is_healthy(url: str) -> bool:
    """/health answers 200."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
