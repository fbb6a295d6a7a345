"""The route /pull_weights of slime's SGLang, on a server of another version: its module is slime's, from the patch."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PATCH = "docker/patch/latest/sglang-pull_weights.patch"
MODULE = "srt/weight_sync/local_checkpoint.py"


def write_module(slime: Path, folder: Path) -> Path:
    """Write the module that slime's patch adds, and return its path."""
    text = (slime / PATCH).read_text(encoding="utf-8")
    _, _, added = text.partition(f"+++ b/python/sglang/{MODULE}\n")
    lines = [line[1:] for line in added.splitlines() if line.startswith("+")]
    path = folder / "local_checkpoint.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def serve(server: Any) -> None:
    """Add the route to SGLang's HTTP server, with the fields and answers of slime's."""
    from fastapi.responses import ORJSONResponse

    module = ModuleType("local_checkpoint")
    sys.modules["local_checkpoint"] = module
    exec(compile(Path(os.environ["HEADRACE_TEST_PULLS"]).read_text(), "local_checkpoint", "exec"), module.__dict__)

    @server.app.post("/pull_weights")  # type: ignore[untyped-decorator]
    async def pull_weights(asked: dict[str, Any]) -> Any:
        base = server._global_state.tokenizer_manager.server_args.model_path
        try:
            await asyncio.to_thread(
                module.pull, asked["local_checkpoint_dir"], base, asked["source_dir"], asked["target_version"]
            )
        except Exception as error:  # noqa: BLE001 - as slime's scheduler answers
            return ORJSONResponse({"success": False, "message": f"{type(error).__name__}: {error}"}, status_code=400)
        return ORJSONResponse({"success": True, "message": "Succeeded to pull weights."}, status_code=200)
