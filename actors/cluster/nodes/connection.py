"""Connection of this process to a Ray cluster that others started.

Invariants:
- Only a cluster that requires a token is used: without one, everybody who reaches it can run code on all nodes.
- Ray never connects on its own (`RAY_ENABLE_AUTO_CONNECT=0`), so a command that means a local Ray gets one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headrace.actors.errors import ConfigError, StartFailed
from headrace.actors.runtime.actors.nodes import NAMESPACE

DEFAULT_TOKEN_FILE: Final = Path(".ray/auth_token")
"""Below the home directory; Ray reads it without being told."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at `address` (`HOST:PORT` of its head, or `auto`) during the block. Raises ConfigError,
    StartFailed."""
    require_token()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises bare exceptions, of several types for one reason.
        raise _explained(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def require_token() -> None:
    """Raise ConfigError if this process has no token for a cluster, or one that other users can read."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path.home() / DEFAULT_TOKEN_FILE
    try:
        mode = path.stat().st_mode
        path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"no token for the cluster: {path} cannot be read ({error.strerror}); set RAY_AUTH_TOKEN_PATH to a file "
            "with the token of the cluster (guide 'Runs on a cluster')"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users can read the token in {path}: chmod 600 {path}")


def _explained(address: str, error: Exception) -> Exception:
    text = " ".join(str(error).split())
    if "auth" in text.lower() and "token" in text.lower():
        return ConfigError(f"the cluster at {address} refuses this token: use the one that its head was started with")
    if "Version mismatch" in text:
        return ConfigError(f"the cluster at {address} has another Ray or Python: install the same here ({text[:300]})")
    return StartFailed(
        f"cannot connect to the cluster at {address}: {text[:300]}; is its head running, and is this one of its nodes?"
    )
