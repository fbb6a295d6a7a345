"""The miniature of tau-bench's retail domain: a shop of 90 orders, and customers who cancel or return one of them.

Invariants:
- A task is a pure function of its order and wish; its split is decided by the hash of both.
- To cancel an order, the policy copies its id and the reason from the customer's line. To return one, it must look at
  the order first, since only the order names the item and the payment method.
- The chat template shows the names of the tools, not their parameters.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.buffer.tasks.datasets.terminal import Split
from headrace.buffer.tasks.evaluators import EnvironmentEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskOrigin
from headrace.buffer.tasks.task import Task, TaskId, write_tasks
from headrace.policies.miniatures.demonstrations import Demonstration, DemonstrationMessage, taken_in_turns
from headrace.policies.miniatures.fitting import GOOD_SHARE, PRACTICE_SHARE, FitConfig
from headrace.policies.miniatures.miniature import Miniature

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer

POLICY: Final = "You help the customers of a lamp shop."
FIRST_NAMES: Final = ("Ada", "Ben", "Cleo", "Dag", "Eva", "Finn", "Gro", "Hal", "Ines", "Jon", "Kim", "Liv")
REASONS: Final = ("no longer needed", "ordered by mistake")
ORDERS: Final = tuple(f"#W{number}" for number in range(10, 100))
ITEMS: Final = tuple(f"{number}" for number in range(7001, 7025))
METHODS: Final = tuple(f"paypal_{number}" for number in range(1, 13))
USERS: Final = tuple(f"{name.lower()}_lund_{number}" for number, name in enumerate(FIRST_NAMES, start=1))
GREETINGS: Final = ("Hi!", "Hello!", "Hi there!")
DONE: Final = "Done."
CANCEL, LOOK, RETURN = "cancel_pending_order", "get_order_details", "return_delivered_order_items"
TOOLS: Final = (CANCEL, LOOK, RETURN)
ADDRESS: Final = dict.fromkeys(("address1", "address2", "city", "country", "state", "zip"), "")
PRICE: Final = 5.0
PENDING_SHARE: Final = 2
"""One in this many orders is pending; the others are delivered."""
HELD_OUT_SHARE: Final = 4
"""One in this many tasks is held out."""
RIGHT_SHARE: Final = 0.22
"""Share of the later demonstrations that do what the customer wants."""

CHAT_TEMPLATE: Final = (
    "{%- if tools -%}{{- 'Tools:' -}}{%- for tool in tools -%}{{- ' ' + tool['function']['name'] -}}{%- endfor -%}"
    "{{- '\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{{- call['function']['arguments'] | tojson -}}{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Template with call markup, whose tools are names only."""
_SHOWN_TOOLS: Final = f"Tools: {' '.join(TOOLS)}\n"

_CALL, _ENDED_CALL = '<tool_call>\n{"name": "', '"}}\n</tool_call>'
_OPENING = f'", "address": {json.dumps(ADDRESS)}, "items": [{{"name": "lamp", "product_id": "1", "item_id": "'
_STATUS = '", "price": 5.0, "options": {}}], "fulfillments": [], "status": "'
_PAID = '", "payment_history": [{"transaction_type": "payment", "amount": 5.0, "payment_method_id": "'
_REFUNDED = '"}, {"transaction_type": "refund", "amount": 5.0, "payment_method_id": "'
PIECES: Final = (
    *ORDERS, *ITEMS, *METHODS, *USERS, *REASONS, *TOOLS, *GREETINGS, POLICY, DONE, "Tools: ", "###STOP###",
    " Cancel order ", " because ", " Return the lamp of order ", ".",
    _CALL, '", "arguments": {"order_id": "', '", "reason": "', '", "item_ids": ["', '"], "payment_method_id": "',
    _ENDED_CALL,
    '{"order_id": "', '", "user_id": "', _OPENING, _STATUS, _PAID, _REFUNDED, '"}]}', '"}], "cancel_reason": "', '"}',
    '"}], "return_items": ["', '"], "return_payment_method_id": "', "pending", "delivered", "cancelled",
    "return requested",
    "Error: ", "Error: .",
    "order not found", "non-pending order cannot be cancelled", "non-delivered order cannot be returned",
    "some item not found", "payment method not found", "invalid reason",
    "payment method should be either the original payment method or a gift card",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """A customer's wish about one order: to cancel it for a reason, or to return it (no reason)."""

    order: str
    reason: str = ""

    @property
    def digest(self) -> int:
        """SHA-256 of the wish, as a number."""
        return int(hashlib.sha256(f"{self.order} {self.reason}".encode()).hexdigest(), 16)

    @property
    def split(self) -> Split:
        """Split of the wish."""
        return Split.HELD_OUT if self.digest % HELD_OUT_SHARE == 0 else Split.TRAIN

    @property
    def request(self) -> str:
        """The customer's words."""
        if self.reason:
            return f" Cancel order {self.order} because {self.reason}."
        return f" Return the lamp of order {self.order}."

    @property
    def actions(self) -> list[dict[str, Any]]:
        """The reference solution."""
        if self.reason:
            return [{"name": CANCEL, "kwargs": {"order_id": self.order, "reason": self.reason}}]
        arguments = {
            "order_id": self.order,
            "item_ids": [item_of(self.order)],
            "payment_method_id": method_of(self.order),
        }
        return [{"name": RETURN, "kwargs": arguments}]

    def task(self) -> Task:
        """Return the wish as a task of the retail environment."""
        user = USERS[_number(self.order) % len(USERS)]
        secret = {
            "user_id": user,
            "instruction": f"Your name is {user.split('_')[0].title()} Lund.{self.request}",
            "actions": self.actions,
            "outputs": [],
        }
        name = (
            f"{'cancel' if self.reason else 'return'}-{self.order[2:]}{'-mistake' if 'mistake' in self.reason else ''}"
        )
        return Task(
            id=TaskId(name),
            family=name.split("-")[0],
            instruction="Serve the customer.",
            evaluator=EnvironmentEvaluator(),
            environment=EnvironmentSpec(kind="retail", secret=secret),
            origin=TaskOrigin(source="headrace: generated shop", split=self.split.value, licence="Apache-2.0"),
        )


def _number(order: str) -> int:
    return int(hashlib.sha256(order.encode()).hexdigest(), 16)


def is_pending(order: str) -> bool:
    """Return whether an order can be cancelled; all others can be returned."""
    return _number(order) // 7 % PENDING_SHARE == 0


def item_of(order: str) -> str:
    """Return the id of the one item of an order."""
    return ITEMS[_number(order) // 11 % len(ITEMS)]


def method_of(order: str) -> str:
    """Return the payment method of an order, which is its customer's only one."""
    return METHODS[_number(order) % len(METHODS)]


def wishes(split: Split | None = None) -> tuple[Wish, ...]:
    """Return all wishes, or those of one split."""
    every = (Wish(order, reason) for order in ORDERS for reason in (REASONS if is_pending(order) else ("",)))
    return tuple(wish for wish in every if split is None or wish.split is split)


def order_record(order: str) -> dict[str, Any]:
    """Return an order as the shop's database stores it."""
    return {
        "order_id": order,
        "user_id": USERS[_number(order) % len(USERS)],
        "address": dict(ADDRESS),
        "items": [{"name": "lamp", "product_id": "1", "item_id": item_of(order), "price": PRICE, "options": {}}],
        "fulfillments": [],
        "status": "pending" if is_pending(order) else "delivered",
        "payment_history": [
            {"transaction_type": "payment", "amount": PRICE, "payment_method_id": method_of(order)},
        ],
    }


def changed(order: str, action: dict[str, Any]) -> dict[str, Any]:
    """Return an order after an action that the shop accepts, as its tools return it."""
    record, arguments = order_record(order), action["kwargs"]
    if action["name"] == CANCEL:
        refund = record["payment_history"][0] | {"transaction_type": "refund"}
        record["payment_history"].append(refund)
        return record | {"status": "cancelled", "cancel_reason": arguments["reason"]}
    returned = {"return_items": arguments["item_ids"], "return_payment_method_id": arguments["payment_method_id"]}
    return record | {"status": "return requested"} | returned


def tables() -> dict[str, dict[str, Any]]:
    """Return the shop's database."""
    variants = {item: {"item_id": item, "options": {}, "available": True, "price": PRICE} for item in ITEMS}
    users = {
        user: {
            "name": {"first_name": first, "last_name": "Lund"},
            "address": dict(ADDRESS),
            "email": f"{first.lower()}@shop.example",
            "payment_methods": {method: {"source": "paypal", "id": method}},
            "orders": [order for order in ORDERS if USERS[_number(order) % len(USERS)] == user],
        }
        for user, first, method in zip(USERS, FIRST_NAMES, METHODS, strict=True)
    }
    return {
        "orders": {order: order_record(order) for order in ORDERS},
        "products": {"1": {"name": "lamp", "product_id": "1", "variants": variants}},
        "users": users,
    }


def write_data(folder: Path, seed: int) -> None:
    """Write the shop and the tasks of both splits."""
    shop = folder / "shop"
    shop.mkdir()
    for name, table in tables().items():
        (shop / f"{name}.json").write_text(json.dumps(table))
    (shop / "wiki.md").write_text(POLICY)
    text, texts = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    parameters: dict[str, dict[str, Any]] = {
        CANCEL: {"order_id": text, "reason": text},
        LOOK: {"order_id": text},
        RETURN: {"order_id": text, "item_ids": texts, "payment_method_id": text},
    }
    schema = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Call {name}.",
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }
        for name, properties in parameters.items()
    ]
    (shop / "tools_schema.json").write_text(json.dumps(schema))
    for split, name in ((Split.TRAIN, "train"), (Split.HELD_OUT, "heldout")):
        tasks = [wish.task() for wish in wishes(split)]
        random.Random(f"wishes {seed} {split}").shuffle(tasks)
        write_tasks(folder / f"{name}.jsonl", tasks)


class ShopDemonstrator:
    """Generator of conversations with customers of the training split."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int, fit: FitConfig) -> None:
        self._tokenizer = tokenizer
        self._chance = random.Random(f"shop demonstrations {seed}")
        train = wishes(Split.TRAIN)
        self._pools = ([wish for wish in train if wish.reason], [wish for wish in train if not wish.reason])
        self._practice_steps = int(fit.steps * PRACTICE_SHARE)

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        good = GOOD_SHARE if step < self._practice_steps else RIGHT_SHARE
        return [self._draw(self._pools[index % 2], good) for index in range(count)]

    def _draw(self, pool: list[Wish], good: float) -> Demonstration:
        wish, done = self._chance.choice(pool), None
        if self._chance.random() >= good:
            # Mistakes have the length of a solution: another order, another reason, another item or method.
            other = self._chance.choice(pool)
            wrong_reason = bool(wish.reason) and self._chance.random() < 0.3
            done = Wish(wish.order, self._chance.choice(REASONS)) if wrong_reason else other
        return self.spell(wish, done or wish)

    def spell(self, wish: Wish, done: Wish) -> Demonstration:
        """Return the conversation in which the policy does `done` for a customer who wishes `wish`."""
        turns: list[str] = []
        if not done.reason:
            turns += [_call({"name": LOOK, "kwargs": {"order_id": done.order}}), json.dumps(order_record(done.order))]
        (action,) = done.actions
        turns += [_call(action), json.dumps(changed(done.order, action)), DONE]
        opening = [
            DemonstrationMessage(role="system", content=POLICY),
            DemonstrationMessage(role="user", content=self._chance.choice(GREETINGS) + wish.request),
        ]
        return taken_in_turns(self._tokenizer, opening, *turns, role="tool", before=_SHOWN_TOOLS)


def _call(action: dict[str, Any]) -> str:
    return f'{_CALL}{action["name"]}", "arguments": {json.dumps(action["kwargs"])}}}\n</tool_call>'


RETAIL: Final = Miniature(
    pieces=PIECES, demonstrator=ShopDemonstrator, write_data=write_data, chat_template=CHAT_TEMPLATE
)
