"""JSON views of sandboxes for clients (e2b-dev/E2B spec/openapi.yml: Sandbox, ListedSandbox, SandboxDetail)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace.serve.e2b_sandboxes.timestamps import timestamp

if TYPE_CHECKING:
    from headrace.serve.e2b_sandboxes.table import Row

ENVD_VERSION: Final = "0.6.4"
"""Version of envd for the SDKs, on which the default user, closing of stdin, octet-stream uploads, and entries in watch
events depend."""
_CLIENT_ID: Final = "headrace"


def created(row: Row) -> dict[str, Any]:
    """Return the response to create, connect and resume, with the access token."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": row.access_token,
        "domain": None,
    }


def listed(row: Row) -> dict[str, Any]:
    """Return a row of a list. The sizes are 0, because the provider's own limits apply."""
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
    """Return one sandbox with its lifecycle and access token."""
    lifecycle = {"autoResume": False, "onTimeout": "pause" if row.pause_at_end else "kill"}
    return {**listed(row), "envdAccessToken": row.access_token, "domain": None, "lifecycle": lifecycle}
