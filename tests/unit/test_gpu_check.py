"""`scripts/gpu_check` on a CPU, as on a borrowed machine: with a bare python, torch, and the wheels that it carries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from gpu_checks.learner import promised_tokens
from gpu_checks.outcome import Entry, Outcome, State
from gpu_checks.place import BIG
from gpu_checks.suite import CHECKS
from gpu_checks.wheels import LIMIT_BYTES, WHEELS
from packaging.requirements import Requirement

from headrace.actors.run.exit_codes import EXIT_BAD_INPUT, EXIT_DIRTY
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.models.tiny import model_config

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"
NAMES = [check.name for check in CHECKS]


def gpu_check(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    command = [str(SCRIPT), *words]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=1500, check=False)


def needed_by(names: list[str]) -> set[str]:
    """Return the distributions with all that they require."""
    found: set[str] = set()
    while names:
        if (name := names.pop()) not in found:
            found.add(name)
            needs = [Requirement(text) for text in distribution(name).requires or ()]
            names += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with nothing but torch and what it needs, numpy, and the packages that are carried."""
    folder = tmp_path_factory.mktemp("site")
    for name in needed_by(["torch", "numpy"]) | set(WHEELS):
        files = distribution(name).files
        assert files, name
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


@pytest.fixture(scope="module")
def report(site: Path) -> dict[str, Any]:
    """Report of the whole suite."""
    base = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    done = gpu_check("--device", "cpu", "--small", "--json", HEADRACE_GPU_PYTHON=base, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    # Each entry was printed when it came, for a loan that ends early.
    printed = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    whole: dict[str, Any] = json.loads(done.stdout)
    assert {name: entry for line in printed for name, entry in line.items()} == whole["checks"]
    return whole


@pytest.mark.timeout(1600)
@pytest.mark.xdist_group("gpu_check")
def test_every_check_has_an_entry_and_says_what_a_cpu_cannot_show(report: dict[str, Any]) -> None:
    checks = report["checks"]
    assert list(checks) == NAMES
    assert (report["device"], report["small"]) == ("cpu", True)
    for check in CHECKS:
        entry = checks[check.name]
        assert entry["state"] == ("not run" if check.needs_cuda else "passed"), entry
        assert "reason" not in entry
        assert entry.get("not_run", "") == check.needs_cuda or not check.needs_cuda
    assert {name for name, entry in checks.items() if entry["state"] == "not run"} == {"fp32", "memory"}
    for name in ("environment", "rows", "sender", "missing_peer", "next_sender"):
        assert checks[name]["not_run"], name
    assert "not_run" not in checks["bf16"]
    assert "not_run" not in checks["resume"]


@pytest.mark.timeout(1600)
@pytest.mark.xdist_group("gpu_check")
def test_figures_are_measured(report: dict[str, Any]) -> None:
    measured = {name: entry.get("measured", {}) for name, entry in report["checks"].items()}
    # bf16 rounds, so a difference of zero would mean that the reference was compared with itself.
    assert 0 < measured["bf16"]["loss_difference"] < 5e-2
    assert 0 < measured["bf16"]["grad_norm_difference"] < 5e-2
    assert min(value for name, value in measured["rows"].items() if name.startswith("tokens_per_s")) > 0
    assert measured["sender"]["buckets"] > 1
    assert measured["missing_peer"]["ended_in"] == "join_group"
    assert "GroupFailed" not in measured["missing_peer"]["error"]
    assert measured["next_sender"]["incarnation"] == 2


@pytest.mark.timeout(300)
def test_a_check_that_exceeds_its_time_is_killed_and_the_others_are_reported() -> None:
    done = gpu_check("--device", "cpu", "--small", "--json", "--budget-s", "0.01", "--only", "sender", "--only", "rows")
    assert done.returncode == EXIT_DIRTY, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert list(checks) == ["rows", "sender"]
    assert checks["rows"]["state"] == "failed"
    assert "did not end within 0.01 s, all that was left of --budget-s, and was killed" in checks["rows"]["reason"]
    assert checks["sender"]["state"] == "not run"
    assert "--budget-s" in checks["sender"]["reason"]


@pytest.mark.timeout(300)
def test_without_a_device_the_rest_is_not_run_and_the_reason_says_what_would_work() -> None:
    done = gpu_check("--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == EXIT_DIRTY, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert checks["environment"]["state"] == "failed"
    assert "devices is 0, and should be at least 1" in checks["environment"]["reason"]
    assert "--device cpu" in checks["environment"]["reason"]
    assert {entry["state"] for name, entry in checks.items() if name != "environment"} == {"not run"}


def write_wheels(folder: Path, padding: int) -> Path:
    """Write the wheels that are asked for, without code; the first has `padding` bytes that do not compress."""
    folder.mkdir()
    for number, name in enumerate(WHEELS):
        stem = f"{name.replace('-', '_')}-{version(name)}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
            if not number:
                wheel.writestr("padding", os.urandom(padding))
    return folder


def test_wheels_are_fetched_into_a_new_folder_and_counted(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    found = write_wheels(tmp_path / "found", 1000)
    done = gpu_check("wheels", str(tmp_path / "carried"), "--python", "3.12", PIP_FIND_LINKS=str(found), **offline)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "carried").iterdir()}
    assert said == {"wheels": sizes, "bytes": sum(sizes.values()), "limit_bytes": LIMIT_BYTES}
    assert len(sizes) == len(WHEELS)
    again = gpu_check("wheels", str(tmp_path / "carried"), PIP_FIND_LINKS=str(found), **offline)
    assert (again.returncode, "name a new folder" in again.stderr) == (EXIT_BAD_INPUT, True)
    gone = gpu_check("wheels", str(tmp_path / "none"), PIP_FIND_LINKS=str(tmp_path), **offline)
    assert (gone.returncode, "could not fetch" in gone.stderr) == (EXIT_BAD_INPUT, True)
    large = write_wheels(tmp_path / "large", LIMIT_BYTES)
    done = gpu_check("wheels", str(tmp_path / "refused"), PIP_FIND_LINKS=str(large), **offline)
    assert done.returncode == EXIT_BAD_INPUT
    assert f"{LIMIT_BYTES:,} can be carried; the largest is megatron_core" in done.stderr
    assert not (tmp_path / "refused").exists()


def test_the_commands_for_the_machine_install_the_wheels_and_run_the_suite() -> None:
    install, run = gpu_check("commands", "my wheels").stdout.splitlines()
    assert install.endswith("'my wheels'/*.whl")
    words = install.split()
    target = words[words.index("--target") + 1]
    assert f"PYTHONPATH={target} scripts/gpu_check --json" in run


def test_figures_out_of_bounds_fail_with_a_sentence_each() -> None:
    outcome = Outcome(
        measured={"a": 1.0, "b": float("nan"), "c": 3, "d": "text"},
        bounds={"a": (None, 1), "b": (0, None), "c": (1, 2)},
        remedy="do this",
    )
    entry = Entry.of(outcome, shows="x", seconds=1)
    assert entry.state is State.FAILED
    assert entry.reason == "b is nan, and should be at least 0; c is 3, and should be at least 1 and at most 2; do this"
    assert Entry.of(Outcome(measured={"a": 1}, bounds={"a": (1, 1)}), shows="x", seconds=1).state is State.PASSED


def test_the_memory_that_recipes_are_laid_out_for_is_promised_and_no_more(tmp_path: Path) -> None:
    """18 bytes a parameter, and for each token the inputs of all layers and one whole layer (17 values a channel), on
    nine tenths of the GPU."""
    (tmp_path / "config.json").write_text(json.dumps({**model_config(), **BIG}))
    config = LearnerConfig(
        model_dir=tmp_path,
        checkpoint_dir=tmp_path,
        snapshot_dir=tmp_path,
        dtype="bfloat16",
        recompute=True,
        device="cuda",
    )
    states_bytes = 18 * 596_049_920
    row_bytes = 32_768 * 2 * 1024 * (28 + 17)
    assert promised_tokens(config, round((states_bytes + row_bytes) / 0.9)) == pytest.approx(32_768, rel=0.01)
    assert promised_tokens(config, round((states_bytes + 2 * row_bytes) / 0.9)) == pytest.approx(65_536, rel=0.01)
    assert promised_tokens(config, states_bytes) < 0
