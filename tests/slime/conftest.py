"""Fixtures for tests against checkouts of slime and Megatron-LM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import lazy_backend, slime_rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without the checkouts."""
    if slime_rig.checkouts() is not None:
        return
    reason = "set SLIME_DIR and MEGATRON_DIR to checkouts of slime and Megatron-LM (docs/scaling.md)"
    for item in items:
        if item.get_closest_marker("slime"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that does not exist yet."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="session")
def slime_ray(hold: Path) -> Iterator[None]:
    """A local Ray with one logical GPU for each rank, whose processes replace what slime lacks on a CPU. Its node has
    the label of a learner's node, as in a cluster."""
    site, tests = Path(slime_rig.__file__).with_name("server_site"), Path(__file__).resolve().parents[1]
    with pytest.MonkeyPatch.context() as patch:
        # Engines know the backend `lazy`, whose collectives wait while the file exists.
        patch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(tests), os.environ.get("PYTHONPATH", ""))))
        patch.setenv(lazy_backend.HOLD, str(hold))
        yield from _ray()


def _ray() -> Iterator[None]:
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


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose heads, groups and layers two ranks can share: do not write into it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return slime_rig.write_bf16_model(tmp_path_factory.mktemp("even") / "model", **sizes)
