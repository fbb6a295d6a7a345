"""Request bodies of the drop-in contract. Unknown fields are ignored.

`exec_id` and `idempotency_key` are optional extensions of the contract.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from headrace.serve.sandbox_servers.exec.bodies import Environment, Seconds, Text

DEFAULT_CWD = "/testbed"
Folder = Annotated[Text, Field(pattern=r"^/", max_length=4095)]
Id = Annotated[str, Field(min_length=1, max_length=255)]
Key = Annotated[str, Field(max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CreateContainer(_Body):
    """Body of /container/create and /allocate; `timeout` is the time to wait for the container."""

    image: Annotated[str, Field(min_length=1, max_length=4096)]
    instance_id: Annotated[str, Field(max_length=1024)] = ""
    cwd: Folder = DEFAULT_CWD
    timeout: Seconds = 120.0
    idempotency_key: Key = ""


class ContainerTarget(_Body):
    """Body that names one container by its id or name, or by its lease."""

    target: Annotated[Id, Field(validation_alias=AliasChoices("lease_id", "container_id"))]


class RunCommand(ContainerTarget):
    command: Annotated[Text, Field(min_length=1)]
    cwd: Folder = DEFAULT_CWD
    timeout: Seconds = 180.0
    env: Environment | None = None
    exec_id: Annotated[Key, Field(validation_alias=AliasChoices("exec_id", "idempotency_key"))] = ""


class Diff(ContainerTarget):
    cwd: Folder = DEFAULT_CWD


class Evaluate(ContainerTarget):
    patch: str = ""
    eval_script: str = ""
    cwd: Folder = DEFAULT_CWD
    timeout: Seconds = 3600.0
    exec_id: Annotated[Key, Field(validation_alias=AliasChoices("exec_id", "idempotency_key"))] = ""
