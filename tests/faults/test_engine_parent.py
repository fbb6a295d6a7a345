"""No engine outlives its parent, even one that was killed with -9."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil

PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig

async def main():
    config = EngineProcessConfig(model=Path(sys.argv[1]), directory=Path(sys.argv[2]))
    async with EngineProcess(config) as engine:
        sys.stdout.write(f"{engine.pid}\\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_engine_dies_with_its_parent(tiny_model_dir: Path, tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tiny_model_dir), str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(await parent.stdout.readline()))
    assert engine.is_running()
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [engine], timeout=20)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
