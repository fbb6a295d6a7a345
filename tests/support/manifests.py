"""The Kubernetes manifests as data: their pods, and who may reach whom by their network policies.

Invariants:
- Pods have the labels that KubeRay gives them: those of their group, and `ray.io/cluster` and `ray.io/node-type`.
- A connection is allowed if the policies of both ends allow it. A pod that no policy of a direction selects allows all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

FOLDER: Final = Path(__file__).resolve().parents[2] / "scripts" / "kubernetes"
NOT_MANIFESTS: Final = {"kustomization.yaml", "control.yaml"}
Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod template. `group` is the name of its Ray group or of its StatefulSet."""

    group: str
    labels: Mapping[str, str]
    spec: Manifest
    claims: frozenset[str] = frozenset()
    """Volumes from templates of claims."""

    @property
    def container(self) -> Manifest:
        [container] = self.spec["containers"]
        assert isinstance(container, Mapping)
        return container

    @property
    def mounts(self) -> dict[str, str]:
        """Volumes by the path at which they are mounted."""
        return {mount["mountPath"]: mount["name"] for mount in self.container["volumeMounts"]}

    def volume(self, path: str) -> Manifest:
        """Return the volume that is mounted at `path`."""
        [found] = [volume for volume in self.spec["volumes"] if volume["name"] == self.mounts[path]]
        assert isinstance(found, Mapping)
        return found

    def variable(self, name: str) -> str | None:
        """Return the value of a variable of the container."""
        values = {variable["name"]: variable.get("value") for variable in self.container.get("env", ())}
        return values.get(name)


def documents(path: Path) -> list[Manifest]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def manifest_files() -> list[Path]:
    """Return the files with manifests, those of `monitoring` too."""
    return sorted(path for path in FOLDER.rglob("*.yaml") if path.name not in NOT_MANIFESTS)


def manifests(kind: str | None = None) -> list[Manifest]:
    """Return the manifests of all files, or those of one kind."""
    found = (document for path in manifest_files() for document in documents(path))
    return [document for document in found if kind in (None, document["kind"])]


def ray_cluster() -> Manifest:
    [cluster] = manifests("RayCluster")
    return cluster


def groups() -> dict[str, Manifest]:
    """Return the groups of the Ray cluster by name, with the head."""
    spec = ray_cluster()["spec"]
    return {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pods() -> dict[str, Pod]:
    """Return all pods by the name of their group or StatefulSet."""
    found = {}
    for name, group in groups().items():
        kind = "head" if name == "head" else "worker"
        labels = {"ray.io/cluster": ray_cluster()["metadata"]["name"], "ray.io/node-type": kind, **group["labels"]}
        found[name] = Pod(group=name, labels=labels, spec=group["template"]["spec"])
    for workload in manifests("StatefulSet"):
        name, spec = workload["metadata"]["name"], workload["spec"]
        claims = frozenset(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
        template = spec["template"]
        found[name] = Pod(group=name, labels=template["metadata"]["labels"], spec=template["spec"], claims=claims)
    return found


def strings(node: object) -> Iterator[str]:
    """Yield all strings of a document, keys too."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, below in node.items():
            yield from strings(key)
            yield from strings(below)
    elif isinstance(node, Sequence):
        for below in node:
            yield from strings(below)


def may_reach(source: Mapping[str, str], target: Mapping[str, str], port: int, policies: Sequence[Manifest]) -> bool:
    """Return whether pods with the labels `source` may connect to a port of pods with the labels `target`, in the
    namespace of the policies."""
    out = _allows(policies, "Egress", "egress", "to", of=source, peer=target, port=port)
    return out and _allows(policies, "Ingress", "ingress", "from", of=target, peer=source, port=port)


def _allows(
    policies: Sequence[Manifest],
    direction: str,
    rules: str,
    peers: str,
    *,
    of: Mapping[str, str],
    peer: Mapping[str, str],
    port: int,
) -> bool:
    """Return whether the policies of one direction allow a connection of pods with the labels `of`."""
    specs = [policy["spec"] for policy in policies]
    ours = [spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], of)]
    return not ours or any(
        any("namespaceSelector" not in place and selects(place["podSelector"], peer) for place in rule[peers])
        and ("ports" not in rule or any(allowed["port"] == port for allowed in rule["ports"]))
        for spec in ours
        for rule in spec.get(rules, ())
    )


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects pods with these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", ()):
        is_in = labels.get(term["key"]) in term["values"]
        if is_in != {"In": True, "NotIn": False}[term["operator"]]:
            return False
    return True
