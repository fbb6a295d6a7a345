from __future__ import annotations

import os

import pytest

from headrace.buffer.primitives.file_lock import FileLock


def test_a_second_lock_on_a_path_is_refused_until_the_first_is_released(tmp_path):
    path = tmp_path / "lock"
    with FileLock(path), pytest.raises(BlockingIOError):
        FileLock(path, blocking=False)
    FileLock(path, blocking=False).release()


def test_releasing_twice_does_not_close_another_descriptor(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.release()
    # The kernel reuses the lowest free number, which is that of the released lock.
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    lock.release()
    assert os.fstat(other).st_ino == (tmp_path / "other").stat().st_ino
    os.close(other)


def test_a_folder_is_locked_through_its_descriptor(tmp_path):
    def folder() -> int:
        return os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

    with FileLock(folder()), pytest.raises(BlockingIOError):
        FileLock(folder(), blocking=False)


def test_a_refused_lock_leaves_no_descriptor_open(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with FileLock(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)), pytest.raises(BlockingIOError):
        FileLock(descriptor, blocking=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_created_lock_file_has_the_given_mode(tmp_path):
    with FileLock(tmp_path / "lock", mode=0o600):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
