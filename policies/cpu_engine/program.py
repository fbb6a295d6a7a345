"""Embedded CPU engine: a process that serves a small Qwen model with SGLang's HTTP routes.

Invariants:
- HTTP runs in the main thread, torch in one other thread, and weight transfers in their own threads.
- The address is announced with an atomic write of `{"url", "pid"}` once the engine is ready for requests.
- With `parent_pid` the process dies with its parent.
- With `key_file` every request but /health must carry the key; without it the process listens on loopback only.

Start it with `python -m headrace.policies.cpu_engine --model DIR` or through `EngineProcess`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.policies.cpu_engine.thread import EngineThread
from headrace.policies.errors import EngineSettingsInvalid, ModelInvalid
from headrace.policies.processes.engine_keys import read_engine_key, require_key
from headrace.policies.processes.parent_death import die_with_parent
from headrace.policies.processes.server_process import announce
from headrace.policies.tokens.model_keys import language_keys

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from headrace.policies.cpu_engine.server import EngineServer

DEFAULT_CONTEXT_TOKENS = 1024


class CpuEngineConfig(Section):
    """Settings of one engine process."""

    model: Path
    """Hugging Face directory of a dense Qwen3 or Qwen2.5 model, with weights in one or several files."""
    host: str = "127.0.0.1"
    """Address to bind; any address other than loopback needs `key_file`."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port to bind; 0 chooses a free one."""
    key_file: Path | None = None
    """Private file with the key that every request must carry; None accepts requests without one."""
    weights: tuple[Path, ...] = ()
    """Folders from which /update_weights_from_disk loads, besides `model`."""
    announce: Path | None = None
    """File that receives `{"url", "pid"}` once the engine answers."""
    weight_version: str = "1.0"
    """Label of the weights on disk."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed for sampling."""
    max_running: int = Field(default=64, gt=0, le=1024)
    """Number of cache rows, which is the maximum number of sequences decoded concurrently."""
    max_context: int | None = Field(default=None, gt=1)
    """Maximum number of tokens in prompt and output together; None uses the model's maximum, but at most 1024."""
    max_prefill_tokens: int = Field(default=4096, gt=0)
    """Maximum number of padded tokens in one prefill."""
    group_timeout_s: float = Field(default=20.0, gt=0)
    """Time limit for forming a weight group, and for transferring one bucket."""
    parent_pid: int | None = None
    """Process id of the parent; the engine ends when the parent does."""


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer. Raises ModelInvalid when the file is unreadable or has more tokens than the model."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelInvalid(f"{path}: {error}") from error
    if tokenizer.get_vocab_size(with_added_tokens=True) > vocab_size:
        raise ModelInvalid(
            f"{path}: the tokenizer has {tokenizer.get_vocab_size(with_added_tokens=True)} tokens, but the model has "
            f"only {vocab_size} (vocab_size in config.json)"
        )
    return tokenizer


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-sequence ids of generation_config.json if it has them, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        given = language_keys(json.loads(path.read_text())).get("eos_token_id") if path.exists() else None
        if isinstance(given, int):
            return frozenset({given})
        if isinstance(given, list) and all(isinstance(item, int) for item in given):
            return frozenset(given)
    return frozenset()


def build(config: CpuEngineConfig) -> tuple[EngineThread, EngineServer]:
    """Load the model and build the engine. Raises ModelInvalid, EngineSettingsInvalid."""
    from headrace.policies.cpu_engine.grammars import Grammars
    from headrace.policies.cpu_engine.requests import ModelLimits
    from headrace.policies.cpu_engine.runner import Runner
    from headrace.policies.cpu_engine.scheduler import Scheduler
    from headrace.policies.cpu_engine.server import EngineServer, EngineServerSettings
    from headrace.policies.cpu_engine.thread import EngineThread
    from headrace.policies.cpu_engine.update import WeightUpdater
    from headrace.policies.models.qwen import read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    require_key(config.host, config.key_file)
    key = read_engine_key(config.key_file, "--key-file")
    model = QwenConfig.read(config.model / "config.json")
    context_tokens = config.max_context or min(model.max_position_embeddings, DEFAULT_CONTEXT_TOKENS)
    tokenizer = read_tokenizer(config.model / "tokenizer.json", model.vocab_size)
    runner = Runner(
        model,
        read_weights(model, config.model),
        version=config.weight_version,
        max_running=config.max_running,
        context_tokens=context_tokens,
        seed=config.seed,
    )
    eos_ids = read_eos_ids(config.model)
    scheduler = Scheduler(
        max_running=config.max_running,
        max_prefill_tokens=config.max_prefill_tokens,
        eos_ids=eos_ids,
        tail_text=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )
    engine = EngineThread(runner, scheduler)
    settings = EngineServerSettings(
        model_path=str(config.model),
        family=model.family,
        limits=ModelLimits(vocab_size=model.vocab_size, context_tokens=context_tokens),
        max_running=config.max_running,
        weights_folders=(config.model, *config.weights),
        key=key,
    )
    updater = WeightUpdater(engine, group_timeout_s=config.group_timeout_s)
    grammars = Grammars(tokenizer, vocab_size=model.vocab_size, eos_ids=eos_ids)
    return engine, EngineServer(engine, updater, tokenizer, grammars, settings)


async def serve(config: CpuEngineConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    from aiohttp import web

    engine, server = build(config)
    engine.start()
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        port = runner.addresses[0][1]
        url = f"http://{config.host}:{port}"
        logging.getLogger(__name__).info("engine ready at %s", url)
        if config.announce is not None:
            announce(config.announce, url)
        await stop.wait()
    finally:
        await runner.cleanup()
        engine.stop()


def run(config: CpuEngineConfig) -> int:
    """Run an engine process and return its exit code."""
    import uvloop

    if config.parent_pid is not None:
        die_with_parent(config.parent_pid)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except (ModelInvalid, EngineSettingsInvalid, OSError) as error:
        sys.stderr.write(f"cannot serve {config.model}: {error}\n")
        return 2
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> CpuEngineConfig:
    """Parse command-line arguments, one for each field of the config."""
    parser = argparse.ArgumentParser(prog="headrace.policies.cpu_engine", description=(__doc__ or "").splitlines()[0])
    for name, field in CpuEngineConfig.model_fields.items():
        action = "append" if name == "weights" else "store"
        parser.add_argument(
            f"--{name.replace('_', '-')}", required=field.is_required(), default=argparse.SUPPRESS, action=action
        )
    return CpuEngineConfig.model_validate(vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return run(parse_arguments(arguments))
