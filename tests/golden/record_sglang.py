"""Records SGLang's replies: `.venv/bin/python tests/golden/record_sglang.py [VERSION]`, once it is installed."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import aiohttp

from headrace.policies.sglang.installing import environment_python
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig
from headrace.policies.sglang.versions import DEFAULT_VERSION

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))


async def main(version: str) -> None:
    from support.engine_exchanges import exchange
    from support.tiny_model import write_tiny_model

    target = TESTS / "golden" / f"sglang-{version}" / "replies.json"
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model")
        given = {"model": model, "directory": folder, "python": environment_python(version), "max_context": 1024}
        config = SGLangServerConfig.model_validate(given | {"dtype": "float32"})
        async with SGLangProcess(config) as server, aiohttp.ClientSession() as session:
            replies = await exchange(session, server.url)
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(replies, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or [DEFAULT_VERSION]))
