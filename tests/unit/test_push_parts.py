"""Ranks and waits of a weight group, and models compared by their headers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed import is_nccl_available

from headrace.policies.engine import EngineId
from headrace.policies.errors import GroupFailed, ModelInvalid
from headrace.policies.push.fitting import check_fits, read_model_specs
from headrace.policies.push.process_group import choose_interface, destroy_group, form_group, host_store
from headrace.policies.push.transfer import lay_out
from headrace.policies.tensors import TensorSpec
from support.tiny_model import write_weights


@given(st.lists(st.integers(1, 16), max_size=8))
def test_every_rank_of_a_group_has_an_owner(counts: list[int]) -> None:
    ranks = [(EngineId(str(index)), count) for index, count in enumerate(counts)]
    layout = lay_out(ranks)
    taken = [rank for engine, count in ranks for rank in range(layout.offsets[engine], layout.offsets[engine] + count)]
    assert [0, *taken] == list(range(layout.world_size))


def test_waiting_for_an_nccl_transfer_returns_after_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch spells it; that it is read there, at the making of a group, only a build with NCCL can show."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.setenv(name, "0")
    store = host_store("127.0.0.1", 1, 30.0)
    settings: dict[str, Any] = {"name": "g", "rank": 0, "world_size": 1, "timeout_s": 30.0}
    destroy_group(form_group(store, backend="gloo", **settings))
    assert os.environ[name] == "0"
    if not is_nccl_available():
        with pytest.raises(GroupFailed, match="NCCL"):
            form_group(store, backend="nccl", **settings)
        assert os.environ[name] == "1"
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert f'"{name}"' in header.read_text()


def specs_of(directory: Path) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_tensor_specs_are_read_from_file_headers(tmp_path: Path, write_model) -> None:
    model = write_model(tmp_path / "model", seed=1)
    rewrite(model, lambda tensors: tensors.update(extra=torch.zeros(2).half()))
    assert read_model_specs(model) == specs_of(model)


def test_a_model_in_several_files_is_read_through_its_index(tmp_path: Path, write_model) -> None:
    model = write_model(tmp_path / "model", seed=1)
    specs, tensors = specs_of(model), load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    write_weights(model, tensors, files=2)
    check_fits(specs, model)
    assert read_model_specs(model) == specs


def test_floating_point_dtypes_may_differ(tmp_path: Path, write_model) -> None:
    specs = specs_of(write_model(tmp_path / "snapshot", seed=1))
    served = rewrite(
        write_model(tmp_path / "served", seed=1),
        lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}),
    )
    assert {spec.dtype for spec in specs_of(served).values()} == {"bfloat16"}
    check_fits(specs, served)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"snapshot has model\.norm\.weight, .*lacks"),
        (lambda tensors: tensors.update(new=torch.zeros(1)), "snapshot lacks new, which"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            r"model\.norm\.weight: the snapshot has shape \(\d+,\), but the engine's model .* has \(7,\)",
        ),
        (
            lambda tensors: tensors.update(
                {"model.norm.weight": torch.zeros(tensors["model.norm.weight"].shape, dtype=torch.int8)}
            ),
            "I8: only floating-point weights",
        ),
    ],
)
def test_a_different_model_is_refused_with_an_error_naming_both(tmp_path: Path, write_model, change, said: str) -> None:
    specs = specs_of(write_model(tmp_path / "snapshot", seed=1))
    served = rewrite(write_model(tmp_path / "served", seed=1), change)
    with pytest.raises(ModelInvalid, match=said):
        check_fits(specs, served)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_be_omitted_only_if_it_is_tied(tmp_path: Path, write_model, tied: bool) -> None:
    served = write_model(tmp_path / "served", seed=1, tied=tied)
    specs = specs_of(served)
    if tied:
        specs["lm_head.weight"] = specs["model.embed_tokens.weight"]
        check_fits(specs, served)
    else:
        del specs["lm_head.weight"]
        with pytest.raises(ModelInvalid, match=r"lacks lm_head\.weight"):
            check_fits(specs, served)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{"])
def test_damaged_files_are_named_in_the_error(tmp_path: Path, write_model, damage: bytes) -> None:
    served = write_model(tmp_path / "served", seed=1)
    (served / "model.safetensors").write_bytes(damage)
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        check_fits({}, served)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_damaged_model_descriptions_are_named_in_the_error(tmp_path: Path, write_model, name: str, damage: str) -> None:
    served = write_model(tmp_path / "served", seed=1)
    (served / name).write_text(damage)
    with pytest.raises(ModelInvalid, match=name):
        check_fits({}, served)


def test_an_inaccessible_directory_is_not_checked(tmp_path: Path) -> None:
    check_fits({"x": TensorSpec(dtype="float32", shape=(1,))}, tmp_path / "elsewhere")


def test_the_interface_of_a_local_group_is_not_used_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for host in ("127.0.0.1", "10.0.0.5"):
        choose_interface(host)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_interface("localhost")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    choose_interface("10.0.0.5")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
