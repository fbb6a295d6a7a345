"""Fixtures for tests against checkouts of slime and Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import slime_rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without the checkouts."""
    if slime_rig.checkouts() is not None:
        return
    reason = "set SLIME_DIR and MEGATRON_DIR to checkouts of slime and Megatron-LM (docs/scaling.md)"
    for item in items:
        if item.get_closest_marker("slime"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slime_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray with one logical GPU for each rank, whose processes replace what slime lacks on a CPU. Its node has
    the label of a learner's node, as in a cluster."""
    from headrace.actors.runtime.actors.nodes import ROLE_LABEL
    from headrace.actors.runtime.actors.runtime import start_local_ray, stop_local_ray

    start_local_ray(
        "tests",
        object_store_bytes=128 << 20,
        gpus=slime_rig.RANKS,
        num_cpus=slime_rig.RANKS + 2,
        labels={ROLE_LABEL: slime_rig.LABEL},
        runtime_env={"worker_process_setup_hook": "support.slime_on_cpu.watch_imports"},
    )
    yield
    stop_local_ray()


@pytest.fixture(scope="session")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 in bf16: do not write into it."""
    return slime_rig.write_bf16_model(tmp_path_factory.mktemp("bf16") / "model")
