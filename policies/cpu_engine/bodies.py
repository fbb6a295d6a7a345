"""Bodies of the weight routes, with SGLang's keys and defaults."""

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
    """Our rank: this engine is one process."""
    world_size: int = Field(gt=1, le=65536)
    """Ranks in the group."""
    group_name: str = "weight_update_group"
    """Its name, also the store's prefix."""
    backend: str = "nccl"
    """This engine takes gloo only."""


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
    """The group to receive from."""
    flush_cache: bool = True
    """Nothing is cached between requests here, so there is nothing to flush; refused while requests run."""
    abort_all_requests: bool = False
    """Abort what waits."""
    weight_version: str | None = None
    """The label from the swap on."""
    load_format: str | None = None
    """None: one broadcast a tensor; flattened_bucket: one for all."""


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_path: str = Field(min_length=1)
    """Directory with config.json and model.safetensors of the same model."""
    flush_cache: bool = True
    """As in UpdateWeights."""
    abort_all_requests: bool = False
    """Abort what runs and waits, first."""
    weight_version: str | None = None
    """The label from the swap on; None keeps it."""


class UpdateVersion(BaseModel):
    """Body of /update_weight_version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    new_version: str
    """The label from now on, for the same weights."""
    abort_all_requests: bool = True
    """Abort what runs and waits, first: SGLang's default."""
