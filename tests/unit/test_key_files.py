"""Keys are read from private files only, and child processes get no secret from the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace.policies.errors import EngineSettingsInvalid
from headrace.policies.processes.engine_keys import EngineKeyFiles, is_loopback, read_engine_key, require_key
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.host.key_files import make_key, read_key

KEY = "0123456789abcdef"


def key_file(folder: Path, content: str = KEY, mode: int = 0o600) -> Path:
    path = folder / "file"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_private_file_gives_its_key_without_the_newline(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, f"{KEY}\n"), "--key-file") == KEY
    assert read_key(key_file(tmp_path, mode=0o400), "--key-file") == KEY


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_is_refused_with_the_command_that_repairs_it(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(SecretRefused) as refused:
        read_key(path, "engines.key_file")
    assert str(refused.value).startswith(f"engines.key_file {path}: other users can read it")
    assert str(refused.value).endswith(f"chmod 600 {path}")
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a file")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(SecretRefused, match=r"belongs to another user \(id 12345\)"):
        read_key(path, "--key-file")


@pytest.mark.parametrize("content", ["", "short", f"two {KEY}", f"-{KEY}", f"{KEY}\nmore", f"ü{KEY}", f"{KEY}\x00"])
def test_what_cannot_be_sent_as_a_key_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(SecretRefused, match="a key has at least 16 printable ASCII characters"):
        read_key(key_file(tmp_path, content), "--key-file")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretRefused, match="No such file"):
        read_key(tmp_path / "nothing", "--key-file")
    with pytest.raises(EngineSettingsInvalid, match=r"--key-file .*No such file"):
        read_engine_key(tmp_path / "nothing", "--key-file")


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "key"
    make_key(path)
    first = read_key(path, "key")
    make_key(path)
    assert read_key(path, "key") == first
    assert len(first) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    make_key(tmp_path / "other")
    assert read_key(tmp_path / "other", "key") != first


def test_attached_servers_never_get_the_key_of_the_run(tmp_path: Path) -> None:
    own = EngineKeyFiles(own=key_file(tmp_path))
    assert (own.key_of(attached=False), own.key_of(attached=True)) == (KEY, None)
    attached = EngineKeyFiles(attached=key_file(tmp_path))
    assert (attached.key_of(attached=False), attached.key_of(attached=True)) == (None, KEY)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "localhost.example.org"])
def test_other_addresses_than_loopback_need_a_key(tmp_path: Path, host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(EngineSettingsInvalid, match=f"--host {host}.*--key-file"):
        require_key(host, None)
    require_key(host, key_file(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    require_key(host, None)


def test_a_child_gets_no_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        *("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_REDIS_PASSWORD", "E2B_API_KEY"),
        *("E2B_ACCESS_TOKEN", "HF_TOKEN", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "aws_session_token"),
    )
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("MONKEY", "kept")
    environment = child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    assert "secret" not in environment.values()
    assert environment["PATH"] == os.environ["PATH"]
    assert (environment["OMP_NUM_THREADS"], environment["TOKENIZERS_PARALLELISM"]) == ("1", "false")
    assert environment["MONKEY"] == "kept"
    assert os.environ["E2B_API_KEY"] == "secret", "this process keeps its own"
