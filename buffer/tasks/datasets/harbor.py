"""The converter of Harbor's task folders to tasks of kind verifier.

A folder has `task.toml`, `instruction.md`, `environment/`, `tests/` and, often, `solution/`. Invariants:
- A folder becomes a task that can be scored, or a refusal with its name and the reason, before anything boots.
- A table names our image for each base image or `docker_image`. A Dockerfile that does more than name a base and a
  working directory is refused, unless images are built from the Dockerfiles: the task then names the image by the
  folder's name and a digest of `environment/`, so that it cannot be one of other contents. A verifier that needs the
  network is refused.
- No test and nothing of the solution is in the instruction or in the files that the agent sees.
- Only files of the folder itself are read; links out of it are refused, and so are members of archives that are links
  or would leave the folder (`archives`).
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.buffer.tasks.datasets.archives import ArchiveBounds, is_archive, unpack
from headrace.buffer.tasks.datasets.recognition import converted
from headrace.buffer.tasks.datasets.rows import Item, RowRefused, SourceRefused, read_rows
from headrace.buffer.tasks.evaluators import VerifierEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskLimits, TaskOrigin
from headrace.buffer.tasks.repositories import is_plain_path
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.tasks.verifiers import TESTS, VerifierForm, VerifierSpec, why_not_runnable

_NETWORK: Final = re.compile(
    r"(?<![\w./$-])(apt-get|apt|apk|yum|dnf|curl|wget|pip3?|pipx|uvx?|conda|npm|npx|cargo|git\s+clone)\s"
)
ROW_BOUNDS: Final = ArchiveBounds(total_bytes=64 << 20, members=10_000)
"""Bounds of a task folder that is packed in a row."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSettings:
    """Settings that the folders do not contain."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Our image for each base image of a Dockerfile, and for each `docker_image`, as written there."""
    built: bool = False
    """Whether the images of folders with a Dockerfile are those that `headrace data images` builds."""
    live: bool = True
    """Whether verifiers run in the agent's sandbox, as Harbor's do, or in clean ones with the data paths."""
    allow_root: bool = False
    """Whether live verifiers accept an agent that was root."""
    data_paths: tuple[str, ...] = ()
    """Paths that the agent changes, for verifiers that are not live; the working directory if empty."""
    solved_at: float = 1.0
    """Reward from which a task is solved."""


class _Model(BaseModel):
    # Folders have fields for other tools; only those that are read must have the right type.
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Name(_Model):
    name: str = ""


class _Agent(_Model):
    timeout_sec: float | None = None
    user: str | int | None = None


class _Verifier(_Model):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: str = "shared"
    environment: dict[str, Any] = {}
    collect: Any = None


class _Environment(_Model):
    docker_image: str = ""
    workdir: str = ""
    cpus: float | None = None
    memory_mb: float | None = None
    memory: str | None = None
    storage_mb: float | None = None
    storage: str | None = None
    gpus: float = 0
    network_mode: str = "public"
    env: dict[str, str] = {}
    os: str = "linux"
    healthcheck: Any = None
    mcp_servers: Any = None


class _Solution(_Model):
    env: dict[str, str] = {}


class _Document(_Model):
    task: _Name = _Name()
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: Any = None


def read_folders(source: Path, settings: HarborSettings) -> Iterator[Item]:
    """Yield the tasks of a task folder, or of all task folders in a folder or tar archive, by name, and the refused
    ones. The number is the folder's position. Raises OSError, SourceRefused."""
    if is_archive(source):
        with TemporaryDirectory(prefix="headrace-tasks-") as unpacked, source.open("rb") as stream:
            refused = unpack(stream, Path(unpacked))
            yield from _read_each(Path(unpacked), settings, refused)
        return
    yield from _read_each(source, settings, {})


def _read_each(source: Path, settings: HarborSettings, refused: Mapping[str, str]) -> Iterator[Item]:
    """Yield the tasks of an unpacked folder, of which the members `refused` are missing."""
    root, folders = source, task_folders(source)
    left = dict(refused)
    names: dict[TaskId, str] = {}
    for number, folder in enumerate(folders, start=1):
        missing = [member for member in left if PurePosixPath(member).is_relative_to(folder.relative_to(root))]
        reasons = [f"{member}: {left.pop(member)}" for member in missing]
        try:
            if reasons:
                raise RowRefused(reasons[0])
            found = task_of(folder, settings)
            if found.id in names:
                raise RowRefused(f"task.name: {found.id!r} is also the name of {names[found.id]}")
        except ValueError as error:
            yield number, RowRefused(f"{folder.name}: {error}")
            continue
        names[found.id] = folder.name
        yield number, found
    for number, (member, reason) in enumerate(left.items(), start=len(folders) + 1):
        yield number, RowRefused(f"{member}: {reason}")


def task_folders(source: Path) -> list[Path]:
    """Return a task folder, or all folders in a folder of tasks, by name; where none of them is a task, those at any
    depth that are (repositories have groups, archives a folder above). Hidden folders are none. Raises OSError."""
    if (source / "task.toml").exists():
        return [source]
    folders = sorted(path for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))
    if any((path / "task.toml").exists() for path in folders):
        return folders
    deeper = (path.parent for folder in folders for path in folder.rglob("task.toml"))
    shown = (path for path in deeper if not any(name.startswith(".") for name in path.relative_to(source).parts))
    return sorted(shown) or folders


def built_image(folder: Path) -> str | None:
    """Return the name of the image that is built from a folder's Dockerfile; it changes with every file and mode of
    `environment/`. Returns None for a folder without a Dockerfile. Raises OSError."""
    environment = folder / "environment"
    if not (environment / "Dockerfile").is_file():
        return None
    content = hashlib.sha256()
    for path in sorted(environment.rglob("*")):
        status = path.lstat()
        data = b""
        if path.is_symlink():
            data = str(path.readlink()).encode()
        elif path.is_file():
            data = hashlib.sha256(path.read_bytes()).digest()
        name = path.relative_to(environment).as_posix()
        content.update(f"{len(name)}:{name}:{status.st_mode}:{len(data)}:".encode() + data)
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name)[:100]
    return f"harbor/{plain}-{content.hexdigest()[:12]}"


def read_endless(source: Path, settings: HarborSettings) -> Iterator[Item]:
    """Yield the tasks of Endless Terminals: task folders in Harbor's form, or rows whose `task_binary` is a tar of one
    (Echo's). Rows that only name a task are refused. Raises OSError, SourceRefused."""
    if source.is_dir() or is_archive(source):
        return read_folders(source, settings)
    return converted("endless", read_rows(source), lambda _, row: task_of_row(row, settings))


def task_of_row(row: object, settings: HarborSettings) -> Task:
    """Convert a row whose `task_binary` is the tar of a task folder. Raises RowRefused."""
    packed = row.get("task_binary") if isinstance(row, dict) else None
    if not isinstance(packed, bytes):
        raise RowRefused("the row has no tests, only the instruction or a path; convert the task folders instead")
    with TemporaryDirectory(prefix="headrace-task-") as folder:
        try:
            refused = unpack(BytesIO(packed), Path(folder), ROW_BOUNDS)
        except SourceRefused as error:
            raise RowRefused(f"task_binary: {error}") from error
        if refused:
            member, reason = next(iter(refused.items()))
            raise RowRefused(f"task_binary: {member}: {reason}")
        below = [path.parent for path in (Path(folder), *Path(folder).iterdir()) for path in path.glob("task.toml")]
        if len(below) != 1:
            raise RowRefused("task_binary: must have one task.toml, at its top or in one folder")
        return task_of(below[0], settings)


def task_of(folder: Path, settings: HarborSettings) -> Task:
    """Convert one folder. Its clocks and sizes become limits; `environment.given` has the working directory, which the
    image must contain, and the agent's user. Raises RowRefused."""
    document = _document(folder)
    instruction = _text(folder, "instruction.md")
    if not instruction.strip():
        raise RowRefused("instruction.md: is empty")
    _refuse_unsupported(document)
    image, workdir, files = _image(folder, document.environment, settings)
    tests = _files_below(folder, "tests", TESTS)
    for path, text in tests.items():
        if not path.endswith(".sh"):
            continue
        code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#")) + "\n"
        if (found := _NETWORK.search(code)) is not None:
            raise RowRefused(
                f"{path.removeprefix('/')}: needs the network ({found[1]}); put what it installs in the image"
            )
    verifier = VerifierSpec(
        form=VerifierForm.HARBOR,
        live=settings.live,
        allow_root=settings.live and settings.allow_root,
        workdir=workdir,
        environment=document.verifier.env,
        solved_at=settings.solved_at,
    )
    data_paths = () if settings.live else settings.data_paths or ((workdir,) if workdir else ())
    if not settings.live and not data_paths:
        raise RowRefused(
            "data_paths: there is no WORKDIR; name the paths that the agent changes, or use live verifiers"
        )
    if (reason := why_not_runnable(verifier, tests, data_paths)) is not None:
        raise RowRefused(reason)
    evaluator = VerifierEvaluator(
        verifier=verifier,
        hidden_files=tests,
        timeout_s=document.verifier.timeout_sec,
        data_paths=data_paths,
    )
    category = document.metadata.get("category")
    given = document.environment
    user = {} if document.agent.user is None else {"user": str(document.agent.user)}
    return Task(
        id=TaskId(document.task.name or folder.resolve().name),
        family=f"harbor/{category}" if isinstance(category, str) and category else "harbor",
        instruction=instruction,
        image=image,
        files=files,
        evaluator=evaluator,
        environment=EnvironmentSpec(kind="terminal", given=({"workdir": workdir} if workdir else {}) | user),
        limits=TaskLimits(
            agent_s=document.agent.timeout_sec,
            cpus=given.cpus,
            memory_mb=_megabytes("memory", given.memory_mb, given.memory),
            disk_mb=_megabytes("storage", given.storage_mb, given.storage),
        ),
        origin=TaskOrigin(source="harbor"),
    )


def _document(folder: Path) -> _Document:
    """Read `task.toml`. Raises RowRefused."""
    try:
        return _Document.model_validate(tomllib.loads(_text(folder, "task.toml")))
    except tomllib.TOMLDecodeError as error:
        raise RowRefused(f"task.toml: not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RowRefused(f"task.toml: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def read_solution(folder: Path) -> tuple[dict[str, bytes], dict[str, str]] | None:
    """Return the files of a folder's solution by their path below `solution/`, and the variables that it needs; None
    without `solution/solve.sh`. Raises RowRefused, OSError."""
    below = folder / "solution"
    if not (below / "solve.sh").is_file():
        return None
    environment = _document(folder).solution.env
    if any("${" in value for value in environment.values()):
        raise RowRefused("solution.env: has references to variables of the host")
    files = [path for path in sorted(below.rglob("*")) if not path.is_dir()]
    for path in files:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise RowRefused(f"solution/{path.relative_to(below)}: is a link out of the folder")
    return {path.relative_to(below).as_posix(): path.read_bytes() for path in files}, environment


def _refuse_unsupported(document: _Document) -> None:
    """Raise RowRefused for the first setting that a task cannot express."""
    environment, verifier = document.environment, document.verifier
    timeouts = (verifier.timeout_sec, document.agent.timeout_sec or 1.0)
    reasons = {
        "steps: tasks of several steps are not supported": document.steps,
        "environment.network_mode: an allowlist is not supported": environment.network_mode == "allowlist",
        "environment.gpus: sandboxes have no GPU": environment.gpus,
        "environment.os: only linux is supported": environment.os != "linux",
        "environment.env: put the variables in the image": environment.env,
        "environment.healthcheck: is not supported": environment.healthcheck,
        "environment.mcp_servers: are not supported": environment.mcp_servers,
        "verifier.environment_mode: only shared is supported": verifier.environment_mode != "shared"
        or verifier.environment,
        "verifier.user: only root is supported": verifier.user not in (None, "root", 0, "0"),
        "verifier.collect: is not supported": verifier.collect,
        "verifier.env: has references to variables of the host": any("${" in value for value in verifier.env.values()),
        "timeout_sec: must be a number above 0": not all(0 < timeout_s < float("inf") for timeout_s in timeouts),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RowRefused(reason)


def _image(folder: Path, environment: _Environment, settings: HarborSettings) -> tuple[str, str, dict[str, str]]:
    """Return our image, the working directory (empty if unknown) and the files that belong there. Raises RowRefused."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise RowRefused(f"environment/{name}: several containers are not supported")
    base, workdir = environment.docker_image, ""
    others: list[str] = []
    has_dockerfile = (folder / "environment" / "Dockerfile").exists()
    if has_dockerfile:
        base, workdir, others = read_dockerfile(_text(folder, "environment/Dockerfile"))
    if environment.docker_image:
        # The image was built from the Dockerfile, so whatever it does has been done.
        base, others = environment.docker_image, []
    if not base:
        raise RowRefused("environment/Dockerfile: is missing, and so is environment.docker_image")
    built = built_image(folder) if settings.built and not environment.docker_image else None
    if others and built is None:
        raise RowRefused(
            f"environment/Dockerfile: {others[0]} needs an image build: run headrace data images, and set built=true"
        )
    workdir = environment.workdir or workdir
    if workdir and not is_plain_path(workdir):
        raise RowRefused(f"WORKDIR: {workdir!r} must be an absolute path without variables, '.' or '..'")
    if built is not None:
        return f"image:{built}", workdir, {}
    if base not in settings.images:
        raise RowRefused(f"images: has no image for {base!r}; add it")
    files: dict[str, str] = {}
    if not has_dockerfile and (folder / "environment").is_dir():
        files = _files_below(folder, "environment", workdir)
        if files and not workdir:
            raise RowRefused("environment.workdir: is missing, and the files of environment/ belong there")
    return settings.images[base], workdir, files


def read_dockerfile(text: str) -> tuple[str, str, list[str]]:
    """Return the base image of a Dockerfile, its last working directory, and the names of all instructions other than
    the first FROM and WORKDIR."""
    base, workdir = "", ""
    others: list[str] = []
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\[ \t]*\n", " ", code).split("\n"):
        name, _, rest = line.strip().partition(" ")
        words = [word for word in rest.split() if not word.startswith("--")]
        match name.upper():
            case "":
                continue
            case "FROM" if not base and words and "$" not in words[0]:
                base = words[0]
            case "WORKDIR" if words and "$" not in rest:
                workdir = str(PurePosixPath(workdir or "/") / rest.strip().strip("\"'"))
            case other:
                others.append(other)
    return base, workdir, others


def _files_below(folder: Path, name: str, target: str) -> dict[str, str]:
    """Return the text files below a subfolder by their path below `target`. Raises RowRefused."""
    if not (folder / name).is_dir():
        raise RowRefused(f"{name}/: is missing")
    found: dict[str, str] = {}
    for path in sorted((folder / name).rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        below = path.relative_to(folder / name).as_posix()
        found[f"{target}/{below}"] = _text(folder, f"{name}/{below}")
    return found


def _text(folder: Path, name: str) -> str:
    """Return the text of a file in a folder. Raises RowRefused."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RowRefused(f"{name}: is a link out of the folder")
    if path.exists() and not path.is_file():
        raise RowRefused(f"{name}: is not a regular file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RowRefused(f"{name}: is not UTF-8 text; binary files are not supported") from error
    except OSError as error:
        raise RowRefused(
            f"{name}: {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}"
        ) from error
    if "\0" in text:
        raise RowRefused(f"{name}: is not text; binary files are not supported")
    return text


def _megabytes(name: str, number: float | None, text: str | None) -> int | None:
    """Return a size that is given as a number of megabytes, or as a text such as `2G`. Raises RowRefused."""
    if number is not None or text is None:
        return None if number is None else int(number)
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RowRefused(f"environment.{name}: {text!r} must be a size such as 512M")
    return int(float(found[1]) * _UNITS[found[2].upper()]) >> 20
