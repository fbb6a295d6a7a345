"""Time during which a run was driven, with resumes, kills and gaps."""

from __future__ import annotations

from pathlib import Path

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.summary import read_driven_time


def test_the_gap_before_a_resume_is_not_counted_as_driven_time(tmp_path: Path) -> None:
    """The issue's run: interrupted after 50 s, resumed 101 s later, done after 45 s more."""
    directory = RunDirectory(path=tmp_path)
    for start, end in ((1000.0, 1050.0), (1151.0, 1196.0)):
        directory.append_session(start, None)
        directory.append_session(start, end)
    driven = read_driven_time(directory.sessions, ())
    assert driven.total_s() == 95
    assert driven.within_s(1000.0, 1196.0) == 95
    assert driven.within_s(1010.0, 1161.0) == 50


def test_the_time_of_a_killed_driver_is_counted_up_to_its_last_record(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.append_session(1000.0, None)
    directory.append_session(1100.0, None)
    directory.append_session(1200.0, None)
    with directory.sessions.open("ab") as file:
        file.write(b'{"started_s": 1100.0, "end')
    driven = read_driven_time(directory.sessions, (1030.0, 1020.0, 1250.0))
    assert driven.spans == ((1000.0, 1030.0), (1100.0, 1100.0), (1200.0, 1250.0))


def test_sessions_written_by_older_versions_have_only_end_times(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.append_session(10.0, 20.0)
    assert read_driven_time(directory.sessions, (15.0,)).total_s() == 10
    assert read_driven_time(tmp_path / "none", (15.0,)).total_s() == 0
