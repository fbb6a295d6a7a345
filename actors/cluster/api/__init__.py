"""The control API of a cluster: routes over the actor of runs, on Ray Serve, and its client.

Invariants:
- Importing this package imports neither Ray Serve nor FastAPI.
"""

# Annotations are objects here, not strings: Ray Serve checks the arguments of `build` by its annotation.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace.buffer.primitives.sections import Section

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["ControlArguments", "build"]


class ControlArguments(Section):
    """Arguments of the application, `args` in the file for `serve deploy`."""

    key_file: Path
    """File with lines `SHA256 ROLE OWNER`, on every node that may have a replica."""
    replicas: Annotated[int, Field(ge=1)] = 2
    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that each replica reserves."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may have a replica, e.g. headrace/role; by default all nodes."""


def build(args: ControlArguments) -> "Application":
    """Return the Serve application, for `serve deploy` (guide 'Control API of a cluster'). Its replicas do not start if
    the key file is refused, with the reason in their logs."""
    from headrace.actors.cluster.api.deployment import application

    options = {"num_cpus": args.cpus} | ({"label_selector": args.label_selector} if args.label_selector else {})
    return application(args.key_file, args.replicas, options)
