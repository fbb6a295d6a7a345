"""Harbor's task folders: what becomes of their fields, and what is refused with which reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.buffer.tasks.datasets.converters import SettingsRefused, convert
from headrace.buffer.tasks.datasets.harbor import (
    HarborSettings,
    read_dockerfile,
    read_folders,
    read_solution,
    task_folders,
    task_of,
)
from headrace.buffer.tasks.datasets.rows import RowRefused
from headrace.buffer.tasks.evaluators import VerifierEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec
from headrace.buffer.tasks.task import load_tasks
from headrace.buffer.tasks.verifiers import VerifierForm
from support.conversions import split

SETTINGS = HarborSettings(images={"ubuntu:22.04": "/images/jammy"})
TOML = """\
schema_version = "1.4"
[task]
name = "example/count"
[metadata]
category = "files"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 120.0
[environment]
cpus = 2
memory_mb = 2048
storage_mb = 4096
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "Count the lines.\n",
    "environment/Dockerfile": "# base\nFROM --platform=linux/amd64 ubuntu:22.04\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\n# no pip install\npython3 /tests/sub/check.py > /logs/verifier/reward.txt\n",
    "tests/sub/check.py": "print(1)\n",
    "solution/solve.sh": "wc -l < a > b\n",
}


def make(folder: Path, **changes: str | bytes | None) -> Path:
    """Write a folder; the names of changes have `__` for `/` and `_0` for a dot."""
    files: dict[str, str | bytes | None] = dict(FILES)
    files |= {name.replace("__", "/").replace("_0", "."): content for name, content in changes.items()}
    for name, content in files.items():
        if content is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    task = task_of(make(tmp_path / "count"), SETTINGS)
    evaluator = task.evaluator
    assert (task.id, task.family, task.image) == ("example/count", "harbor/files", "/images/jammy")
    assert (task.instruction, task.files) == ("Count the lines.\n", {})
    assert (type(evaluator), evaluator.timeout_s, evaluator.data_paths) == (VerifierEvaluator, 120.0, ())
    assert set(evaluator.hidden_files) == {"/tests/test.sh", "/tests/sub/check.py"}
    assert evaluator.verifier is not None
    verifier = evaluator.verifier
    assert (verifier.form, verifier.live, verifier.allow_root) == (VerifierForm.HARBOR, True, False)
    assert verifier.workdir == "/app"
    assert task.environment == EnvironmentSpec(kind="terminal", given={"workdir": "/app"})
    assert dict(task.limits.items()) == {"agent_s": 300.0, "cpus": 2, "memory_mb": 2048, "disk_mb": 4096}
    assert "wc -l" not in str(task)


def test_tasks_are_found_in_groups_but_not_in_hidden_folders(tmp_path: Path) -> None:
    shown = [make(tmp_path / "tasks" / group / "count") for group in ("files", "logs")]
    make(tmp_path / ".old" / "count")
    make(tmp_path / "tasks" / ".old" / "count")
    (tmp_path / "hooks").mkdir()
    assert task_folders(tmp_path) == shown
    assert task_folders(shown[0]) == [shown[0]]
    assert task_folders(tmp_path / "tasks" / "files") == [shown[0]]


def test_a_solution_is_a_whole_folder_with_its_variables(tmp_path: Path) -> None:
    toml = TOML + '[solution.env]\nWAY = "short"\n'
    folder = make(tmp_path / "count", task_0toml=toml, solution__a__b_0bin=b"\xff")
    assert read_solution(folder) == ({"a/b.bin": b"\xff", "solve.sh": b"wc -l < a > b\n"}, {"WAY": "short"})
    make(folder, task_0toml=TOML + '[solution.env]\nKEY = "${KEY}"\n')
    with pytest.raises(RowRefused, match=r"solution\.env: has references"):
        read_solution(folder)


def test_a_clean_verifier_sees_the_working_directory(tmp_path: Path) -> None:
    folder = make(tmp_path)
    clean = HarborSettings(images=SETTINGS.images, live=False)
    assert task_of(folder, clean).evaluator.data_paths == ("/app",)
    named = HarborSettings(images=SETTINGS.images, live=False, data_paths=("/app", "/home/user"), solved_at=0.5)
    evaluator = task_of(folder, named).evaluator
    assert evaluator.data_paths == ("/app", "/home/user")
    assert evaluator.verifier is not None
    assert evaluator.verifier.solved_at == 0.5
    make(folder, environment__Dockerfile="FROM ubuntu:22.04\n")
    with pytest.raises(RowRefused, match="there is no WORKDIR"):
        task_of(folder, clean)


def test_a_prebuilt_image_needs_no_dockerfile(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "ubuntu:22.04"\nworkdir = "/srv/task"\n'
    toml += 'memory = "1.5G"\nstorage = "2G"\n[agent]\nuser = "dev"\n'
    files = {"environment__Dockerfile": None, "environment__data__a_0txt": "text\n", "solution__solve_0sh": None}
    folder = make(tmp_path / "plain", task_0toml=toml, **files)
    found = task_of(folder, SETTINGS)
    assert (found.id, found.family) == ("plain", "harbor")
    assert (found.limits.memory_mb, found.limits.disk_mb) == (1536, 2048)
    assert found.files == {"/srv/task/data/a.txt": "text\n"}
    assert found.environment == EnvironmentSpec(kind="terminal", given={"workdir": "/srv/task", "user": "dev"})
    assert read_solution(folder) is None
    built = make(tmp_path / "built", task_0toml=toml, environment__Dockerfile="FROM x\nRUN make\nWORKDIR /src\n")
    assert task_of(built, SETTINGS).files == {}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("FROM a", ("a", "", [])),
        ("from a AS b\nworkdir /x\nWORKDIR y", ("a", "/x/y", [])),
        ("FROM a\nRUN x \\\n  && FROM b\nCOPY . .", ("a", "", ["RUN", "COPY"])),
        ("FROM a\nFROM b", ("a", "", ["FROM"])),
        ("ARG A=1\nFROM $A\nWORKDIR $HOME", ("", "", ["ARG", "FROM", "WORKDIR"])),
        ("", ("", "", [])),
    ],
)
def test_dockerfiles_are_read(text: str, read: tuple[str, str, list[str]]) -> None:
    assert read_dockerfile(text) == read


def toml(section: str, line: str) -> str:
    return f"[{section}]\n{line}\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task_0toml": None}, "task.toml: is missing"),
        ({"task_0toml": "a = "}, "task.toml: not valid TOML"),
        ({"task_0toml": toml("agent", 'timeout_sec = "soon"')}, "task.toml: agent.timeout_sec: Input should be"),
        ({"task_0toml": toml("verifier", "timeout_sec = 0")}, "timeout_sec: must be a number above 0"),
        ({"task_0toml": toml("environment", "gpus = 1")}, "environment.gpus"),
        ({"task_0toml": toml("environment", 'memory = "much"')}, "environment.memory: 'much'"),
        ({"task_0toml": toml("environment", 'network_mode = "allowlist"')}, "an allowlist is not supported"),
        ({"task_0toml": toml("environment", 'workdir = "app"')}, "WORKDIR: 'app' must be an absolute path"),
        ({"task_0toml": toml("environment.env", 'A = "1"')}, "environment.env"),
        ({"task_0toml": toml("verifier.env", 'KEY = "${KEY}"')}, "variables of the host"),
        ({"task_0toml": toml("verifier", 'environment_mode = "separate"')}, "only shared is supported"),
        ({"task_0toml": toml("verifier", 'user = "tester"')}, "verifier.user: only root"),
        ({"task_0toml": '[[steps]]\nname = "a"\n'}, "steps: tasks of several steps"),
        ({"instruction_0md": None}, "instruction.md: is missing"),
        ({"instruction_0md": " \n"}, "instruction.md: is empty"),
        ({"environment__Dockerfile": None}, "environment/Dockerfile: is missing"),
        ({"environment__Dockerfile": "FROM ubuntu:22.04\nRUN true\n"}, "Dockerfile: RUN needs an image build"),
        ({"environment__Dockerfile": "FROM debian:12\n"}, "images: has no image for 'debian:12'"),
        ({"environment__docker-compose_0yaml": ""}, "docker-compose.yaml: several containers"),
        ({"tests__test_0sh": None}, "hidden_files: has no /tests/test.sh"),
        ({"tests__test_0sh": "apt-get update\n"}, "tests/test.sh: needs the network (apt-get)"),
        ({"tests__test_0sh": "set -e\ncurl -LsSf https://example.invalid | sh\n"}, "needs the network (curl)"),
        ({"tests__test_0sh": "cd /app && uvx pytest\n"}, "needs the network (uvx)"),
        ({"tests__test_0sh": "python3 -m pip install pytest\n"}, "needs the network (pip)"),
        ({"tests__data_0bin": b"\xff\xfe"}, "tests/data.bin: is not UTF-8 text; binary files"),
        ({"tests__data_0bin": b"a\0b"}, "tests/data.bin: is not text; binary files"),
    ],
)
def test_a_folder_that_cannot_be_scored_is_refused(
    tmp_path: Path, changes: dict[str, str | bytes | None], said: str
) -> None:
    tasks, refusals = split(read_folders(make(tmp_path / "one", **changes).parent, SETTINGS))
    assert (tasks, len(refusals)) == ((), 1)
    assert refusals[0].reason.startswith("one: ")
    assert said in refusals[0].reason


def test_words_that_only_look_like_installers_are_not_refused(tmp_path: Path) -> None:
    script = "PIP=1\necho $uv\npython3 /tests/curl.py\ntest -x /usr/bin/wget || true\n"
    assert task_of(make(tmp_path, tests__test_0sh=script), SETTINGS).id == "example/count"


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = make(tmp_path / "one")
    (folder / "tests" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(RowRefused, match="tests/link: is a link out of the folder"):
        task_of(folder, SETTINGS)


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name)
    tasks, refusals = split(read_folders(tmp_path, SETTINGS))
    assert [found.id for found in tasks] == ["example/count"]
    assert "b: task.name: 'example/count' is also the name of a" in refusals[0].reason
    assert refusals[0].line == 2


def test_folders_are_converted_to_a_task_file(tmp_path: Path) -> None:
    make(tmp_path / "tasks" / "good")
    make(tmp_path / "tasks" / "bad", instruction_0md="")
    settings = {"images": '{"ubuntu:22.04": "/images/jammy"}', "live": "false", "data_paths": '["/app"]'}
    done = convert(tmp_path / "tasks", tmp_path / "out", form="harbor", settings=settings)
    assert (done.count, [refusal.reason for refusal in done.refusals]) == (1, ["bad: instruction.md: is empty"])
    (task,) = load_tasks(done.tasks)
    assert (task.image, task.evaluator.data_paths) == ("/images/jammy", ("/app",))
    with pytest.raises(SettingsRefused, match="image: unknown setting"):
        convert(tmp_path / "tasks", tmp_path / "out", form="harbor", settings={"image": "x"})
