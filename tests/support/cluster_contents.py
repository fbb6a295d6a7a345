"""Prints the actors of runs and the placement groups of a cluster, as JSON: `python -m support.cluster_contents`."""

from __future__ import annotations

import json
import os

import ray
from ray.util import list_named_actors, placement_group_table

if __name__ == "__main__":
    ray.init(address=os.environ["RAY_ADDRESS"], namespace="headrace", log_to_driver=False)
    actors = [f"{actor['namespace']}/{actor['name']}" for actor in list_named_actors(all_namespaces=True)]
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    print(json.dumps([*(name for name in actors if not name.startswith("headrace/")), *groups]))
