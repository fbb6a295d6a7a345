"""Sandboxes as the control plane shows them (e2b-dev/E2B spec/openapi.yml: Sandbox, ListedSandbox, SandboxDetail)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace.serve.e2b_sandboxes.timestamps import timestamp

if TYPE_CHECKING:
    from headrace.serve.e2b_sandboxes.table import Row

ENVD_VERSION: Final = "0.6.4"
"""What we tell the SDKs: default user, closing of stdin, octet-stream uploads, entries in watch events."""
_CLIENT_ID: Final = "headrace"


def created(row: Row) -> dict[str, Any]:
    """The answer to create, connect and resume: what opens the sandbox."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": row.access_token,
        "domain": None,
    }


def listed(row: Row) -> dict[str, Any]:
    """A row of a list. The sizes are 0: the provider's own limits apply."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "startedAt": timestamp(row.started_at),
        "endAt": timestamp(row.end_at),
        "cpuCount": 0,
        "memoryMB": 0,
        "diskSizeMB": 0,
        "state": row.state.value,
        "envdVersion": ENVD_VERSION,
        "metadata": row.metadata,
    }


def detail(row: Row) -> dict[str, Any]:
    """One sandbox, with its lifecycle and the token of its envd."""
    lifecycle = {"autoResume": False, "onTimeout": "pause" if row.pause_at_end else "kill"}
    return {**listed(row), "envdAccessToken": row.access_token, "domain": None, "lifecycle": lifecycle}
