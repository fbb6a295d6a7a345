"""`headrace image`: named images of this host's image store."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headrace.actors.cli.output import Json, console, result_console, say, show, write_json
from headrace.actors.run.exit_codes import EXIT_DIRTY

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox
    from headrace.sandboxes.images.store import ImageStore, UnpackProgress

image_app = typer.Typer(no_args_is_help=True, help="Named images of this host, for recipes and sandbox servers.")

ImageFolder = Annotated[
    Path | None, typer.Option("--image-folder", help="Folder of the image store; by default in the user's cache.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the image; `image:NAME` is its reference.")]
INTERPRETER = "interpreter:"
"""Beginning of a source that builds E2B's code interpreter on the image that follows."""
_BOOTS = 5
_EXEC_TIMEOUT_S = 60.0
_PROGRAMS = ("bash", "git", "python3", "tmux", "curl")


def _store(folder: Path | None) -> ImageStore:
    from headrace.sandboxes.images.store import ImageStore, default_image_folder
    from headrace.sandboxes.local.provider import LocalSandboxConfig

    return ImageStore(folder or default_image_folder(), LocalSandboxConfig().image_bytes)


@image_app.command("add")
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A `docker save` archive, an OCI layout or archive, a folder or tar with a root file system, "
            "debootstrap:SUITE, docker://REFERENCE (needs skopeo), or interpreter:BASE: E2B's code interpreter on an "
            "image with Python, such as interpreter:host.",
        ),
    ],
    packages: Annotated[str, typer.Option(help="Packages of a suite or an interpreter, separated by commas.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace an image of that name.")] = False,
    image_folder: ImageFolder = None,
    json: Json = None,
) -> None:
    """Unpack or build an image and give it a name. Progress is printed; the source is not needed any more."""
    from headrace.sandboxes.images.adding import add_image
    from headrace.sandboxes.images.interpreter import DEFAULT_PACKAGES, add_interpreter
    from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

    store = _store(image_folder)

    def shown(_reference: str, progress: UnpackProgress) -> None:
        text = f"layer {progress.layer} of {progress.layers}, {progress.bytes >> 20} MiB of it so far"
        console().print(text, highlight=False)

    store.on_progress = shown

    async def run() -> Any:
        chosen = [package for package in packages.split(",") if package]
        if (base := source.removeprefix(INTERPRETER)) != source:
            async with LocalProvider(LocalSandboxConfig(image_folder=image_folder)) as provider:
                return await add_interpreter(provider, name, base, chosen or DEFAULT_PACKAGES)
        try:
            return await add_image(store, name, source, packages=chosen, replaces=replace)
        finally:
            await store.aclose()

    image = asyncio.run(run())
    if not write_json(image, json):
        say(f"{image.name}: {len(image.layers)} layers, {image.size_bytes / (1 << 20):.1f} MiB, {image.digest}")


@image_app.command("list")
def list_images(image_folder: ImageFolder = None, json: Json = None) -> None:
    """List the named images."""
    from headrace.sandboxes.images.catalog import ImageCatalog

    found = ImageCatalog(_store(image_folder).files).all()
    if write_json(found, json):
        return
    table = Table("name", "MiB", "layers", "created", "network of builds", "source", box=None)
    for image in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created_at))
        row = (image.name, f"{image.size_bytes / (1 << 20):.1f}", str(len(image.layers)), created)
        table.add_row(*row, image.network, image.source)
    show(table, result_console())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCheck:
    """What `headrace doctor --image` found."""

    name: str
    boots: int
    boot_p50_ms: float
    exec_p50_ms: float
    root: bool
    """A command ran as root."""
    user: bool
    """A command ran as an account with id 1000 and a home folder."""
    programs: dict[str, bool]

    @property
    def usable(self) -> bool:
        return self.root and self.user


def check_image(name: str, image_folder: Path | None, json: Path | None) -> None:
    """Boot sandboxes of an image, run commands as root and as a user, and measure; exit code 3 if any failed."""
    found = asyncio.run(_check(name, image_folder))
    if not write_json({**asdict(found), "usable": found.usable}, json):
        present = ", ".join(program for program, there in found.programs.items() if there) or "none"
        say(
            f"{name}: boot {found.boot_p50_ms:.1f} ms, exec {found.exec_p50_ms:.1f} ms (medians of {found.boots})",
            f"root: {'yes' if found.root else 'no'}; user: {'yes' if found.user else 'no'}; programs: {present}",
        )
    if not found.usable:
        raise typer.Exit(EXIT_DIRTY)


async def _check(name: str, image_folder: Path | None) -> ImageCheck:
    from headrace.sandboxes.base import Guest, SandboxSpec
    from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

    boots: list[float] = []
    execs: list[float] = []

    async def output(sandbox: Sandbox, command: str, user: str) -> str | None:
        began = time.perf_counter()
        done = await sandbox.exec(command, user=user, timeout_s=_EXEC_TIMEOUT_S)
        execs.append(time.perf_counter() - began)
        return done.stdout.decode(errors="replace").strip() if done.exit_code == 0 else None

    async with LocalProvider(LocalSandboxConfig(image_folder=image_folder)) as provider:
        spec = SandboxSpec(image=f"image:{name}", guest=Guest(sudo=False))
        await provider.store.resolve(spec.image)
        for _ in range(_BOOTS):
            began = time.perf_counter()
            sandbox = await provider.attach(await provider.create(spec))
            boots.append(time.perf_counter() - began)
            root = await output(sandbox, 'echo "$UID"', "root")
            user = await output(sandbox, 'cd && echo "$UID"', "user")
            there = {
                program: await output(sandbox, f"type -P {program} > /dev/null && echo yes", "root") == "yes"
                for program in _PROGRAMS
            }
            await sandbox.kill()
    return ImageCheck(
        name=name,
        boots=_BOOTS,
        boot_p50_ms=round(median(boots) * 1e3, 2),
        exec_p50_ms=round(median(execs) * 1e3, 2),
        root=root == "0",
        user=user == "1000",
        programs=there,
    )


@image_app.command("prune")
def prune(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Names to remove first.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    image_folder: ImageFolder = None,
    json: Json = None,
) -> None:
    """Remove layers that no named image, and no running sandbox, uses. They are unpacked again when they are needed."""
    from headrace.sandboxes.errors import ImageUnknown
    from headrace.sandboxes.images.catalog import ImageCatalog

    files = _store(image_folder).files
    files.prepare()
    # Says which entry is damaged, if one is: nothing would be removed then.
    files.retained()
    catalog = ImageCatalog(files)
    for name in names or ():
        if catalog.find(name) is None:
            raise ImageUnknown(f"image {name!r}: there is no image of that name (headrace image list)")
    if not dry_run:
        for name in names or ():
            catalog.remove(name)
    freed = files.unused_bytes(without=names or ()) if dry_run else files.evict(0)
    document = {"removed_names": names or [], "freed_bytes": freed, "dry_run": dry_run}
    if not write_json(document, json):
        say(f"{'would free' if dry_run else 'freed'} {freed / (1 << 20):.1f} MiB")
