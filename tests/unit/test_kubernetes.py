"""The Kubernetes manifests fit each other, the code and docs/cluster.md. No Kubernetes is needed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from headrace.actors.cli.app import app
from headrace.actors.cluster.api import ControlArguments
from headrace.actors.cluster.api.keys import ApiRole, KeyFile
from headrace.actors.run.config import load_recipe
from headrace.actors.run.placement import ClusterSection
from headrace.actors.run.sections import ServiceSection
from headrace.actors.telemetry.page.access import digest_of
from headrace.serve.sandbox_servers.e2b_state.images import load_images
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from support.manifests import (
    FOLDER,
    documents,
    groups,
    manifest_files,
    manifests,
    may_reach,
    pods,
    ray_cluster,
    selects,
    strings,
)
from support.ray_hosts import HEALTH_CHECKS

ROOT = FOLDER.parents[1]
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
README = (FOLDER / "README.md").read_text()
GUIDE = (ROOT / "docs" / "cluster.md").read_text()
PODS = pods()
RAY_PODS = [name for name, pod in PODS.items() if "ray.io/cluster" in pod.labels]
RAY_DRAIN_S = 30
"""Time that `ray start --block` waits after SIGTERM."""
NODES = [name for name in RAY_PODS if name != "head"]
SANDBOXES = "headrace-sandbox"
REDIS = "headrace-redis"
CLIENT = {"headrace/client": "true"}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")


def secrets_used() -> Iterator[tuple[str, str]]:
    """Yield every Secret that a manifest refers to, with its key."""
    yield ray_cluster()["spec"]["authOptions"]["secretName"], "auth_token"
    password = ray_cluster()["spec"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    yield password["name"], password["key"]
    for pod in PODS.values():
        for volume in pod.spec["volumes"]:
            if secret := volume.get("secret"):
                yield from ((secret["secretName"], item["key"]) for item in secret.get("items", ()))
                if "items" not in secret:
                    yield secret["secretName"], ""


def secrets_listed() -> dict[str, set[str]]:
    """Return the Secrets of the README's table with their keys."""
    rows = re.findall(r"^\| `(headrace-[\w-]+)` \| ([^|]+) \|", README, re.MULTILINE)
    return {name: set(re.findall(r"`([\w-]+)`", keys)) for name, keys in rows}


def code_blocks(text: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for of, block in found if of == language]


def test_the_manifests_have_the_expected_kinds() -> None:
    kinds = {document["kind"] for document in manifests()}
    expected = {"Namespace", "RayCluster", "StatefulSet", "Service", "PersistentVolumeClaim", "NetworkPolicy"}
    assert kinds == expected | {"ScrapeConfig"}
    assert ray_cluster()["apiVersion"] == "ray.io/v1"


def test_the_kustomization_names_every_file() -> None:
    assert set(KUSTOMIZATION["resources"]) == {path.name for path in manifest_files() if path.parent == FOLDER}
    files = [name for generated in KUSTOMIZATION["configMapGenerator"] for name in generated["files"]]
    assert [name for name in files if not (FOLDER / name).is_file()] == []


@pytest.mark.parametrize("name", PODS)
def test_every_mount_has_a_volume_and_every_volume_a_source(name: str) -> None:
    pod = PODS[name]
    volumes = {volume["name"] for volume in pod.spec["volumes"]}
    assert set(pod.mounts.values()) == volumes | pod.claims
    claims = {claim["metadata"]["name"] for claim in manifests("PersistentVolumeClaim")}
    maps = {generated["name"] for generated in KUSTOMIZATION["configMapGenerator"]}
    for volume in pod.spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
        if "configMap" in volume:
            assert volume["configMap"]["name"] in maps


def test_the_readme_lists_every_secret_and_how_to_make_it() -> None:
    listed = secrets_listed()
    assert {name for name, _ in secrets_used()} == set(listed)
    for name, key in secrets_used():
        assert not key or key in listed[name]
    made = re.findall(r"create secret generic (\S+) (.*)", "".join(code_blocks(README)))
    assert {name: set(re.findall(r"--from-file=(\S+)", files)) for name, files in made} == listed


def test_no_file_has_a_secret() -> None:
    assert manifests("Secret") == []
    for path in FOLDER.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert re.findall(r"[0-9a-f]{32,}|[A-Za-z0-9+/]{40,}={0,2}\n", text) == [], path
            assert re.findall(r"requirepass (?!%s)\S+", text) == [], path


def test_the_commands_for_secrets_make_files_that_the_programs_accept(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    [block] = [block for block in code_blocks(README) if "openssl" in block]
    commands, _, _ = block.partition("kubectl")
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True)
    folder = tmp_path / "secrets"
    owner = load_keys(folder / "keys").identify((folder / "key").read_text())
    assert owner is not None and owner.name == "headrace"
    caller = KeyFile(folder / "control-keys").caller_of(digest_of((folder / "alice.key").read_text()))
    assert caller is not None and (caller.owner, caller.role) == ("alice", ApiRole.OPERATE)


@pytest.mark.parametrize("name", PODS)
def test_mounted_secrets_cannot_be_read_by_other_users(name: str) -> None:
    secrets = [volume["secret"] for volume in PODS[name].spec["volumes"] if "secret" in volume]
    assert [secret for secret in secrets if secret["defaultMode"] & 0o027] == []


def test_the_groups_have_the_roles_of_the_code() -> None:
    section = ClusterSection()
    labels = {name: group["labels"]["headrace/role"] for name, group in groups().items()}
    assert labels == {"head": "head"} | {str(role): label for role, label in section.roles.labels().items()}
    control = groups()["control"]
    assert (control["minReplicas"], control["replicas"], control["maxReplicas"]) == (1, 1, 1)


@pytest.mark.parametrize("name", RAY_PODS)
def test_start_parameters_are_options_of_ray_start_and_none_that_kuberay_refuses(name: str) -> None:
    from ray.scripts.scripts import start

    options = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    given = groups()[name]["rayStartParams"]
    assert set(given) <= options
    assert not {"labels", "redis-password", "redis-username"} & set(given)
    assert all(isinstance(value, str) for value in given.values())


def test_the_head_runs_no_actor_and_declares_lost_nodes_dead_as_in_the_tests() -> None:
    head = PODS["head"]
    assert groups()["head"]["rayStartParams"]["num-cpus"] == "0"
    assert {name: head.variable(name) for name in HEALTH_CHECKS} == HEALTH_CHECKS
    for name, value in HEALTH_CHECKS.items():
        assert f"{name}={value}" in GUIDE


def test_nodes_wait_for_the_head_longer_than_it_may_take_to_be_restarted() -> None:
    probe = PODS["head"].container["livenessProbe"]
    restart_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    for name in RAY_PODS:
        assert int(PODS[name].variable("RAY_gcs_rpc_server_reconnect_timeout_s") or 60) > restart_s


@pytest.mark.parametrize("name", NODES)
def test_the_grace_period_is_longer_than_both_drains(name: str) -> None:
    pod = PODS[name]
    ray_s = float(pod.variable("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or RAY_DRAIN_S)
    assert ray_s == RAY_DRAIN_S
    assert pod.spec["terminationGracePeriodSeconds"] > ray_s + ServiceSection().drain_s


@pytest.mark.parametrize("name", NODES)
def test_pre_stop_lets_runs_leave_and_then_drains_the_node_of_ray(name: str) -> None:
    from ray.scripts.scripts import cli

    shell, option, script = PODS[name].container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    ours, theirs = (shlex.split(part) for part in script.split(";"))
    assert ours[:6] == ["headrace", "node", "drain", "self", "--address", "auto"]
    deadline_s = float(ours[ours.index("--deadline-s") + 1])
    # Without the variable the command does not find its own node, since the pods set it to 0.
    assert theirs[:4] == ["exec", "env", "RAY_ENABLE_AUTO_CONNECT=1", "ray"]
    context = cli.commands[theirs[4]].make_context(theirs[4], theirs[5:])
    assert context.params["deadline_remaining_seconds"] > RAY_DRAIN_S
    # Then SIGTERM, and Ray's own wait.
    assert deadline_s + RAY_DRAIN_S + ServiceSection().drain_s < PODS[name].spec["terminationGracePeriodSeconds"]


def test_the_probes_ask_what_answers_without_a_credential() -> None:
    listeners = (ROOT / "docs" / "listeners.md").read_text()
    for name in RAY_PODS:
        for probe in ("readinessProbe", "livenessProbe"):
            assert PODS[name].container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert "52365" in listeners
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert PODS[SANDBOXES].container[probe]["httpGet"] == {"path": "/v1/healthz", "port": "exec"}
    assert "| with nothing | |\n|---|---|\n| GET `/v1/healthz` |" in (ROOT / "docs" / "remote.md").read_text()


def test_the_ports_of_the_head_are_those_of_the_listeners() -> None:
    listeners = (ROOT / "docs" / "listeners.md").read_text().partition("## A cluster")[2]
    ports = {port["containerPort"] for port in PODS["head"].container["ports"]}
    assert ports == {6379, 8265, 8000}
    assert [port for port in ports if f"({port})" not in listeners and f", {port})" not in listeners] == []
    [scraping] = manifests("ScrapeConfig")
    [discovery] = scraping["spec"]["httpSDConfigs"]
    found = urlsplit(discovery["url"])
    assert found.port in ports
    assert (found.path, discovery["authorization"]) == ("/v1/metrics/targets", scraping["spec"]["authorization"])
    assert f"GET `{found.path}`" in (ROOT / "docs" / "control_api.md").read_text()


@pytest.mark.parametrize(
    ("source", "target", "port", "allowed"),
    [
        ("control", "head", 6379, True),
        ("rollout", "engine", 40000, True),
        ("head", "learner", 10002, True),
        ("head", REDIS, 6379, True),
        ("control", REDIS, 6379, False),
        (SANDBOXES, REDIS, 6379, False),
        ("control", SANDBOXES, 5000, True),
        ("rollout", SANDBOXES, 5000, True),
        ("rollout", SANDBOXES, 22, False),
        ("engine", SANDBOXES, 5000, False),
        ("learner", SANDBOXES, 5000, False),
        ("head", SANDBOXES, 5000, False),
        (SANDBOXES, SANDBOXES, 5000, False),
        (SANDBOXES, "rollout", 10002, False),
        (SANDBOXES, "head", 8000, False),
        ("client", "head", 8000, True),
        ("client", "head", 8265, False),
        ("client", "control", 8000, False),
        ("client", SANDBOXES, 5000, False),
        ("stranger", "head", 8000, False),
        ("stranger", "rollout", 10002, False),
    ],
)
def test_only_named_connections_are_allowed(source: str, target: str, port: int, allowed: bool) -> None:
    labels: dict[str, Mapping[str, str]] = {name: pod.labels for name, pod in PODS.items()}
    labels |= {"client": CLIENT, "stranger": {}}
    assert may_reach(labels[source], labels[target], port, documents(FOLDER / "network.yaml")) is allowed


def test_other_namespaces_are_reached_only_to_look_up_names_and_not_by_sandbox_hosts() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in documents(FOLDER / "network.yaml")}
    names = policies.pop("names")
    assert {name for name, pod in PODS.items() if selects(names["podSelector"], pod.labels)} == {*PODS} - {SANDBOXES}
    assert {port["port"] for rule in names["egress"] for port in rule["ports"]} == {53}
    assert not {"namespaceSelector", "ipBlock"} & set(strings(policies))


def test_only_sandbox_hosts_are_privileged() -> None:
    privileged = {name for name, pod in PODS.items() if pod.container["securityContext"].get("privileged")}
    assert privileged == {SANDBOXES}
    for name, pod in PODS.items():
        assert pod.spec["automountServiceAccountToken"] is False
        if name != SANDBOXES:
            assert pod.spec["securityContext"]["runAsNonRoot"] is True
            assert pod.container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_sandbox_hosts_share_no_machine() -> None:
    [rule] = PODS[SANDBOXES].spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"].items() <= PODS[SANDBOXES].labels.items()


def parsed_by_headrace(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a headrace command. An option that does not exist raises."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    context = command.make_context(command.name, words)
    return dict(context.params)


def test_the_sandbox_hosts_run_an_existing_command_with_mounted_files() -> None:
    pod = PODS[SANDBOXES]
    program, *words = (*pod.container["command"], *pod.container["args"])
    given = parsed_by_headrace(words)
    assert program == "headrace"
    [port] = pod.container["ports"]
    assert given["port"] == port["containerPort"]
    for option in ("keys", "image_map", "state"):
        assert any(Path(given[option]).is_relative_to(path) for path in pod.mounts)
    keys = pod.volume(str(Path(given["keys"]).parent))["secret"]
    assert [item["path"] for item in keys["items"]] == [Path(given["keys"]).name]
    load_images(FOLDER / Path(given["image_map"]).name, "")


def test_the_recipe_tables_fit_the_pods(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "/mnt/headrace/model"\n' + (FOLDER / "cluster.toml").read_text())
    config = load_recipe(recipe, (), tmp_path / "run")
    cluster, remote = config.cluster, config.sandbox.remote
    assert cluster.labels() == ClusterSection().roles.labels()
    for name in NODES:
        state = PODS[name].volume(str(cluster.state))
        assert ("persistentVolumeClaim" in state) == (name == "control")
        assert PODS[name].volume(str(cluster.storage))["persistentVolumeClaim"]["claimName"] == "headrace-storage"
    assert remote.key_file is not None
    for name in ("control", "rollout"):
        secret = PODS[name].volume(str(remote.key_file.parent))["secret"]
        assert [item["path"] for item in secret["items"]] == [remote.key_file.name]
    [hosts] = [workload for workload in manifests("StatefulSet") if workload["metadata"]["name"] == SANDBOXES]
    service, replicas = hosts["spec"]["serviceName"], hosts["spec"]["replicas"]
    assert list(remote.urls) == [f"http://{SANDBOXES}-{number}.{service}:5000" for number in range(replicas)]


def test_the_storage_is_shared_and_the_state_is_not() -> None:
    modes = {claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in manifests("PersistentVolumeClaim")}
    assert modes == {"headrace-storage": ["ReadWriteMany"], "headrace-state": ["ReadWriteOnce"]}


def test_the_control_api_is_that_of_serve_deploy_on_the_nodes_with_its_keys() -> None:
    from ray.serve.schema import ServeDeploySchema

    [deployed] = documents(FOLDER / "control.yaml")
    schema = ServeDeploySchema.model_validate(deployed)
    [original] = documents(ROOT / "scripts" / "serve" / "control.yaml")
    assert schema.proxy_location.value == "HeadOnly"
    [application], [same] = deployed["applications"], original["applications"]
    arguments = ControlArguments.model_validate(application.pop("args"))
    del same["args"]
    assert application == same
    chosen = [name for name in RAY_PODS if arguments.label_selector.items() <= groups()[name]["labels"].items()]
    assert chosen == ["control"]
    volume = PODS["control"].volume(str(arguments.key_file.parent))
    assert volume["secret"]["secretName"] == "headrace-control-keys"
    assert arguments.key_file.name in secrets_listed()["headrace-control-keys"]


@pytest.mark.parametrize("page", ["docs/cluster.md", "scripts/kubernetes/README.md"])
def test_the_commands_of_a_page_exist(page: str) -> None:
    text = "".join(code_blocks((ROOT / page).read_text()))
    commands = re.findall(r"(?:^|on \w+ |-- )headrace (.*)$", text, re.MULTILINE)
    assert len(commands) > 2
    for command in commands:
        parsed_by_headrace(shlex.split(command, comments=True))


@needs_kubectl
def test_kustomize_builds_the_manifests_with_one_image() -> None:
    built = build(FOLDER)
    assert {document["kind"] for document in built} - {"ConfigMap"} == {
        document["kind"] for document in manifests() if document["kind"] != "ScrapeConfig"
    }
    images = [line for document in built for line in strings(document) if line.startswith("registry.example/")]
    assert images == ["registry.example/headrace:0.1"] * (len(RAY_PODS) + 1)
    assert {document["kind"] for document in build(FOLDER / "monitoring")} == {"NetworkPolicy", "ScrapeConfig"}


@needs_kubectl
def test_the_overlay_of_the_readme_builds(tmp_path: Path) -> None:
    [overlay] = code_blocks(README, "yaml")
    inside = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, inside)
    own = tmp_path / "overlay"
    own.mkdir()
    (own / "kustomization.yaml").write_text(overlay.replace("PATH/TO/headrace/scripts/kubernetes", "../kubernetes"))
    built = build(own)
    assert sum(line == "YOUR/IMAGE:YOURS" for document in built for line in strings(document)) == len(RAY_PODS) + 1
    claims = [document["spec"]["storageClassName"] for document in built if document["kind"].endswith("Claim")]
    assert claims == ["YOUR-BLOCK-CLASS", "YOUR-SHARED-CLASS"]


@pytest.mark.skipif("HEADRACE_KUBERAY_CRD" not in os.environ, reason="HEADRACE_KUBERAY_CRD names no CRD of KubeRay")
def test_the_cluster_fits_the_schema_of_kuberay() -> None:
    import jsonschema

    [definition] = documents(Path(os.environ["HEADRACE_KUBERAY_CRD"]))
    [schema] = [
        version["schema"]["openAPIV3Schema"] for version in definition["spec"]["versions"] if version["name"] == "v1"
    ]
    close(schema)
    # The schema leaves the metadata to Kubernetes.
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(ray_cluster(), schema)
    misspelt = {**ray_cluster(), "spec": {**ray_cluster()["spec"], "headgroupSpec": {}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(misspelt, schema)


def close(node: object) -> None:
    """Refuse unknown keys, which Kubernetes would drop."""
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict) and not node.get("x-kubernetes-preserve-unknown-fields"):
            node.setdefault("additionalProperties", False)
        for below in list(node.values()):
            close(below)
    elif isinstance(node, list):
        for below in node:
            close(below)


def build(folder: Path) -> list[Any]:
    """Return what kustomize makes of a folder."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
