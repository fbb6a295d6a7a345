"""Request bodies of the weight routes, with SGLang's keys and defaults."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class InitGroup(BaseModel):
    """Body of /init_weights_update_group."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    master_address: str
    """Host of rank 0's store."""
    master_port: int = Field(gt=0, lt=65536)
    """Port of rank 0's store."""
    rank_offset: int = Field(gt=0, lt=65536)
    """Rank of this engine, which is a single process."""
    world_size: int = Field(gt=1, le=65536)
    """Number of ranks in the group."""
    group_name: str = "weight_update_group"
    """Name of the group, and prefix of its keys in the store."""
    backend: str = "nccl"
    """Backend of the group; this engine supports gloo only."""


class UpdateWeights(BaseModel):
    """Body of /update_weights_from_distributed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    names: tuple[str, ...] = Field(min_length=1)
    """Hugging Face parameter names."""
    dtypes: tuple[str, ...]
    """Torch dtype names."""
    shapes: tuple[tuple[int, ...], ...]
    """One shape for each name."""
    group_name: str = "weight_update_group"
    """Group from which the weights are received."""
    flush_cache: bool = True
    """Refused while requests run. There is nothing to flush: this engine caches nothing between requests."""
    abort_all_requests: bool = False
    """Abort all waiting requests."""
    weight_version: str | None = None
    """Label of the weights after the swap."""
    load_format: str | None = None
    """None for one broadcast per tensor, `flattened_bucket` for one broadcast of all tensors."""


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_path: str = Field(min_length=1)
    """Directory with config.json and model.safetensors of the same model."""
    flush_cache: bool = True
    """Refused while requests run, as in UpdateWeights."""
    abort_all_requests: bool = False
    """Abort all requests first."""
    weight_version: str | None = None
    """Label of the weights after the swap; None keeps the present one."""


class UpdateVersion(BaseModel):
    """Body of /update_weight_version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    new_version: str
    """New label of the present weights."""
    abort_all_requests: bool = True
    """Abort all requests first, as SGLang does by default."""
