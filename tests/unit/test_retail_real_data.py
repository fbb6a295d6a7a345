"""The published retail data and, if TAU_BENCH_DIR names a checkout of tau-bench, its own tools and hash.

Both are read by path and skipped if absent; nothing of them is in this project.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.environments.retail.database import Database
from headrace.actors.environments.retail.tools import TOOLS, call
from headrace.buffer.tasks.datasets.tau import IDLE_FAMILY, WRITES, TauSettings, read_retail
from headrace.buffer.tasks.task import Task
from support.conversions import split as parted
from support.retail_shop import open_episode, play_oracle

SHARED = Path(os.environ.get("HEADRACE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "tau-bench"
RETAIL, TAU2 = SHARED / "retail", SHARED / "tau2"
ORIGINAL = os.environ.get("TAU_BENCH_DIR", "")

real_data = pytest.mark.skipif(not RETAIL.is_dir(), reason=f"no {RETAIL} (HEADRACE_SHARED_DATA)")
original = pytest.mark.skipif(not ORIGINAL, reason="TAU_BENCH_DIR does not name a checkout of tau-bench")


def tasks_of(split: str) -> tuple[Task, ...]:
    tasks, refusals = parted(read_retail(RETAIL / f"tasks_{split}.jsonl", TauSettings()))
    assert not refusals
    return tasks


def secret(task: Task) -> Any:
    assert task.environment is not None
    return task.environment.secret


async def idle_rewards(folder: Path, tasks: tuple[Task, ...], **settings: Any) -> float:
    rewards = 0.0
    for task in tasks:
        verdict = (await (await open_episode(folder, task, **settings)).close()).verdict
        assert verdict is not None
        assert verdict.reward is not None
        rewards += verdict.reward
    return rewards


@real_data
async def test_the_oracle_solves_the_first_training_tasks() -> None:
    solved = 0
    for task in tasks_of("train")[:40]:
        stopped, end = await play_oracle(await open_episode(RETAIL, task), secret(task))
        assert end.verdict is not None
        solved += stopped and end.verdict.solved
    assert solved == 40


@real_data
async def test_doing_nothing_solves_only_tasks_whose_solution_changes_nothing() -> None:
    """Nine solutions of the test split write nothing, and four of these tasks have outputs. The other idle solutions,
    two there and five in the training split, make a call that the shop refuses, in tau-bench's own tools as well."""
    train, test, dev = map(tasks_of, ("train", "test", "dev"))
    assert (len(train), len(test), len(dev)) == (500, 115, 20)
    assert next(task.id for task in test if task.family == IDLE_FAMILY) == "retail-test-10"
    assert sum(task.family == IDLE_FAMILY for task in (*train, *test)) == 9
    assert await idle_rewards(RETAIL, train[:40]) == 0
    assert await idle_rewards(RETAIL, train) == 5
    assert await idle_rewards(RETAIL, test) == 9 - 4 + 2
    assert await idle_rewards(RETAIL, dev) == 1


@real_data
async def test_tau2_tasks_convert_and_are_solved_by_the_oracle() -> None:
    tasks, refusals = parted(read_retail(TAU2 / "retail" / "tasks.json", TauSettings(split="test")))
    assert len(tasks) + len(refusals) == 40
    assert all("nl_assertions" in refusal.reason for refusal in refusals)
    settings = {"policy": str(TAU2 / "retail" / "policy.md"), "tools": str(RETAIL / "tools_schema.json")}
    for task in tasks:
        episode = await open_episode(TAU2 / "retail", task, **settings)
        end = (await play_oracle(episode, secret(task)))[1]
        assert end.verdict is not None
        assert end.verdict.solved


@real_data
def test_tau2_tasks_of_other_domains_are_refused() -> None:
    tasks, refusals = parted(read_retail(TAU2 / "mock" / "tasks.json", TauSettings()))
    assert (len(tasks), len(refusals)) == (0, 10)


@pytest.fixture
def original_shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a module of the checkout. Its import of litellm is not needed here."""
    monkeypatch.syspath_prepend(ORIGINAL)
    if importlib.util.find_spec("litellm") is None:
        absent: Any = types.ModuleType("litellm")
        absent.completion, absent.provider_list = None, []
        monkeypatch.setitem(sys.modules, "litellm", absent)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] == "tau_bench"]:
        del sys.modules[name]


class Caller:
    """Random tool calls with plausible arguments."""

    def __init__(self, shop: dict[str, Any], seed: int) -> None:
        self._shop = shop
        self._random = random.Random(seed)
        # Few orders, so that later calls meet changed ones.
        orders = shop["orders"]
        pending, delivered = (
            [number for number in orders if orders[number]["status"] == status] for status in ("pending", "delivered")
        )
        self._orders = [*self._random.sample(pending, 8), *self._random.sample(delivered, 6)]
        self._orders += [*self._random.sample(sorted(orders), 3), "#W0"]

    def pick(self, *values: Any) -> Any:
        return self._random.choice(values)

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of a call."""
        number = self.pick(*self._orders)
        order = self._shop["orders"].get(number, {"user_id": "", "items": [], "payment_history": []})
        user_id = order["user_id"]
        user = self._shop["users"].get(user_id, {"payment_methods": {}, "name": {}, "address": {}, "email": "?"})
        items = self._random.sample(order["items"], min(len(order["items"]), self._random.randint(0, 3)))
        replaced = [self._shop["products"][item["product_id"]]["variants"] for item in items]
        values: dict[str, Any] = {
            "order_id": number,
            "user_id": self.pick(user_id, user_id, "?"),
            "product_id": self.pick(*self._shop["products"], "?"),
            "reason": self.pick("no longer needed", "ordered by mistake", "other"),
            "payment_method_id": self.pick(*user["payment_methods"], *user["payment_methods"], "?", "paypal_0"),
            "item_ids": [item["item_id"] for item in items] + ["?"] * (self._random.random() < 0.05),
            "new_item_ids": [self.pick(*variants) for variants in replaced] + ["?"] * (self._random.random() < 0.05),
            "email": self.pick(user["email"], "?"),
            "first_name": user["name"].get("first_name", "?").upper(),
            "last_name": user["name"].get("last_name", "?"),
            "expression": self.pick(
                "2 + 2", "1 / 3", "(1.5 - 2) * -3", "7 // 2", "2 ** 3", "1 / 0", "abc", "10 ** 400"
            ),
            "zip": self.pick(user["address"].get("zip", "1"), "1"),
        }
        name = self.pick(*TOOLS)
        return name, {key: values.get(key, "1") for key in TOOLS[name].parameters}


@original
@pytest.mark.parametrize("seed", range(2))
def test_tools_answer_and_change_the_database_as_the_original_does(
    original_shop: Callable[[str], Any], seed: int
) -> None:
    loaded = original_shop("tau_bench.envs.retail.data").load_data()
    theirs = {
        tool.get_info()["function"]["name"]: tool for tool in original_shop("tau_bench.envs.retail.tools").ALL_TOOLS
    }
    assert theirs.keys() == TOOLS.keys()
    base = original_shop("tau_bench.envs.base")

    def hashed(data: dict[str, Any]) -> str:
        digest: str = base.consistent_hash(base.to_hashable(data))
        return digest

    database = Database(deepcopy(loaded))
    caller = Caller(deepcopy(loaded), seed)
    view, seen = database.view(), {database.view().digest(): hashed(loaded)}
    for _ in range(200):
        name, arguments = caller.next()
        try:
            expected = theirs[name].invoke(data=loaded, **deepcopy(arguments))
        except Exception as error:  # noqa: BLE001 - the original's environment answers every exception in this way
            expected = f"Error: {error}"
        assert call(view, name, arguments) == expected
        if name in WRITES:
            digest = view.digest()
            if digest not in seen:
                seen[digest] = hashed(loaded)
            # As text, since numbers of different types differ.
            assert str(view.to_json()["users"]) == str(loaded["users"])
            assert str(view.to_json()["orders"]) == str(loaded["orders"])
    # Different states have different hashes here and there.
    assert seen[view.digest()] == hashed(loaded)
    assert len(set(seen.values())) == len(seen) > 5
