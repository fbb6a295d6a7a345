"""Lives of a real learner that are ended with kill -9: `python -m support.learner_lives FOLDER SEED STEPS SAVES`.

The run has a real ledger, the learner loop and the Megatron learner on a tiny random model; only rollouts and engines
are simulated. STEPS lives are killed within an optimizer step, SAVES lives within a save, in a seeded order and at
seeded instants; the last life completes the run. The ledger is verified after each death. Prints one JSON object.

Invariants:
- Nothing of headrace is replaced. An instant is the n-th function call of the learner's thread within
  `MegatronTrainer.step` or `save`, which a profile function counts; a life in a folder of its own measures their
  number first.
- Lives are forked from a process that has imported torch and Megatron but started no thread, so a life takes seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sys
import threading
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.trajectories.types import RolloutOrder, RolloutResult
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners import megatron_trainer
from headrace.policies.learners.config import LearnerConfig, row_limits
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.tiny_model import write_tiny_model

SAVE_EVERY: Final = 2
AHEAD: Final = 4
"""A life is struck before it has done so many steps."""
TRIES_OF_A_BATCH: Final = 1000
"""So many deaths in a row on one batch would otherwise end the run."""


@dataclass(slots=True)
class Strike:
    """Kills the process at the `at`-th call within the trainer's method `method`; only counts without `at`."""

    method: str = ""
    at: int = 0
    calls: dict[str, int] = field(default_factory=lambda: {"step": 0, "save": 0})
    _within: str = ""

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Profile function of the learner's thread."""
        code = frame.f_code
        ours = code.co_name in self.calls and code.co_filename == megatron_trainer.__file__
        if ours and event in ("call", "return"):
            self._within = code.co_name if event == "call" else ""
        if self._within and event in ("call", "c_call"):
            self.calls[self._within] += 1
            if self._within == self.method and self.calls[self._within] == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def result_of(order: RolloutOrder, version: PolicyVersion, vocabulary: int) -> RolloutResult:
    """A finished rollout of the model's tokens; its reward depends only on its name."""
    chance = random.Random(order.rollout_id)
    result = cases.result(order, version, reward=float(chance.randint(0, 1)))
    assert result.trajectory is not None
    [row] = result.trajectory.rows
    rows = (replace(row, tokens_T=row.tokens_T % vocabulary),)
    return replace(result, trajectory=replace(result.trajectory, rows=rows))


async def feed(replay: Replay, engines: SimulatedEngineGroup, vocabulary: int) -> None:
    """Finish every rollout as soon as it is issued, until cancelled."""
    await replay.reconcile([], "feeder")
    while True:
        orders = (await replay.issue(8, "feeder", timeout_s=1.0)).orders
        # The first orders may come before the first push.
        version = await engines.served_version() or PolicyVersion(1, 0)
        if orders:
            await replay.offer([result_of(order, version, vocabulary) for order in orders])


async def live(folder: Path, steps: int) -> None:
    """One life: open the newest checkpoint and train to the end of the run."""
    directory = RunDirectory(path=folder / "run")
    if not directory.path.exists():
        directory.write_beginning(cases.tasks(), "run")
    observing = ActorTelemetry(config=TelemetryConfig(), run_dir=directory.path)
    learner = LearnerConfig(
        model_dir=folder / "model", checkpoint_dir=directory.checkpoints, snapshot_dir=directory.path / "weights"
    )
    buffer = cases.SMALL.model_copy(update={"batch_tries": TRIES_OF_A_BATCH, "zero_variance": "filter"})
    limits = row_limits(learner)
    assert limits is not None
    async with (
        Replay(
            BufferConfig.model_validate(buffer.model_dump()),
            directory=directory,
            seed=3,
            limits=limits,
            metrics=observing.metrics(),
        ) as replay,
        SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=directory) as engines,
        LearnerLoop(
            LearnerLoopConfig(steps=steps, save_every=SAVE_EVERY),
            learner,
            replay=replay,
            engines=engines,
            observing=observing,
        ) as loop,
        asyncio.TaskGroup() as tasks,
    ):
        feeding = tasks.create_task(feed(replay, engines, limits.vocabulary))
        await loop.run()
        feeding.cancel()


def fork_life(folder: Path, steps: int, strike: Strike) -> int:
    """Run one life in a child process; return its exit code, or -9 if it was struck."""
    process_id = os.fork()
    if process_id:
        return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    try:
        threading.setprofile(strike.profile)
        asyncio.run(live(folder, steps))
        (folder / "calls.json").write_text(json.dumps(strike.calls))
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's code
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def strikes_of(seed: int, steps: int, saves: int, calls: dict[str, int]) -> list[Strike]:
    """The strikes of a run, each within the first `AHEAD` steps or the first two saves of a life."""
    chance = random.Random(seed)
    strikes = [Strike("step", chance.randint(1, AHEAD * calls["step"])) for _ in range(steps)]
    strikes += [Strike("save", chance.randint(1, AHEAD // SAVE_EVERY * calls["save"])) for _ in range(saves)]
    chance.shuffle(strikes)
    return strikes


def main(folder: Path, seed: int, steps: int, saves: int) -> None:
    # Once for all lives.
    importlib.import_module("headrace.policies.learners.ranks.rank")
    measured = folder / "measured"
    for each in (measured, folder):
        each.mkdir(exist_ok=True)
        write_tiny_model(each / "model")
    assert fork_life(measured, SAVE_EVERY, Strike()) == 0
    total = json.loads((measured / "calls.json").read_bytes())
    calls = {"step": total["step"] // SAVE_EVERY, "save": total["save"]}
    lives: list[dict[str, Any]] = []
    strikes = strikes_of(seed, steps, saves, calls)
    last = AHEAD * (len(strikes) + 1)
    for strike in (*strikes, Strike()):
        code = fork_life(folder, last, strike)
        report = verify(folder / "run")
        life = {"method": strike.method, "at": strike.at, "code": code, "steps": report.steps}
        lives.append(life | {"problems": report.problems, "twice": report.trained_twice, "lost": report.lost})
    sys.stdout.write(json.dumps({"calls": calls, "lives": lives, "last": last}) + "\n")


if __name__ == "__main__":
    # Megatron's own call sites rely on the default group that it warns about.
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
