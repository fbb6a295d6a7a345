"""Operations of the drop-in routes: run a command, return a diff, and evaluate a patch in a clean container.

Invariants:
- A timeout kills the command's whole process tree before the response, which has returncode -1, is sent.
- A patch is applied in a new container of the same image, never in the agent's.
- A host failure is reported as an error of the request, never as `resolved: false`.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.sandboxes.base import ExecResult, Feature, Sandbox
from headrace.sandboxes.errors import ExecTimeout, Unsupported
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.exec.containers import Containers, new_container
from headrace.serve.sandbox_servers.exec.dropin_bodies import Diff, Evaluate, RunCommand
from headrace.serve.sandbox_servers.exec.registry import LeasedSandbox

ApplyPatch = Callable[[Sandbox, bytes, str, float], Awaitable[str | None]]
"""Applies a patch to the repository in a folder of a clean sandbox, within a time limit in seconds. Returns the reason
why the patch does not apply, or None if it does. Raises SandboxError."""

MAX_OUTPUT_BYTES: Final = 1 << 20
MAX_PATCH_BYTES: Final = 32 << 20
_SHORT_S: Final = 60.0
_WAIT_FOR_ROOM_S: Final = 600.0
_TAIL: Final = 2000
_DIFF: Final = "git add -A && git diff --cached"
_ANY_OWNER: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
_NO_PATCH: Final = "patch validation failed: expected unified git diff with diff --git headers"


class Evaluations:
    """Operations on containers, which return the JSON documents of responses."""

    def __init__(self, containers: Containers, apply_patch: ApplyPatch | None) -> None:
        self._containers = containers
        self._apply_patch = apply_patch

    async def run(self, row: LeasedSandbox, body: RunCommand) -> dict[str, Any]:
        exec_id = body.exec_id or None
        if Feature.EXEC_ID not in self._containers.registry.provider.features:
            exec_id = None
        async with self._containers.busy(row, body.timeout) as sandbox:
            try:
                result = await sandbox.exec(
                    login_shell(body.command),
                    env=body.env or {},
                    cwd=body.cwd,
                    timeout_s=body.timeout,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                    exec_id=exec_id,
                )
            except ExecTimeout:
                return {"ok": True, "returncode": -1, "output": f"Command timed out after {body.timeout:g}s"}
        return {"ok": True, "returncode": result.exit_code, "output": _text(result)}

    async def diff(self, row: LeasedSandbox, body: Diff) -> dict[str, Any]:
        async with self._containers.busy(row, _SHORT_S) as sandbox:
            result = await sandbox.exec(
                login_shell(_DIFF), env=_ANY_OWNER, cwd=body.cwd, timeout_s=_SHORT_S, max_output_bytes=MAX_PATCH_BYTES
            )
        error = result.stderr.decode(errors="replace") if result.exit_code else ""
        if result.truncated:
            error = error or f"the patch is larger than {MAX_PATCH_BYTES} bytes"
        try:
            patch = result.stdout.decode()
        except UnicodeDecodeError:
            error = error or "the patch is not UTF-8"
        if error:
            # A truncated or altered patch would be scored as if it were the agent's.
            return {"ok": True, "patch": "", "returncode": result.exit_code or 1, "error": error}
        return {"ok": True, "patch": patch, "returncode": 0, "error": ""}

    async def evaluate(self, owner: Owner, row: LeasedSandbox, body: Evaluate) -> dict[str, Any]:
        if self._apply_patch is None:
            raise Unsupported("this server cannot apply patches: start it with `headrace serve sandbox`")
        if not looks_like_a_patch(body.patch):
            return {"ok": True, "resolved": False, "error": _NO_PATCH}
        async with self._containers.busy(row, body.timeout + _WAIT_FOR_ROOM_S):
            container = new_container(body.cwd, prefix="swe-eval")
            clean = await self._containers.create(owner, row.image, container, key="", wait_s=_WAIT_FOR_ROOM_S)
            try:
                async with self._containers.busy(clean, body.timeout + _SHORT_S) as sandbox:
                    return await self._score(sandbox, body, self._apply_patch)
            finally:
                self._containers.registry.tasks.start(self._containers.destroy(clean))

    async def _score(self, sandbox: Sandbox, body: Evaluate, apply_patch: ApplyPatch) -> dict[str, Any]:
        refused = await apply_patch(sandbox, body.patch.encode(errors="surrogatepass"), body.cwd, _SHORT_S)
        if refused is not None:
            return {"ok": True, "resolved": False, "error": f"git apply failed: {refused}"}
        script = f"/tmp/{secrets.token_hex(8)}.sh"
        await sandbox.write(script, body.eval_script.encode())
        try:
            result = await sandbox.exec(
                login_shell(f"bash {script}"),
                env=_ANY_OWNER,
                cwd=body.cwd,
                timeout_s=body.timeout,
                max_output_bytes=MAX_OUTPUT_BYTES,
            )
        except ExecTimeout:
            return {"ok": True, "resolved": False, "error": f"Evaluation timed out after {body.timeout:g}s"}
        resolved = result.exit_code == 0
        return {"ok": True, "resolved": resolved, "returncode": result.exit_code, "output": _text(result)[-_TAIL:]}


def login_shell(command: str) -> str:
    return f"exec bash -lc {shlex.quote(command)}"


def looks_like_a_patch(patch: str) -> bool:
    """Return whether a patch passes the contract's own check, which is made before a container is booted."""
    return all(
        any(word in patch for word in words)
        for words in (("diff --git ",), ("--- a/", "--- /dev/null"), ("+++ b/", "+++ /dev/null"))
    )


def _text(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode(errors="replace")
    return f"{text}\n[output was cut at {MAX_OUTPUT_BYTES} bytes a stream]" if result.truncated else text
