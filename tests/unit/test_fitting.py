"""Parameters of published models as slime exports them, against those of the files that engines serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.policies.errors import ModelInvalid
from headrace.policies.push.fitting import (
    check_fits,
    compare,
    joined_experts,
    read_model_specs,
    single_experts,
    untrained_prefixes,
)
from headrace.policies.tensors import Bucket, TensorSpec
from headrace.policies.tokens.model_keys import language_keys
from support.parameter_tables import TABLED_MODELS, recorded
from support.published_models import MODELS

Specs = dict[str, TensorSpec]
FUSED = "Qwen3.6-35B-A3B"
SINGLE = "Qwen3-30B-A3B"
UNTRAINED: dict[str, tuple[str, ...]] = {
    "Qwen3-4B": (),
    SINGLE: (),
    FUSED: ("model.visual.", "mtp."),
    "GLM-4.7-Flash": ("model.layers.47.",),
}


def with_prediction(model: str, specs: Specs) -> Specs:
    """Add the parameters of multi-token prediction, which transformers does not build: a layer like the last one, and
    the names that slime's converters of these models have for the rest."""
    if model == FUSED:
        layer = {name.replace("model.language_model.layers.39", "mtp.layers.0"): spec for name, spec in specs.items()}
        more = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
        own = {name: spec for name, spec in layer.items() if name.startswith("mtp.")}
    elif model == "GLM-4.7-Flash":
        layer = {name.replace("layers.46.", "layers.47."): spec for name, spec in specs.items()}
        more = tuple(f"model.layers.47.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
        own = {name: spec for name, spec in layer.items() if ".layers.47." in name}
    else:
        return specs
    return specs | own | {name: TensorSpec(dtype="bfloat16", shape=(2048,)) for name in more}


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Specs, Specs]]:
    """What slime exports, and what the model's files have."""
    return {
        name: (recorded(name, "exported"), with_prediction(name, recorded(name, "published"))) for name in TABLED_MODELS
    }


def fits(model: str, snapshot: Specs, served: Specs, *untrained: str) -> bool:
    return compare(snapshot, served, language_keys(MODELS[model]), untrained=untrained, place="/served")


@pytest.mark.parametrize(("model", "untrained"), UNTRAINED.items())
def test_what_slime_exports_fits_the_published_model(models, model: str, untrained: tuple[str, ...]) -> None:
    snapshot, served = models[model]
    assert not fits(model, snapshot, served, *untrained)
    for prefix in untrained:
        with pytest.raises(ModelInvalid, match="the snapshot lacks"):
            fits(model, snapshot, served, *(other for other in untrained if other != prefix))


@pytest.mark.parametrize(("model", "untrained"), UNTRAINED.items())
def test_unknown_and_missing_names_stay_refused(models, model: str, untrained: tuple[str, ...]) -> None:
    snapshot, served = models[model]
    name = next(name for name in reversed(snapshot) if "layers.2." in name)
    with pytest.raises(ModelInvalid, match="the snapshot lacks"):
        fits(model, {key: spec for key, spec in snapshot.items() if key != name}, served, *untrained)
    with pytest.raises(ModelInvalid, match=r"the snapshot has new\.weight, "):
        fits(model, snapshot | {"new.weight": snapshot[name]}, served, *untrained)


def test_a_snapshot_has_nothing_of_what_it_says_it_lacks(models) -> None:
    snapshot, served = models[FUSED]
    with pytest.raises(ModelInvalid, match=r"the snapshot has mtp\.norm\.weight, but says that it lacks"):
        fits(FUSED, snapshot | {"mtp.norm.weight": served["mtp.norm.weight"]}, served, "mtp.", "model.visual.")


def test_experts_are_compared_by_the_sum_of_their_shapes(models) -> None:
    snapshot, served = models[FUSED]
    whole = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    wider = served | {whole: TensorSpec(dtype="bfloat16", shape=(256, 1026, 2048))}
    with pytest.raises(ModelInvalid, match=r"experts\.gate_up_proj: the snapshot has shape \(256, 1024, 2048\)"):
        fits(FUSED, snapshot, wider, "mtp.", "model.visual.")
    for gone in ("experts.255.up_proj", "experts.0.down_proj"):
        less = {name: spec for name, spec in snapshot.items() if gone not in name or "layers.3." not in name}
        with pytest.raises(ModelInvalid, match=r"the snapshot lacks model\.language_model\.layers\.3\.mlp\.experts"):
            fits(FUSED, less, served, "mtp.", "model.visual.")


def test_a_loader_that_skips_single_experts_gets_none(models) -> None:
    """That of gpt-oss, for one, reads joined experts only."""
    snapshot, served = models[FUSED]
    keys = language_keys(MODELS[FUSED]) | {"model_type": "gpt_oss"}
    with pytest.raises(ModelInvalid, match="loader of gpt_oss is not known to read both"):
        compare(snapshot, served, keys, untrained=("mtp.", "model.visual."), place="/served")


def test_joined_experts_are_announced_one_by_one_where_the_files_have_them_so(models) -> None:
    _, served = models[SINGLE]
    joined = joined_experts(served)
    assert len(joined) < len(served) / 10
    assert fits(SINGLE, joined, served)
    described = single_experts(Bucket.of(joined))
    assert dict(zip(described.names, described.specs, strict=True)) == served
    assert described.size_bytes == Bucket.of(joined).size_bytes


def test_joined_experts_have_the_bytes_of_single_ones_one_after_another() -> None:
    gate_up = torch.arange(2 * 6 * 4, dtype=torch.bfloat16).view(2, 6, 4)
    bucket = Bucket.of({"layers.0.mlp.experts.gate_up_proj": TensorSpec(dtype="bfloat16", shape=(2, 6, 4))})
    described = single_experts(bucket)
    pieces = torch.split(gate_up.flatten(), [spec.size_bytes // 2 for spec in described.specs])
    found = {
        name: piece.view(spec.shape) for name, spec, piece in zip(described.names, described.specs, pieces, strict=True)
    }
    for expert in range(2):
        gate, up = gate_up[expert].chunk(2)
        assert torch.equal(found[f"layers.0.mlp.experts.{expert}.gate_proj.weight"], gate)
        assert torch.equal(found[f"layers.0.mlp.experts.{expert}.up_proj.weight"], up)


@pytest.fixture
def write_parts(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory with tensors of these names."""

    def write(folder: str, *names: str, **keys: Any) -> Path:
        model = tmp_path / folder
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2} | keys))
        save_file({name: torch.zeros(2) for name in names}, model / "model.safetensors")
        return model

    return write


LAYERS = ("model.layers.0.mlp.weight", "model.layers.1.mlp.weight")


@pytest.mark.parametrize(
    ("more", "exported", "prefixes"),
    [
        (("mtp.norm.weight", "model.visual.blocks.5.norm.weight"), (), ("model.visual.", "mtp.")),
        (("model.layers.2.enorm.weight", "model.layers.10.mlp.weight"), (), ("model.layers.10.", "model.layers.2.")),
        (("mtp.norm.weight", "mtp.fc.weight"), ("mtp.fc.weight",), ()),
        ((), (), ()),
    ],
)
def test_parts_without_any_exported_parameter_are_named(
    write_parts, more: tuple[str, ...], exported: tuple[str, ...], prefixes: tuple[str, ...]
) -> None:
    model = write_parts("model", *LAYERS, *more)
    snapshot = read_model_specs(write_parts("snapshot", *LAYERS, *exported))
    assert untrained_prefixes(snapshot.keys(), model) == prefixes
    if more == exported or prefixes:
        check_fits(snapshot, model, untrained=prefixes)
    elif more:
        with pytest.raises(ModelInvalid, match=r"lacks mtp\.norm\.weight"):
            check_fits(snapshot, model, untrained=prefixes)


def test_the_headers_of_a_served_model_are_read_again_only_when_its_files_change(
    write_parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.policies.push import fitting

    reads: list[Path] = []
    read = fitting.read_specs

    def counted(path: Path) -> Specs:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(fitting, "read_specs", counted)
    model = write_parts("model", *LAYERS)
    for _ in range(3):
        check_fits(read_model_specs(model), model)
    assert len(reads) == 1
    save_file({"other": torch.zeros(3)}, model / "model.safetensors")
    assert set(read_model_specs(model)) == {"other"}
    assert len(reads) == 2
