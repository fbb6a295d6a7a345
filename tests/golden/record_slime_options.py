"""Record the options of slime's and Megatron's parsers, from the checkouts that SLIME_DIR and MEGATRON_DIR name.

PYTHONPATH=tests .venv/bin/python -m golden.record_slime_options
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from headrace.actors.runtime.actors.runtime import start_local_ray, stop_local_ray
from support import slime_rig as rig
from support.slime_samples import options_of_slime

RECORDED = Path(__file__).with_name("slime_options.json")


def main() -> None:
    hook = {"worker_process_setup_hook": "support.slime_on_cpu.watch_imports"}
    start_local_ray("tests", object_store_bytes=128 << 20, gpus=1, num_cpus=2, runtime_env=hook)
    import ray

    with tempfile.TemporaryDirectory() as folder:
        terms = rig.terms(Path(folder), rig.write_bf16_model(Path(folder) / "model"))
        found = ray.get(ray.remote(options_of_slime).options(num_gpus=1).remote(terms))
    lines = [f"{json.dumps(name)}: {json.dumps(option)}" for name, option in sorted(found.items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    stop_local_ray()


if __name__ == "__main__":
    main()
