"""tau-bench's retail shop as an environment: a policy text, sixteen tools and a simulated customer.

Invariants:
- The reward depends on the final database and on what the policy told the customer, and on nothing else. The reference
  solution is replayed on a view of its own, so its actions never count as the policy's.
- The secret of a task (the customer's instruction, the reference solution and the expected outputs) is never in
  messages, artifacts or errors; only the customer's lines, which the simulator writes, come from the instruction.
- The database is loaded once per process, in a thread, and shared by all episodes.
- A task whose reference solution changes nothing, or fails, is solved by doing nothing and telling the outputs. This is
  tau-bench's own definition; the detail of such verdicts says so.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field

from headrace.actors.environments.environment import RESPOND, Action, Clock, EpisodeEnd, Observation, observed
from headrace.actors.environments.retail.database import Database
from headrace.actors.environments.retail.tools import TOOLS, TRANSFER, call, load_tools
from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.verdict import Verdict, failed, solved
from headrace.actors.services.chat import ChatMessage, ChatTool
from headrace.actors.services.rule_user import STOP, normalised
from headrace.actors.services.service import Services
from headrace.actors.services.user_simulators import Goal, GoldAction, SimulatorConfig, UserSimulator, make_user
from headrace.buffer.tasks.datasets.tau import KIND
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox

ACTIONS: Final = frozenset({*TOOLS, RESPOND})
IDLE: Final = "the database was not to be changed"
"""Detail of the verdict of tasks that doing nothing would solve, apart from their outputs."""
DIALOGUE, CALLS = "dialogue.jsonl", "tool_calls.jsonl"


class RetailConfig(SimulatorConfig):
    """Settings of the retail environment."""

    data: str
    """Folder with the database (`db.json`, `db.json.gz`, or `orders.json`, `products.json` and `users.json`)."""
    policy: str = ""
    """File with the policy text, which is the system message; by default `wiki.md` in the data folder."""
    tools: str = ""
    """File with the descriptions of the tools; by default `tools_schema.json` in the data folder."""
    end_required: bool = Field(default=False)
    """Whether an episode fails if neither the customer nor a transfer has ended it, as in tau-bench's own loop."""


@dataclass(slots=True)
class Shop:
    """Data that all episodes in a process share. `goldens` holds the final digests of reference solutions."""

    database: Database
    policy: str
    tools: tuple[ChatTool, ...]
    goldens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, config: RetailConfig) -> Self:
        """Load the files of a configuration. Raises ConfigError."""
        folder = Path(config.data)
        if not folder.is_dir():
            raise ConfigError(
                f"environment.retail.data: {folder} is not a folder; give the one with the shop's database"
            )
        policy = Path(config.policy or folder / "wiki.md")
        try:
            text = policy.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise ConfigError(
                f"environment.retail.policy: {policy} cannot be read: {reason}; set it to the policy text"
            ) from error
        tools = load_tools(Path(config.tools or folder / "tools_schema.json"))
        return cls(database=Database.load(folder), policy=text, tools=tools)

    def golden(self, actions: tuple[GoldAction, ...]) -> str:
        """Return the digest of the database after a reference solution; it is computed once."""
        key = json.dumps([[action.name, action.arguments] for action in actions], sort_keys=True)
        if key not in self.goldens:
            view = self.database.view()
            for action in actions:
                call(view, action.name, action.arguments)
            self.goldens[key] = view.digest()
        return self.goldens[key]


_SHOPS: dict[tuple[str, str, str], Shop] = {}
_LOADING = threading.Lock()


def load_shop(config: RetailConfig) -> Shop:
    """Return the shop of a configuration; it is loaded once per process. Raises ConfigError."""
    key = (config.data, config.policy, config.tools)
    with _LOADING:
        if key not in _SHOPS:
            _SHOPS[key] = Shop.load(config)
        return _SHOPS[key]


async def shop_of(config: RetailConfig) -> Shop:
    """Return the shop of a configuration like `load_shop`. Raises ConfigError."""
    known = _SHOPS.get((config.data, config.policy, config.tools))
    # Loading takes a tenth of a second, for which other sessions must not wait.
    return await asyncio.to_thread(load_shop, config) if known is None else known


def goal_of(task: Task) -> Goal:
    """Return what the customer of a task wants. Raises ConfigError, without the contents."""
    if task.environment is None or task.environment.kind != KIND:
        raise ConfigError(f"task {task.id}: environment.kind: must be {KIND!r}; convert the data set with form tau")
    try:
        return Goal.parse(task.environment.secret)
    except ValueError as error:
        raise ConfigError(f"task {task.id}: environment.secret: {error}; convert the data set again") from error


class RetailEpisode:
    """One conversation with a customer."""

    def __init__(self, shop: Shop, goal: Goal, user: UserSimulator, first_line: str, *, end_required: bool) -> None:
        self._shop = shop
        self._goal = goal
        self._user = user
        self._end_required = end_required
        self._view = shop.database.view()
        self._dialogue: list[tuple[str, str]] = [("user", first_line)]
        self._calls: list[Mapping[str, Any]] = []
        self._ended = STOP in first_line
        self.messages = (
            ChatMessage(role="system", content=shop.policy),
            ChatMessage(role="user", content=first_line),
        )
        self.tools = shop.tools

    async def act(self, action: Action) -> Observation:
        """Call a tool, or send a text to the customer and return the answer. Raises ServiceDown."""
        if self._ended:
            return observed("Error: the conversation has ended", ends=True)
        if action.name != RESPOND:
            result = call(self._view, action.name, action.arguments)
            self._calls.append({"name": action.name, "arguments": dict(action.arguments), "result": result})
            # A transfer ends the episode even if its arguments are wrong.
            self._ended = action.name == TRANSFER
            return observed(result, ends=self._ended)
        content = action.arguments.get("content")
        if not isinstance(content, str) or not content.strip():
            return observed("Error: respond needs `content`, a text that is not empty")
        self._dialogue.append(("assistant", content))
        line = await self._user.step(content)
        self._dialogue.append(("user", line))
        self._ended = STOP in line
        return observed(line, ends=self._ended)

    async def close(self) -> EpisodeEnd:
        """End the episode and return its verdict, the dialogue and the tool calls (JSON lines)."""
        dialogue = ({"role": role, "content": content} for role, content in self._dialogue)
        return EpisodeEnd(
            artifacts={
                DIALOGUE: "".join(f"{json.dumps(message)}\n" for message in dialogue),
                CALLS: "".join(f"{json.dumps(made)}\n" for made in self._calls),
            },
            verdict=self._verdict(),
        )

    def _verdict(self) -> Verdict:
        if self._end_required and not self._ended:
            return failed("the conversation was not ended")
        if self._view.digest() != self._shop.golden(self._goal.actions):
            return failed("the final database is not the expected one")
        told = [normalised(content) for role, content in self._dialogue if role == "assistant"]
        for output in self._goal.outputs:
            if not any(normalised(output) in text for text in told):
                return failed("an expected output was not told to the customer")
        return solved(IDLE if self._view.digest() == self._shop.database.view().digest() else "")


class RetailEnvironment:
    """The retail shop."""

    needs_sandbox = False
    actions: frozenset[str] | None = ACTIONS

    def __init__(self, config: RetailConfig) -> None:
        self._config = config
        self.services = (config.service,) if config.service else ()

    def check(self, task: Task) -> None:
        """Load the shop, once, and parse the goal of a task. Raises ConfigError."""
        load_shop(self._config)
        goal_of(task)

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> RetailEpisode:
        """Open an episode; the customer speaks first. Raises ServiceDown, and ConfigError for a task of another
        environment or files that cannot be used."""
        goal = goal_of(task)
        shop = await shop_of(self._config)
        user = make_user(self._config, goal, services, name=task.id)
        first_line = await user.reset(goal.instruction)
        return RetailEpisode(shop, goal, user, first_line, end_required=self._config.end_required)
