"""A small made-up retail shop, its tasks, and agents that follow a script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.actors.environments.environment import Action, EpisodeEnd
from headrace.actors.environments.retail.environment import RetailConfig, RetailEnvironment, RetailEpisode
from headrace.actors.environments.retail.tools import TOOLS
from headrace.actors.errors import ConfigError
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.service import HelperModel, Retriever, RewardServer
from headrace.buffer.tasks.datasets.tau import KIND
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec
from headrace.buffer.tasks.task import Task, TaskId

POLICY = "Help the customers of the lamp shop."
ADDRESS = {"address1": "1 Hill St", "address2": "", "city": "Oslo", "country": "NO", "state": "OS", "zip": "10001"}
MOVED = ADDRESS | {"address1": "2 Dale St", "zip": "20002"}
INSTRUCTION = (
    "Your name is Una Bergh and your zip code is 10001. You are patient, brief. Cancel order #W1 because no longer "
    "needed. "
)
CANCEL = {"name": "cancel_pending_order", "kwargs": {"order_id": "#W1", "reason": "no longer needed"}}


def variant(item_id: str, price: float, *, available: bool = True, **options: str) -> dict[str, Any]:
    return {"item_id": item_id, "options": options, "available": available, "price": price}


def item(product: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    chosen = product["variants"][item_id]
    names = {"name": product["name"], "product_id": product["product_id"], "item_id": item_id}
    return names | {"price": chosen["price"], "options": dict(chosen["options"])}


def order(number: str, user_id: str, status: str, items: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    amount = round(sum(part["price"] for part in items), 2)
    return {
        "order_id": number,
        "user_id": user_id,
        "address": dict(ADDRESS),
        "items": [dict(part) for part in items],
        "fulfillments": [],
        "status": status,
        "payment_history": [{"transaction_type": "payment", "amount": amount, "payment_method_id": method}],
    }


def tables() -> dict[str, dict[str, Any]]:
    """Return a fresh database: two users, two products and five orders."""
    variants = (
        variant("11", 20.5, color="red"),
        variant("12", 30.25, color="blue"),
        variant("13", 9.0, color="grey", available=False),
        variant("14", 500.0, color="gold"),
    )
    lamp = {"name": "Lamp", "product_id": "1", "variants": {part["item_id"]: part for part in variants}}
    rug = {"name": "Rug", "product_id": "2", "variants": {"21": variant("21", 100.1, size="L")}}
    una = {
        "name": {"first_name": "Una", "last_name": "Bergh"},
        "address": dict(ADDRESS),
        "email": "una@shop.example",
        "payment_methods": {
            "gift_card_1": {"source": "gift_card", "balance": 50, "id": "gift_card_1"},
            "credit_card_1": {"source": "credit_card", "brand": "visa", "last_four": "1111", "id": "credit_card_1"},
            "paypal_1": {"source": "paypal", "id": "paypal_1"},
        },
        "orders": ["#W1", "#W2", "#W3", "#W4"],
    }
    odd = una | {
        "name": {"first_name": "Odd", "last_name": "Dal"},
        "email": "odd@shop.example",
        "payment_methods": {"paypal_2": {"source": "paypal", "id": "paypal_2"}},
        "orders": ["#W5"],
    }
    orders = (
        order("#W1", "una_bergh_1", "pending", [item(lamp, "11"), item(rug, "21")], "gift_card_1"),
        order("#W2", "una_bergh_1", "delivered", [item(lamp, "11"), item(lamp, "11")], "credit_card_1"),
        order("#W3", "una_bergh_1", "pending", [item(lamp, "12")], "credit_card_1"),
        order("#W4", "una_bergh_1", "cancelled", [item(rug, "21")], "paypal_1"),
        order("#W5", "odd_dal_2", "processed", [item(rug, "21")], "paypal_2"),
    )
    return {
        "orders": {part["order_id"]: part for part in orders},
        "products": {"2": rug, "1": lamp},
        "users": {"una_bergh_1": una, "odd_dal_2": odd},
    }


def write_shop(folder: Path) -> Path:
    """Write the files of the shop to a folder."""
    for name, table in tables().items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    (folder / "wiki.md").write_text(POLICY)
    tools = [{"type": "function", "function": {"name": name, "description": f"Do {name}."}} for name in TOOLS]
    (folder / "tools_schema.json").write_text(json.dumps(tools))
    return folder


def retail_task(secret: Mapping[str, Any], name: str = "t1") -> Task:
    return Task(
        id=TaskId(name),
        family="tau/retail",
        instruction="Help.",
        evaluator=NoEvaluator(),
        environment=EnvironmentSpec(kind=KIND, secret=secret),
    )


def secret_of(
    *actions: Mapping[str, Any], instruction: str = INSTRUCTION, outputs: Sequence[str] = ()
) -> dict[str, Any]:
    return {"user_id": "una_bergh_1", "instruction": instruction, "actions": list(actions), "outputs": list(outputs)}


@dataclass
class ScriptedModel:
    """Helper model that gives prepared answers, or raises prepared errors, in order."""

    answers: list[str | Exception]
    requests: list[tuple[ChatMessage, ...]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    async def complete(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> str:
        self.requests.append(tuple(messages))
        self.seeds.append(seed)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class OneModel:
    """The services of a recipe with one helper model."""

    helper: HelperModel | None = None

    def retriever(self, name: str) -> Retriever:
        raise ConfigError(f"no service {name}")

    def model(self, name: str) -> HelperModel:
        if self.helper is None or name != "user":
            raise ConfigError(f"no service {name}")
        return self.helper

    def reward(self, name: str) -> RewardServer:
        raise ConfigError(f"no service {name}")


async def open_episode(
    folder: Path, task: Task, *, helper: HelperModel | None = None, **settings: Any
) -> RetailEpisode:
    environment = RetailEnvironment(RetailConfig(data=str(folder), **settings))
    return await environment.open(task, None, OneModel(helper), lambda: 0.0)


async def say(episode: RetailEpisode, text: str) -> str:
    return (await episode.act(Action(name="respond", arguments={"content": text}))).text


async def play_oracle(episode: RetailEpisode, secret: Mapping[str, Any]) -> tuple[bool, EpisodeEnd]:
    """Play an agent that knows the reference solution. Return whether the customer ended the conversation."""
    await say(episode, "Could you please give me your e-mail, or your name and zip code?")
    await say(episode, "I will do what you asked for. Do you confirm (yes/no)?")
    for action in secret["actions"]:
        # A transfer would end the conversation before the customer does.
        if action["name"] != "transfer_to_human_agents":
            await episode.act(Action(name=action["name"], arguments=action["kwargs"]))
    for _ in range(12):
        report = f"Everything has been done. {'; '.join(secret['outputs'])}. Is there anything else?"
        if "###STOP###" in await say(episode, report):
            return True, await episode.close()
    return False, await episode.close()
