"""Every expected error has an exit code; bad input is 2, and what may pass 75."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.actors.cli.app import app
from headrace.actors.errors import (
    ActorGone,
    ConfigError,
    DiskFull,
    EngineUnknown,
    RunExists,
    RunFenced,
    RunInterrupted,
    RunMissing,
    RunStalled,
    StartFailed,
    StorageLost,
    TasksParked,
)
from headrace.actors.run import exit_codes
from headrace.actors.run.exit_codes import (
    EXIT_BAD_INPUT,
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_TRANSIENT,
    exit_code,
    exit_code_of_run,
)
from headrace.buffer.errors import LedgerBroken, LedgerMismatch, LedgerRefused, TaskFileError
from headrace.policies.errors import (
    CheckpointMismatch,
    DeviceMissing,
    EngineUnavailable,
    ModelInvalid,
    NonFiniteRun,
    SenderFailed,
)
from headrace.sandboxes.errors import LauncherGone, NamespacesUnavailable

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.parametrize(
    ("error", "of_command", "of_run"),
    [
        (ConfigError("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (RunExists("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (RunMissing("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (RunInterrupted("x"), EXIT_DRAINED, EXIT_DRAINED),
        (EngineUnknown("x"), EXIT_BAD_INPUT, EXIT_TRANSIENT),
        (TaskFileError("x"), EXIT_BAD_INPUT, EXIT_TRANSIENT),
        (LedgerRefused("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (NamespacesUnavailable("x"), EXIT_BAD_INPUT, EXIT_TRANSIENT),
        # A snapshot that turns out damaged in a push is written anew by the next learner.
        (ModelInvalid("x"), EXIT_BAD_INPUT, EXIT_TRANSIENT),
        (ActorGone("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (StartFailed("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (RunStalled("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (DiskFull("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (StorageLost("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (RunFenced("x"), EXIT_FAILED, EXIT_FAILED),
        (LedgerBroken("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (EngineUnavailable("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (SenderFailed("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (LauncherGone("x"), EXIT_TRANSIENT, EXIT_TRANSIENT),
        (TasksParked("x"), EXIT_FAILED, EXIT_FAILED),
        (NonFiniteRun("x"), EXIT_FAILED, EXIT_FAILED),
        (LedgerMismatch("x"), EXIT_FAILED, EXIT_FAILED),
        (CheckpointMismatch("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (DeviceMissing("x"), EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (ValueError("nobody expected it"), EXIT_FAILED, EXIT_TRANSIENT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_error_has_its_own_exit_code(error: Exception, of_command: int, of_run: int) -> None:
    assert exit_code(error) == of_command
    assert exit_code_of_run(error) == of_run


def test_help_and_docs_list_every_exit_code() -> None:
    codes = {str(value) for name, value in vars(exit_codes).items() if re.fullmatch(r"EXIT_\w+", name)}
    assert codes <= set(re.findall(r"\d+", exit_codes.HELP))
    assert codes <= set(re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.MULTILINE))
    assert app.info.epilog == exit_codes.HELP
