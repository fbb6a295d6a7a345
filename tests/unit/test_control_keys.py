"""Key files of the control API and of its clients."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from headrace.actors.cluster.api.client import read_key
from headrace.actors.cluster.api.keys import KeyFile
from headrace.actors.cluster.runs.records import ApiRole, Caller
from headrace.actors.errors import ConfigError
from headrace.actors.telemetry.page.access import digest_of
from headrace.sandboxes.errors import SecretRefused


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_has_its_owner_and_role(tmp_path: Path) -> None:
    lines = [
        "# keys",
        "",
        *(f"{digest(f'key-{role}')} {role} team-{role}" for role in ("read", "operate", "code", "admin")),
    ]
    keys = KeyFile(write(tmp_path / "keys", "\n".join(lines)))
    for role in ApiRole:
        name = role.name.lower()
        assert keys.caller_of(digest_of(f"key-{name}")) == Caller(
            owner=f"team-{name}", role=role, key=digest(f"key-{name}")[:12]
        )
    assert keys.caller_of(digest_of("key-other")) is None
    assert keys.caller_of(digest_of(digest("key-read"))) is None
    assert keys.caller_of(digest_of("\udcff")) is None


def test_only_admins_see_runs_of_others() -> None:
    assert [Caller(owner="a", role=role).sees("b") for role in ApiRole] == [False, False, False, True]
    assert all(Caller(owner="a", role=role).sees("a") for role in ApiRole)


def test_a_changed_file_holds_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"{digest('one')} read a\n")
    keys = KeyFile(path)
    # The same size and, on a coarse clock, the same time.
    before = path.stat()
    path.write_text(f"{digest('two')} read a\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert keys.caller_of(digest_of("one")) is None
    assert keys.caller_of(digest_of("two")) is not None


def test_no_key_is_accepted_while_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"{digest('one')} read a\n")
    keys = KeyFile(path)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.caller_of(digest_of("one"))
    path.chmod(0o600)
    path.write_text("nonsense")
    for _ in range(2):
        with pytest.raises(ConfigError, match="line 1"):
            keys.caller_of(digest_of("one"))
    path.write_text(f"{digest('one')} read a\n")
    assert keys.caller_of(digest_of("one")) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("secret read a", "SHA256 ROLE OWNER"),
        (f"{digest('k').upper()} read a", "SHA256 ROLE OWNER"),
        (f"{digest('k')} read", "SHA256 ROLE OWNER"),
        (f"{digest('k')} read a/b", "SHA256 ROLE OWNER"),
        (f"{digest('k')} root a", "read, operate, code or admin"),
        (f"{digest('k')} READ a", "read, operate, code or admin"),
        (f"{digest('k')} read a\n{digest('k')} admin b", "line 2: duplicate key"),
    ],
)
def test_wrong_files_are_refused_in_one_line_without_their_content(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        KeyFile(write(tmp_path / "keys", text))
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"has mode {mode:o}"):
        KeyFile(write(tmp_path / "keys", f"{digest('k')} read a", mode))


def test_the_group_of_a_pod_may_read_the_file(tmp_path: Path) -> None:
    assert KeyFile(write(tmp_path / "keys", f"{digest('k')} read a", 0o440)).caller_of(digest_of("k")) is not None


def test_a_client_key_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = write(tmp_path / "key", "secret\n")
    assert read_key(path) == "secret"
    path.chmod(0o640)
    with pytest.raises(SecretRefused, match="chmod 600"):
        read_key(path)
    for text in ("", "two words", "\x00"):
        with pytest.raises(ConfigError, match="one key on one line"):
            read_key(write(tmp_path / "key", text))
    with pytest.raises(SecretRefused, match="name a file"):
        read_key(tmp_path / "none")
