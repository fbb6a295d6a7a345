"""Exit codes of the commands, by error (the table in docs/reliability.md).

Invariants:
- The code is 2 when the user must change the input first. It is 75 (EX_TEMPFAIL of sysexits.h) when another try may
  succeed, so that a loop, systemd or Slurm can distinguish this case from the rest.
- An error that ended a run is transient unless it is known to recur: for example, a file found to be damaged during the
  run is rebuilt or left out on resume.
"""

from __future__ import annotations

from typing import Final

from headrace.actors.errors import (
    ActorError,
    ApiRefused,
    CannotBePlaced,
    ConfigError,
    DiskFull,
    EngineGroupError,
    EngineNotServing,
    QuotaExceeded,
    RunError,
    RunExists,
    RunInterrupted,
    RunMissing,
    RunRefused,
    RunsMissing,
    RunStalled,
    RunUnknown,
    StorageLost,
    SubmissionConflict,
)
from headrace.buffer.errors import (
    BatchUntrainable,
    ExportRefused,
    LeaseError,
    LedgerBroken,
    LedgerDiskFull,
    LedgerInUse,
    LedgerMismatch,
    LedgerRefused,
    TaskFileError,
    TaskNotParked,
)
from headrace.policies.errors import (
    CheckpointMismatch,
    DeviceMissing,
    EngineError,
    EngineSettingsInvalid,
    LearnerSettingsInvalid,
    ModelInvalid,
    NonFiniteRun,
    PushError,
    RequestInvalid,
    RowUnusable,
    TrainerRefused,
)
from headrace.sandboxes.errors import PermanentSandboxError, TransientSandboxError
from headrace.serve.gateway.errors import GatewayUnreachable, InfraError, ServeError

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_DIRTY: Final = 3
EXIT_DRAINED: Final = 4
EXIT_TRANSIENT: Final = 75

HELP: Final = (
    "Exit codes: 0 done; 1 failed, and would fail again; 2 bad input (recipe, model, tasks, run directory, arguments); "
    "3 `ledger verify`, `ledger repair`, `simulate`, `data check`, `check` or `doctor --image` found a problem; "
    "4 the run was drained before its last step and can be resumed; "
    "75 transient failure (a lost actor or engine, a full disk, a stall): try again, or `--restarts`; 130 interrupted."
)

_TRANSIENT: Final = (
    ActorError,
    DiskFull,
    StorageLost,
    RunStalled,
    EngineNotServing,
    LedgerBroken,
    LedgerDiskFull,
    LedgerInUse,
    EngineError,
    PushError,
    TransientSandboxError,
    GatewayUnreachable,
    InfraError,
)
_BAD_INPUT: Final = (
    ConfigError,
    RunExists,
    RunMissing,
    RunsMissing,
    RunUnknown,
    RunRefused,
    SubmissionConflict,
    QuotaExceeded,
    CannotBePlaced,
    ApiRefused,
    TrainerRefused,
    EngineGroupError,
    TaskFileError,
    ModelInvalid,
    RequestInvalid,
    EngineSettingsInvalid,
    LearnerSettingsInvalid,
    LedgerRefused,
    ExportRefused,
    LeaseError,
    TaskNotParked,
    CheckpointMismatch,
    DeviceMissing,
    PermanentSandboxError,
    ServeError,
)
_ENDS_A_RUN_AGAIN: Final = (
    BatchUntrainable,
    LedgerRefused,
    LedgerMismatch,
    NonFiniteRun,
    RowUnusable,
    CheckpointMismatch,
    DeviceMissing,
    LearnerSettingsInvalid,
)


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that ended with this error."""
    if isinstance(error, RunInterrupted):
        return EXIT_DRAINED
    if isinstance(error, (RequestInvalid, EngineSettingsInvalid)) or not isinstance(error, _TRANSIENT):
        return EXIT_BAD_INPUT if isinstance(error, _BAD_INPUT) else EXIT_FAILED
    return EXIT_TRANSIENT


def exit_code_of_run(error: Exception) -> int:
    """Return the exit code of a run that ended with this error after it had started."""
    if isinstance(error, (RunError, *_ENDS_A_RUN_AGAIN)) and not isinstance(error, (*_TRANSIENT, EngineGroupError)):
        return exit_code(error)
    return EXIT_TRANSIENT
