"""SGLang's own loader of a model that fuses two parameters, in one call and in several."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from headrace.policies.push.weights import arranged, plan_buckets
from headrace.policies.sglang.installation import SHIMS, environment_python
from headrace.policies.tensors import TensorSpec
from support import sglang_loader
from support.engine_kinds import SGLANG_VERSION
from support.parameter_tables import recorded


@pytest.mark.sglang
@pytest.mark.timeout(900)
async def test_buckets_load_what_one_call_loads() -> None:
    python = environment_python(SGLANG_VERSION)
    if python is None:
        pytest.skip(f"SGLang {SGLANG_VERSION} is not installed: scripts/install sglang")
    # Attention of GLM-4.7-Flash as slime exports it, with a row for every 64.
    specs = {
        name: TensorSpec(dtype="float32", shape=(max(1, spec.shape[0] // 64), *(2 for _ in spec.shape[1:])))
        for name, spec in recorded("GLM-4.7-Flash", "exported").items()
        if "_a_proj" in name or "_layernorm" in name
    }
    names = arranged(specs)
    buckets = plan_buckets({name: specs[name] for name in names}, bucket_bytes=200)
    assert len(buckets) > 100
    halves = [[name for name in names if ("kv_a_proj" in name) == is_second] for is_second in (False, True)]
    pushes = [[names], [list(bucket.names) for bucket in buckets], halves]
    given = [[[(name, specs[name].shape) for name in call] for call in calls] for calls in pushes]
    pipe = asyncio.subprocess.PIPE
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": str(SHIMS)}
    process = await asyncio.create_subprocess_exec(
        *(python, Path(sglang_loader.__file__)),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    output, errors = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, errors.decode()[-2000:]
    whole, bucketed, halved = json.loads(output.splitlines()[-1])
    assert len(whole) == len(specs) - 47
    assert set(whole.values()) == {1}
    assert bucketed == whole
    # Why a module is never divided: without an error, nothing of a pair is loaded.
    assert {name for name, least in halved.items() if least != 1} == {name for name in whole if "fused_qkv" in name}
