"""What a machine can run, for `headrace doctor`: sizes of models, sandboxes at once, providers, SGLang."""

from __future__ import annotations

import os
from importlib.util import find_spec

from headrace.actors.derivation.host import Host, gigabytes
from headrace.actors.derivation.terms import ENGINE_GPU, USED_GPU, USED_RAM
from headrace.policies.errors import EngineSettingsInvalid
from headrace.policies.sglang.server import find_python


def capacity(host: Host, *, has_namespaces: bool) -> dict[str, str]:
    """Return what the host can run by what it is, in words. Sizes are those at which model states alone fill the memory
    (guide 'From one CPU to 64 GPUs')."""
    sandboxes, reason = host.sandboxes()
    e2b = "usable" if os.environ.get("E2B_API_KEY") else "set E2B_API_KEY, or sandbox.e2b.api_key_file"
    try:
        sglang = f"found: {find_python(None, 'cpu')}"
    except EngineSettingsInvalid as error:
        sglang = str(error)
    return {
        "model on the CPU": f"{_size(USED_RAM * host.memory_bytes / 24)} trained and served (24 bytes a parameter), "
        f"with three quarters of {gigabytes(host.memory_bytes)} GB",
        **{
            f"model on GPU {number}": f"{_size(USED_GPU * memory / 18)} trained (18 bytes a parameter), or "
            f"{_size(ENGINE_GPU * memory / 2)} served (2 bytes), with {gigabytes(memory)} GB"
            for number, memory in enumerate(host.gpus)
        },
        "sandboxes at once": f"{sandboxes if has_namespaces else 0}: {reason if has_namespaces else 'no namespaces'}",
        "provider local": "usable" if has_namespaces else "a guarantee below is missing",
        "provider remote": "usable: list servers in sandbox.remote.urls",
        "provider e2b": e2b if find_spec("e2b") else "the SDK is missing: pip install 'headrace[e2b]'",
        "SGLang": sglang,
    }


def _size(parameters: float) -> str:
    return f"up to {parameters / 1e9:.2g}B"
