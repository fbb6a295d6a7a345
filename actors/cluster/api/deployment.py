"""The control API as a Ray Serve application."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ray import serve

from headrace.actors.cluster.api.app import make_app
from headrace.actors.cluster.api.keys import KeyFile
from headrace.actors.cluster.runs.contract import ACTOR_NAME
from headrace.actors.runtime.actors.nodes import NAMESPACE
from headrace.actors.runtime.actors.runtime import ActorProxy

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

    from headrace.actors.cluster.runs.contract import RunsApi

MAX_REQUESTS: Final = 1000
"""Concurrent requests of a replica; every stream of events is one (Serve's default is 5)."""
DRAIN_S: Final = 10.0
"""Time for a replica's requests to end when it is replaced. Streams of events are then cut, and their clients resume
them elsewhere."""


class ControlReplica:
    """One replica; it builds its app itself, because open files and threads do not travel."""

    def __init__(self, key_file: Path, secret: bytes) -> None:
        self._keys = KeyFile(key_file)
        self._secret = secret

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(cast("RunsApi", ActorProxy(ACTOR_NAME, namespace=NAMESPACE)), self._keys, self._secret)


def application(key_file: Path, replicas: int, options: dict[str, Any]) -> Application:
    """Return the application, whose replicas have these options of Ray."""
    deployment = serve.deployment(
        name="control",
        num_replicas=replicas,
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options=options,
    )
    return deployment(serve.ingress()(ControlReplica)).bind(key_file, secrets.token_bytes(32))
