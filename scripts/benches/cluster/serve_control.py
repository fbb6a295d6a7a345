"""Deploys the control API on the cluster at RAY_ADDRESS: `python -m benches.cluster.serve_control HEAD KEY_FILE`."""

from __future__ import annotations

import os
import sys

import ray
from ray import serve

from headrace.actors.cluster.api import ControlArguments, build
from support.cluster_rig import API_PORT, SHARED_ROLE

if __name__ == "__main__":
    address, key_file = sys.argv[1:]
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": address, "port": API_PORT})
    arguments = {"key_file": key_file, "label_selector": {"headrace/role": SHARED_ROLE}}
    serve.run(build(ControlArguments.model_validate(arguments)), name="control", route_prefix="/")
