"""Installing agents: whole or not at all, once, and a failure says why. npm is a program of the test's own."""

from __future__ import annotations

import os
import platform
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.actors.agents.programs import installation as installing
from headrace.actors.agents.programs import versions
from headrace.actors.agents.programs.installation import (
    AgentMissing,
    InstallFailed,
    install,
    installed_folder,
    main,
    npm_packages,
)

# It makes the files that the packages are known to have, and counts how often it was asked.
NPM = """#!/bin/sh
echo run >> "$COUNT"
[ -z "$BROKEN" ] || { echo 'npm ERROR code ENOTFOUND' >&2; exit 1; }
if [ "$1" = view ]; then echo '"9.9.9"'; exit 0; fi
[ -z "$HANG" ] || { mkdir -p "$3/node_modules/half"; echo $$ > "$HANG"; exec sleep 60; }
shift; [ "$1" = --prefix ] && prefix="$2"
for last; do :; done
name="${last%@*}"
mkdir -p "$prefix/node_modules/$name"
cd "$prefix/node_modules/$name"
for path in claude bin/opencode bin/node cli.js $CODEX; do
  [ "$path" = "$MISSING" ] || { mkdir -p "$(dirname $path)"; echo "$last" > "$path"; chmod 700 "$path"; }
done
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").write_text(NPM)
    (tmp_path / "bin" / "npm").chmod(0o755)
    codex = npm_packages("codex", platform.machine())[0].files
    monkeypatch.setenv("CODEX", " ".join(f"{path}/codex" if path.endswith("/bin") else path for path in codex))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("BROKEN", "MISSING", "HANG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "headrace" / "agents"


def asked(cache: Path) -> int:
    return len((cache.parents[2] / "count").read_text().split())


@pytest.mark.parametrize(
    ("agent", "program"),
    [
        ("claude-code", "claude"),
        ("codex", "bin/codex"),
        ("opencode", "opencode"),
        ("qwen-code", "node"),
        ("qwen-code", "qwen-code/cli.js"),
    ],
)
def test_an_agent_is_installed_once_and_executable_for_all_users(npm: Path, agent: str, program: str) -> None:
    folder = install(agent)
    packages = len(npm_packages(agent, platform.machine()))
    assert (folder, asked(npm)) == (installed_folder(agent), packages)
    assert stat.S_IMODE((folder / program).stat().st_mode) == 0o755
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert (install(agent), asked(npm)) == (folder, packages)
    assert sorted(path.name for path in npm.iterdir()) == [".lock", folder.name]


def test_the_newest_version_is_installed_beside_the_pinned_one(npm: Path) -> None:
    assert install("codex").name == f"codex-{versions.CODEX}"
    newest = install("codex", latest=True)
    assert newest.name == "codex-9.9.9"
    assert (newest / "bin" / "codex").read_text().startswith("@openai/codex@9.9.9-linux-")
    assert installed_folder("codex").name == f"codex-{versions.CODEX}"


@pytest.mark.parametrize("trouble", ["BROKEN", "MISSING"])
def test_a_failed_installation_leaves_nothing_and_reports_the_reason(
    npm: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(trouble, "claude")
    assert main(["claude-code"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("claude-code is not installed: ")
    assert ("ENOTFOUND" if trouble == "BROKEN" else "the package has no claude") in said
    assert [path.name for path in npm.iterdir()] == [".lock"]
    monkeypatch.delenv(trouble)
    assert main(["claude-code"]) == 0
    assert capsys.readouterr().out.strip() == str(installed_folder("claude-code"))


def test_two_installers_at_once_install_once(npm: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(install, ["claude-code"] * 4)}) == 1
    assert asked(npm) == 1


def test_leftovers_of_a_killed_installer_are_removed(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "at_it")
    environment = {**os.environ, "HANG": str(tmp_path / "at_it")}
    command = (sys.executable, "-m", "headrace.actors.agents.programs.installation", "claude-code")
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as installer:
        npm_pid = int((tmp_path / "at_it").read_text())
        installer.kill()
    os.kill(npm_pid, signal.SIGKILL)
    assert len([path for path in npm.iterdir() if path.name != ".lock"]) == 2
    with pytest.raises(AgentMissing, match=r"python -m .*\.installation claude-code"):
        installed_folder("claude-code")
    folder = install("claude-code")
    assert sorted(path.name for path in npm.iterdir()) == [".lock", folder.name]


def test_a_folder_without_packages_is_not_an_installation(npm: Path) -> None:
    folder = npm / f"mini-swe-agent-{versions.MINI_SWE_AGENT}"
    folder.mkdir(parents=True)
    with pytest.raises(AgentMissing):
        installed_folder("mini-swe-agent")
    (folder / "py3.11").mkdir()
    assert installed_folder("mini-swe-agent") == folder


def test_unavailable_packages_are_reported(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(npm))
    with pytest.raises(InstallFailed, match="No matching distribution"):
        install("mini-swe-agent", python="3.11")
    assert [path.name for path in npm.iterdir()] == [".lock"]


def test_an_unknown_agent_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["claude"])
    assert "choose from claude-code, codex" in capsys.readouterr().err


def test_an_unsupported_machine_is_refused() -> None:
    with pytest.raises(InstallFailed, match="riscv"):
        npm_packages("codex", "riscv64")


def test_every_requirement_is_pinned_once() -> None:
    requirements = versions.mini_swe_agent_requirements()
    names = [requirement.partition("==")[0] for requirement in requirements]
    assert len(set(names)) == len(names)
    assert all("==" in requirement for requirement in requirements)
    assert set(installing.EVERY_RUN) <= set(installing.PINNED)
