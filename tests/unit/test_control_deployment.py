"""The control API as `serve deploy` builds it: the file for it, its arguments, what an import costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.actors.cluster.api import ControlArguments, build

DEPLOYED = Path(__file__).resolve().parents[2] / "scripts" / "serve" / "control.yaml"


def built(arguments: dict[str, Any]) -> Any:
    """Call `build` as Serve does, with the `args` of the file."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(build, arguments)


def test_the_file_for_serve_deploy_is_valid_and_binds_one_address() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(DEPLOYED.read_text()))
    assert schema.proxy_location.value == "HeadOnly"
    assert schema.http_options.host == "127.0.0.1"
    [application] = schema.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert ControlArguments.model_validate(application.args).key_file.is_absolute()


def test_the_deployment_is_as_its_arguments_say() -> None:
    deployment = built({"key_file": "/keys", "label_selector": {"headrace/role": "control"}})._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("control", 2)
    assert deployment.max_ongoing_requests >= 100
    assert deployment.ray_actor_options["num_cpus"] == 0.1
    assert deployment.ray_actor_options["label_selector"] == {"headrace/role": "control"}
    assert "label_selector" not in built({"key_file": "/keys"})._bound_deployment.ray_actor_options


@pytest.mark.parametrize("arguments", [{}, {"key_file": "/k", "replica": 3}, {"key_file": "/k", "replicas": 0}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        built(arguments)


def test_importing_the_package_imports_neither_serve_nor_fastapi() -> None:
    code = (
        "import sys, headrace.actors, headrace.actors.cluster.api, headrace.actors.cluster.api.client\n"
        "print([name for name in ('ray.serve', 'fastapi', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
