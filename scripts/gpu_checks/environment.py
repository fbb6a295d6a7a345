"""What is installed, and what it finds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from gpu_checks.outcome import Bounds, Figure, Outcome
from gpu_checks.place import Place
from gpu_checks.wheels import WHEELS


def check_environment(place: Place) -> Outcome:
    """Report versions, devices and NCCL. It fails where a package is missing, or a device that was asked for."""
    import torch

    missing = []
    measured: dict[str, Figure] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", *WHEELS):
        try:
            measured[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    measured |= {"missing_packages": len(missing), "missing": ", ".join(missing)}
    bounds: dict[str, Bounds] = {"missing_packages": (None, 0)}
    remedy = "carry the wheels of `scripts/gpu_check wheels` and name their folder in PYTHONPATH" if missing else ""
    if place.device == "cpu":
        not_run = "CUDA and NCCL: the suite was asked for the CPU"
        return Outcome(measured=measured, bounds=bounds, not_run=not_run, remedy=remedy)
    devices = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    measured |= {"cuda": torch.version.cuda or "not built in", "CUDA_VISIBLE_DEVICES": visible, "devices": devices}
    if devices:
        properties = torch.cuda.get_device_properties(0)
        major, minor, patch = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        measured |= {"device": properties.name, "device_bytes": properties.total_memory}
        measured["nccl"] = f"{major}.{minor}.{patch}"
    else:
        remedy = remedy or "install a CUDA build of torch on a host with a GPU, or give --device cpu"
    return Outcome(measured=measured, bounds=bounds | {"devices": (1, None)}, remedy=remedy)
