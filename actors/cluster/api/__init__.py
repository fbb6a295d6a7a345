"""The control API of a cluster: routes over the actor of runs, on Ray Serve, and its client.

Invariants:
- Importing this package imports neither Ray Serve nor FastAPI.
"""

# Annotations are objects here, not strings: Ray Serve checks the arguments of `build` by its annotation.
from typing import TYPE_CHECKING

from headrace.actors.cluster.api.arguments import ControlArguments

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["ControlArguments", "build"]


def build(args: ControlArguments) -> "Application":
    """Return the Serve application, for `serve deploy` (scripts/serve/control.yaml). Its replicas do not start if the
    key file is refused, with the reason in their logs."""
    from headrace.actors.cluster.api.deployment import application

    return application(args)
