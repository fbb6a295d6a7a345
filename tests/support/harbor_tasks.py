"""Task folders in Harbor's form, with the verdict that each must get."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

BASE = "ubuntu:22.04"
"""The base of all Dockerfiles; a test maps it to an image of its own."""
CHECKED = """\
#!/bin/bash
set -u
{checks}
if [ "$(cat {place}/answer)" = {expected} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """A folder to write. `verdict` is the rewards of Harbor's verifier, or the name of its exception."""

    name: str
    files: dict[str, str]
    verdict: dict[str, float] | str
    both: bool = False
    """True if there are rewards beside the exception AgentTimeoutError."""
    settings: dict[str, object] = field(default_factory=dict)

    def write(self, parent: Path) -> Path:
        folder = parent / self.name
        sections = {"agent": {"timeout_sec": 60.0}, "verifier": {"timeout_sec": 60.0}, **self.settings}
        lines = ['schema_version = "1.4"', "[task]", f'name = "own/{self.name}"']
        for section, values in sections.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in dict(values).items())]  # type: ignore[call-overload]
        files = {"task.toml": "\n".join(lines) + "\n", "instruction.md": "Write the answer.\n", **self.files}
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".sh":
                path.chmod(0o755)
        return folder


def built_tasks(count: int) -> list[TaskFolder]:
    """Return tasks with images to build, every fifth with a wrong solution."""
    return [_built(number) for number in range(count)]


def _built(number: int) -> TaskFolder:
    right = number % 5 != 4
    expected, kind = f"answer-{number}", number % 7
    place, checks = "/app", "[ -d /app ] || exit 1"
    settings: dict[str, object] = {}
    environment: dict[str, str] = {}
    match kind:
        case 0:
            dockerfile = f"FROM {BASE}\nWORKDIR /app\nRUN echo {number} > built\n"
            checks = f'[ "$(cat /app/built)" = {number} ] || exit 1'
        case 1:
            dockerfile = f'FROM {BASE}\nENV KEY="a value {number}" OTHER=$KEY\nWORKDIR /app\nRUN echo "$KEY" > key\n'
            checks = f'[ "$KEY" = "a value {number}" ] && [ "$(cat key)" = "$KEY" ] || exit 1'
        case 2:
            dockerfile = f"FROM {BASE}\nCOPY data /app/data\nCOPY one.txt two.txt /app/more/\nWORKDIR /app\n"
            environment = {"data/deep/file": "deep\n", "one.txt": "1\n", "two.txt": "2\n"}
            checks = '[ "$(cat /app/data/deep/file /app/more/*.txt | tr "\\n" " ")" = "deep 1 2 " ] || exit 1'
        case 3:
            place = "/home/agent/work"
            dockerfile = f"FROM {BASE}\nUSER agent\nWORKDIR {place}\nRUN id -un > who\n"
            checks = f'[ "$(cat {place}/who)" = agent ] && [ "$(stat -c %U {place}/who)" = agent ] || exit 1'
        case 4:
            dockerfile = ""
            place, settings = "/workspace", {"environment": {"docker_image": BASE, "workdir": "/workspace"}}
            checks = "[ -d /workspace ] || exit 1"
        case 5:
            dockerfile = (
                f"FROM {BASE}\nARG NUMBER={number}\nWORKDIR /app\nCOPY --chmod=700 tool.sh .\n"
                f'RUN ./tool.sh "$NUMBER" \\\n    && rm tool.sh\nEXPOSE 80\nLABEL a=b\n'
            )
            environment = {"tool.sh": "#!/bin/bash\necho tool-$1 > made\n"}
            checks = f'[ "$(cat /app/made)" = tool-{number} ] && [ ! -e /app/tool.sh ] || exit 1'
        case _:
            dockerfile = f"FROM {BASE}\nRUN mkdir -p /opt/x && echo one > /opt/x/a && echo two > /opt/x/b\n"
            dockerfile += "RUN rm /opt/x/a\nWORKDIR /app\n"
            checks = '[ "$(ls /opt/x)" = b ] || exit 1'
    files = {f"environment/{name}": text for name, text in environment.items()}
    if dockerfile:
        files["environment/Dockerfile"] = dockerfile
    else:
        files["environment/.keep"] = ""
    return TaskFolder(
        name=f"built-{number:02}",
        files={
            **files,
            "solution/solve.sh": f"#!/bin/bash\necho {expected if right else 'wrong'} > {place}/answer\n",
            "tests/test.sh": CHECKED.format(checks=checks, place=place, expected=expected),
        },
        verdict={"reward": float(right)},
        settings=settings,
    )


REWARD = "/logs/verifier/reward"
NO_FILE, EMPTY = "RewardFileNotFoundError", "RewardFileEmptyError"
NOT_PARSED, INVALID, TIMED_OUT = "VerifierOutputParseError", "ValidationError", "VerifierTimeoutError"


def verdict_tasks() -> list[TaskFolder]:
    """Return tasks whose verifiers leave each kind of result (environments_of_others, section 2)."""
    left: dict[str, tuple[str, dict[str, float] | str]] = {
        "no-file": ("true", NO_FILE),
        "empty-file": (f": > {REWARD}.txt", EMPTY),
        "text-nan": (f"echo nan > {REWARD}.txt", NOT_PARSED),
        "text-word": (f"echo PASS > {REWARD}.txt", NOT_PARSED),
        "text-spaces": (f"echo ' 2.5 ' > {REWARD}.txt", {"reward": 2.5}),
        "text-negative": (f"echo -1 > {REWARD}.txt", {"reward": -1.0}),
        "exit-code": (f"echo 1 > {REWARD}.txt; exit 1", {"reward": 1.0}),
        "both-files": (f"echo 0 > {REWARD}.txt; echo '{{\"reward\": 1}}' > {REWARD}.json", {"reward": 1.0}),
        "json-number": (f"echo 0.75 > {REWARD}.json", INVALID),
        "json-list": (f"echo '[1]' > {REWARD}.json", NOT_PARSED),
        "json-nested": (f'echo \'{{"reward": {{"a": 1}}}}\' > {REWARD}.json', NOT_PARSED),
        "json-keys": (f'echo \'{{"a": 1, "b": 0}}\' > {REWARD}.json', {"a": 1.0, "b": 0.0}),
        "json-true": (f"echo '{{\"reward\": true}}' > {REWARD}.json", {"reward": 1.0}),
        "agents-file": ("true", NO_FILE),
        "hangs": (f"echo 1 > {REWARD}.txt; sleep 100", TIMED_OUT),
        "zero": (f"echo 0 > {REWARD}.txt", {"reward": 0.0}),
    }
    tasks = []
    for name, (script, verdict) in left.items():
        solve = f"echo 1 > {REWARD}.txt" if name == "agents-file" else "echo done > /workspace/answer"
        settings: dict[str, object] = {"verifier": {"timeout_sec": 3.0}} if name == "hangs" else {}
        tasks.append(_graded(name, solve, script, verdict, settings))
    reads = f"cp /workspace/answer {REWARD}.txt"
    tasks.append(_graded("solve-fails", "echo 1 > /workspace/answer; exit 3", reads, {"reward": 1.0}, {}))
    slow = _graded(
        "solve-slow",
        "echo 1 > /workspace/answer; sleep 100",
        reads,
        {"reward": 1.0},
        {"agent": {"timeout_sec": 3.0}},
    )
    return [*tasks, TaskFolder(**{**vars(slow), "both": True})]


def _graded(
    name: str, solve: str, test: str, verdict: dict[str, float] | str, settings: dict[str, object]
) -> TaskFolder:
    return TaskFolder(
        name=name,
        files={
            "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /workspace\n",
            "solution/solve.sh": f"#!/bin/bash\n{solve}\n",
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
        },
        verdict=verdict,
        settings=settings,
    )
