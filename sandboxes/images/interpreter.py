"""The image of the code interpreter: ipykernel and a server for E2B's SDKs, above an image with Python.

Invariants:
- Packages come from this host's own index and are installed on this host: the image needs neither pip nor a network.
  Wheels are chosen for the Python of the image.
- The server starts with each sandbox of the image, which is ready when it answers.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import BootFailed, ImageRefused, SpecRefused
from headrace.sandboxes.host.host_program import run_host_program
from headrace.sandboxes.images.build_context import store_files
from headrace.sandboxes.images.build_steps import E2B_USER, BuildStep, Recipe, StepKind
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.catalog import NAME, ImageCatalog, StoredImage
from headrace.sandboxes.images.layer_maker import BuildSandboxes
from headrace.sandboxes.images.layers import UnpackLimits

DEFAULT_NAME: Final = "code-interpreter-v1"
"""The template that E2B's SDKs for the code interpreter name."""
DEFAULT_PACKAGES: Final = ("ipykernel>=6.29,<8", "matplotlib", "pandas")
_FOLDER: Final = "/opt/code-interpreter"
_START: Final = (
    f"PYTHONPATH={_FOLDER}/site JUPYTER_PATH={_FOLDER}/site/share/jupyter "
    f"exec python3 {_FOLDER}/server.py > /tmp/code-interpreter.log 2>&1"
)
_READY: Final = "(exec 3<> /dev/tcp/127.0.0.1/49999)"
_VERSION: Final = "python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'"
_EXEC_TIMEOUT_S: Final = 60.0


async def add_interpreter(
    provider: BuildSandboxes,
    name: str = DEFAULT_NAME,
    base: str = "host",
    packages: Sequence[str] = DEFAULT_PACKAGES,
) -> StoredImage:
    """Build the image above `base` and add it to the catalogue of the provider's store, replacing one of that name.
    Raises SpecRefused (the name), ImageRefused (no Python), BootFailed (pip), and the errors of builds."""
    if not NAME.fullmatch(name):
        raise SpecRefused(f"image name {name[:200]!r}: must have letters, digits and ._/- (at most 200)")
    builder = ImageBuilder(provider)
    await builder.prepare()
    sandbox = await provider.attach(await provider.create(SandboxSpec(image=base)))
    try:
        found = await sandbox.exec(_VERSION, timeout_s=_EXEC_TIMEOUT_S)
    finally:
        await sandbox.kill()
    version = found.stdout.decode(errors="replace").strip()
    if found.exit_code != 0 or version.count(".") != 1:
        raise ImageRefused(f"image {base!r}: the code interpreter needs python3 in it")
    with tempfile.TemporaryDirectory(prefix="headrace-interpreter-") as temporary:
        context = Path(temporary)
        await _install(context / "site", version, packages)
        server = Path(__file__).with_name("interpreter_server.py")
        await asyncio.to_thread(shutil.copyfile, server, context / "server.py")
        limits = UnpackLimits(builder.limits.layer_bytes, builder.limits.entries)
        steps = []
        for part in ("site", "server.py"):
            digest = await asyncio.to_thread(store_files, builder.files, context, part, limits)
            target = f"{_FOLDER}/{part}"
            steps.append(BuildStep(kind=StepKind.COPY, arguments=(part, target, "root:root", ""), context=digest))
    recipe = Recipe(base=base, steps=tuple(steps), start_command=_START, ready_command=_READY, default_user=E2B_USER)
    source = f"code interpreter above {base}: {', '.join(packages)}"
    image = replace(await builder.build(recipe), name=name, source=source)
    await asyncio.to_thread(ImageCatalog(builder.files).put, image)
    return image


async def _install(target: Path, version: str, packages: Sequence[str]) -> None:
    command = (
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--target", str(target), "--only-binary=:all:", "--implementation", "cp", "--python-version", version),
        *packages,
    )
    status, text = await run_host_program(command)
    if status != 0:
        raise BootFailed(f"pip install {' '.join(packages)}: {text}")
