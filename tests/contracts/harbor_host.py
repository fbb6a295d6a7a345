"""An environment of Harbor without isolation, which runs commands on this host, below a folder of its own.

Harbor's own Python imports it (`-e harbor_host:HostEnvironment`), so it imports nothing of headrace. Harbor's absolute
paths (`/logs`, `/tests`) in commands are replaced by paths in that folder; scripts find it as `$HOST_ROOT`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

OWN_PATHS = re.compile(r"(?<![\w./-])/(?=(?:logs|tests|solution|app)\b)")


class HostEnvironment(BaseEnvironment):
    """Environment in a temporary folder, with a tmux server of its own."""

    @staticmethod
    def type() -> str:
        return "host"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="harbor-host-"))
        for name in ("app", "tests", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self._root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self._root, ignore_errors=True)

    def _own(self, text: str) -> str:
        return OWN_PATHS.sub(f"{self._root}/", text)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(self._own(target_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._own(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._own(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._own(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            "/bin/bash",
            "-c",
            self._own(command),
            cwd=self._own(cwd or "/app"),
            env={**os.environ, "TMUX_TMPDIR": str(self._root), "HOST_ROOT": str(self._root), **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(timeout_sec):
            out, errors = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=errors.decode(), return_code=process.returncode or 0)
