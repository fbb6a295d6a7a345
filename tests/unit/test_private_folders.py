"""Private folders on a machine that was used before: any umask, any order, other users, older versions."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.sandboxes.errors import FolderRefused
from headrace.sandboxes.host.private_folders import make_missing, make_private, temporary_folder, user_folder
from headrace.sandboxes.local.launcher_process import ProviderFolder, locked_folder, runtime_folder

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Machine with an empty /tmp, at a short path that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="m-", dir="/var/tmp") as place:
        Path(place).chmod(0o711)
        tmp = Path(place) / "tmp"
        tmp.mkdir()
        tmp.chmod(0o1777)
        monkeypatch.setenv("TMPDIR", str(tmp))
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield tmp


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def in_another_process(umask: int, statement: str) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from headrace.sandboxes.local.launcher_process import ProviderFolder, locked_folder, runtime_folder
os.umask({umask})
async def stays(name):
    async with locked_folder(runtime_folder(None) / name):
        pass
{statement}
"""
    subprocess.run((sys.executable, "-c", code), check=True, timeout=60)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o277])
@pytest.mark.parametrize(
    "order",
    [
        ("asyncio.run(stays('run'))", "ProviderFolder(runtime_folder(None))"),
        ("ProviderFolder(runtime_folder(None))",) * 2,
    ],
)
def test_folders_are_private_whatever_the_umask_and_order_of_commands(
    umask: int, order: tuple[str, str], machine: Path
) -> None:
    for statement in (*order, *reversed(order)):
        in_another_process(umask, statement)
    [folder] = machine.iterdir()
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o700}


async def test_a_persistent_launchers_chosen_folder_gets_private_parents(machine: Path) -> None:
    async with locked_folder(machine / "new" / "stays"):
        assert mode(machine / "new") == mode(machine / "new" / "stays") == 0o700
    assert ProviderFolder(machine / "new").path.parent == machine / "new"


@pytest.mark.parametrize("wrong", [0o755, 0o775, 0o777, 0o500, 0o000])
def test_a_folder_created_by_an_older_version_is_repaired(wrong: int, machine: Path) -> None:
    folder = machine / f"headrace-sandboxes-{os.geteuid()}"
    (folder / "dead").mkdir(parents=True)
    folder.chmod(wrong)
    assert ProviderFolder(runtime_folder(None)).path.parent == folder
    assert mode(folder) == 0o700


@as_root
@pytest.mark.parametrize("wrong", [0o700, 0o777])
def test_a_folder_owned_by_another_user_is_left_alone(wrong: int, machine: Path) -> None:
    taken = machine / "headrace-sandboxes-0"
    taken.mkdir()
    taken.chmod(wrong)
    os.chown(taken, OTHER_USER, OTHER_USER)
    folder = ProviderFolder(runtime_folder(None)).path.parent
    assert folder == machine / "headrace-sandboxes-0-2"
    assert list(taken.iterdir()) == []
    assert mode(taken) == wrong
    taken.rmdir()
    # All processes of a user use one folder, even when the first name is free again.
    assert user_folder("sandboxes") == folder


@as_root
def test_a_writable_folder_containing_another_users_files_is_not_used(machine: Path) -> None:
    folder = machine / "headrace-sandboxes-0"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "run").mkdir()
    os.chown(folder / "run", OTHER_USER, OTHER_USER)
    assert user_folder("sandboxes") == machine / "headrace-sandboxes-0-2"


@as_root
def test_a_link_or_file_in_place_of_the_folder_is_not_used(machine: Path) -> None:
    (machine / "elsewhere").mkdir(mode=0o700)
    (machine / "headrace-sandboxes-0").symlink_to(machine / "elsewhere")
    (machine / "headrace-sandboxes-0-2").touch()
    (machine / "headrace-sandboxes-0-3").symlink_to("nowhere")
    assert user_folder("sandboxes") == machine / "headrace-sandboxes-0-4"


@as_root
def test_the_error_names_the_folder_when_every_name_is_taken(machine: Path) -> None:
    for name in ("headrace-ids-0", *(f"headrace-ids-0-{number}" for number in range(2, 10))):
        (machine / name).mkdir()
        os.chown(machine / name, OTHER_USER, OTHER_USER)
    with pytest.raises(FolderRefused, match=r"headrace-ids-0 belongs to another user: remove it, or set TMPDIR"):
        user_folder("ids")


@as_root
@pytest.mark.parametrize("mode_there", [0o700, 0o711])
def test_a_chosen_folder_owned_by_another_user_is_refused(mode_there: int, machine: Path) -> None:
    folder = machine / "stays"
    folder.mkdir(mode=mode_there)
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(FolderRefused, match=f"belongs to user {OTHER_USER}"):
        make_private(folder)


def test_the_mode_of_a_chosen_folder_is_not_changed(machine: Path) -> None:
    folder = machine / "mine"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(FolderRefused, match="chmod 700"):
        make_private(folder)
    make_missing(folder)
    assert mode(folder) == 0o755


def test_a_file_in_place_of_a_folder_is_refused_in_one_line(machine: Path) -> None:
    (machine / "file").touch()
    with pytest.raises(FolderRefused, match=r"file/below cannot be made: .*; choose another"):
        make_private(machine / "file" / "below")


@as_root
def test_two_users_have_separate_folders(machine: Path) -> None:
    mine = runtime_folder(None)
    os.seteuid(OTHER_USER)
    try:
        theirs = runtime_folder(None)
        assert (theirs.stat().st_uid, mode(theirs)) == (OTHER_USER, 0o700)
    finally:
        os.seteuid(0)
    assert (mine, theirs) == (machine / "headrace-sandboxes-0", machine / f"headrace-sandboxes-{OTHER_USER}")


@pytest.mark.parametrize("name", ["missing", "file", "/proc"])
def test_an_unusable_tmpdir_is_refused_in_one_line(name: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").touch()
    monkeypatch.setenv("TMPDIR", str(machine / name))
    with pytest.raises(FolderRefused, match=rf"^TMPDIR .*{name} cannot be written: .*; set TMPDIR to a folder"):
        temporary_folder()


@as_root
def test_a_tmpdir_without_write_permission_is_refused_in_one_line(machine: Path) -> None:
    machine.chmod(0o755)
    os.seteuid(OTHER_USER)
    try:
        with pytest.raises(FolderRefused, match="cannot be written: Permission denied"):
            temporary_folder()
    finally:
        os.seteuid(0)


@as_root
def test_a_tmpdir_owned_by_another_user_is_refused_in_one_line(machine: Path) -> None:
    os.chown(machine, OTHER_USER, OTHER_USER)
    with pytest.raises(FolderRefused, match=f"belongs to another user .id {OTHER_USER}.*set TMPDIR"):
        temporary_folder()
