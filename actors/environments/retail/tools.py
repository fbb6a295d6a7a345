"""The sixteen tools of tau-bench's retail shop.

Invariants:
- `call` returns a text for everything that a policy can write; mistakes are texts that start with "Error: ".
- A tool changes the database completely or not at all: every check precedes the first change.
- Only `edit` returns records that a tool changes.
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from headrace.actors.environments.retail.database import Address, Order, PaymentMethod, Variant, View
from headrace.actors.errors import ConfigError
from headrace.actors.services.chat import ChatTool

TRANSFER: Final = "transfer_to_human_agents"
"""The tool that ends an episode."""
REASONS: Final = ("no longer needed", "ordered by mistake")
MAX_EXPRESSION: Final = 500
"""Maximum number of characters of an expression to calculate."""
MAX_BITS: Final = 4096
"""Maximum size of an integer while calculating."""
MAX_ECHO: Final = 100
"""Maximum number of characters of the policy's own text in an error."""

Number: TypeAlias = int | float
_OPERATORS: Final[Mapping[type[ast.AST], Callable[..., Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ToolRefused(Exception):
    """A tool refuses its arguments; the message is the text after "Error: "."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `parameters` says which arguments are lists of strings; all others are strings."""

    run: Callable[..., str]
    parameters: Mapping[str, bool]

    def check(self, arguments: Mapping[str, object]) -> None:
        """Check the arguments' names and types. Raises ToolRefused."""
        for name in arguments:
            if name not in self.parameters:
                raise ToolRefused(f"unexpected argument {str(name)[:MAX_ECHO]!r}")
        for name, is_list in self.parameters.items():
            if name not in arguments:
                raise ToolRefused(f"missing argument {name!r}")
            value = arguments[name]
            if not is_list and not isinstance(value, str):
                raise ToolRefused(f"{name} must be a string")
            if is_list and not (isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)):
                raise ToolRefused(f"{name} must be a list of strings")


TOOLS: Final[dict[str, Tool]] = {}
"""All tools, by name."""


def _tool(run: Callable[..., str]) -> Callable[..., str]:
    parameters = list(inspect.signature(run).parameters.values())[1:]
    TOOLS[run.__name__] = Tool(run, {part.name: part.annotation != "str" for part in parameters})
    return run


def call(view: View, name: str, arguments: Mapping[str, object]) -> str:
    """Call a tool and return what the policy reads."""
    tool = TOOLS.get(name)
    if tool is None:
        return f"Unknown action {name[:MAX_ECHO]}"
    try:
        tool.check(arguments)
        return tool.run(view, **arguments)
    except ToolRefused as error:
        return f"Error: {error}"


@_tool
def calculate(view: View, expression: str) -> str:
    """Return the value of an arithmetic expression, rounded to cents."""
    if any(character not in "0123456789+-*/(). " for character in expression):
        raise ToolRefused("invalid characters in expression")
    if len(expression) > MAX_EXPRESSION:
        raise ToolRefused("the expression is too long")
    try:
        value = float(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError) as error:
        raise ToolRefused(str(error).partition(" (<unknown>")[0] or "invalid expression") from error
    return str(round(value, 2))


def _value(node: ast.AST) -> Number:
    """Evaluate an expression. Raises ValueError, TypeError, ArithmeticError."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            base, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and _bits(base) * abs(other) > MAX_BITS:
                raise OverflowError("the number is too large")
            result = _OPERATORS[type(op)](base, other)
            if _bits(result) > MAX_BITS:
                raise OverflowError("the number is too large")
            return result
        case _:
            raise ValueError("invalid syntax")


def _bits(number: Number) -> int:
    # Floats overflow by themselves.
    return number.bit_length() if isinstance(number, int) else 1


@_tool
def think(view: View, thought: str) -> str:
    """Do nothing."""
    return ""


@_tool
def transfer_to_human_agents(view: View, summary: str) -> str:
    """Transfer the user to a human agent, which ends the episode."""
    return "Transfer successful"


@_tool
def find_user_id_by_email(view: View, email: str) -> str:
    """Return the id of the user with an e-mail address."""
    for user_id, user in view.users.items():
        if user["email"].lower() == email.lower():
            return user_id
    raise ToolRefused("user not found")


@_tool
def find_user_id_by_name_zip(view: View, first_name: str, last_name: str, zip: str) -> str:
    """Return the id of the user with a name and a zip code."""
    wanted = (first_name.lower(), last_name.lower(), zip)
    for user_id, user in view.users.items():
        name = user["name"]
        if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
            return user_id
    raise ToolRefused("user not found")


@_tool
def get_user_details(view: View, user_id: str) -> str:
    """Return a user."""
    return _found(view.users.get(user_id), "user")


@_tool
def get_order_details(view: View, order_id: str) -> str:
    """Return an order."""
    return _found(view.orders.get(order_id), "order")


@_tool
def get_product_details(view: View, product_id: str) -> str:
    """Return a product with its variants."""
    return _found(view.products.get(product_id), "product")


@_tool
def list_all_product_types(view: View) -> str:
    """Return the ids of all products by name, sorted by name."""
    return json.dumps({product["name"]: key for key, product in view.products.items()}, sort_keys=True)


@_tool
def cancel_pending_order(view: View, order_id: str, reason: str) -> str:
    """Cancel a pending order and refund every payment; gift cards are refunded at once."""
    _order(view, order_id, "pending", "cancelled")
    if reason not in REASONS:
        raise ToolRefused("invalid reason")
    order = view.orders.edit(order_id)
    for payment in tuple(order["payment_history"]):
        _record(order, "refund", payment["amount"], payment["payment_method_id"])
        _add_balance(view, order, payment["payment_method_id"], payment["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    return json.dumps(order)


@_tool
def modify_pending_order_address(
    view: View, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    """Change the shipping address of a pending order."""
    _order(view, order_id, "pending", "modified")
    order = view.orders.edit(order_id)
    order["address"] = Address(address1=address1, address2=address2, city=city, state=state, country=country, zip=zip)
    return json.dumps(order)


@_tool
def modify_user_address(
    view: View, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    """Change the default address of a user."""
    if view.users.get(user_id) is None:
        raise ToolRefused("user not found")
    user = view.users.edit(user_id)
    user["address"] = Address(address1=address1, address2=address2, city=city, state=state, country=country, zip=zip)
    return json.dumps(user)


@_tool
def modify_pending_order_payment(view: View, order_id: str, payment_method_id: str) -> str:
    """Pay a pending order with another method, and refund the first one."""
    order = _order(view, order_id, "pending", "modified")
    method = _method(view, order, payment_method_id)
    history = order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
        raise ToolRefused("there should be exactly one payment for a pending order")
    amount, former = history[0]["amount"], history[0]["payment_method_id"]
    if former == payment_method_id:
        raise ToolRefused("the new payment method should be different from the current one")
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolRefused("insufficient gift card balance to pay for the order")
    order = view.orders.edit(order_id)
    _record(order, "payment", amount, payment_method_id)
    _record(order, "refund", amount, former)
    _add_balance(view, order, payment_method_id, -amount)
    _add_balance(view, order, former, amount)
    return json.dumps(order)


@_tool
def modify_pending_order_items(
    view: View, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
) -> str:
    """Replace items of a pending order, and pay or refund the difference in price."""
    order = _order(view, order_id, "pending", "modified")
    variants, difference = _replacements(view, order, item_ids, new_item_ids)
    _check_pays(_method(view, order, payment_method_id), difference, "the new item")
    order = view.orders.edit(order_id)
    _record(order, "payment" if difference > 0 else "refund", abs(difference), payment_method_id)
    _add_balance(view, order, payment_method_id, -difference)
    for item_id, variant in zip(item_ids, variants, strict=True):
        item = next(item for item in order["items"] if item["item_id"] == item_id)
        item |= {"item_id": variant["item_id"], "price": variant["price"], "options": dict(variant["options"])}
    order["status"] = "pending (item modified)"
    return json.dumps(order)


@_tool
def exchange_delivered_order_items(
    view: View, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
) -> str:
    """Request the exchange of items of a delivered order."""
    order = _order(view, order_id, "delivered", "exchanged")
    _, difference = _replacements(view, order, item_ids, new_item_ids)
    _check_pays(_method(view, order, payment_method_id), difference, "the price difference")
    order = view.orders.edit(order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = round(difference, 2)
    return json.dumps(order)


@_tool
def return_delivered_order_items(view: View, order_id: str, item_ids: Sequence[str], payment_method_id: str) -> str:
    """Request the return of items of a delivered order."""
    order = _order(view, order_id, "delivered", "returned")
    method = _method(view, order, payment_method_id)
    if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolRefused("payment method should be either the original payment method or a gift card")
    if Counter(item_ids) - Counter(item["item_id"] for item in order["items"]):
        raise ToolRefused("some item not found")
    order = view.orders.edit(order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)


def _found(record: Mapping[str, Any] | None, kind: str) -> str:
    if record is None:
        raise ToolRefused(f"{kind} not found")
    return json.dumps(record)


def _order(view: View, order_id: str, status: str, done: str) -> Order:
    """Return an order with a status. Raises ToolRefused."""
    order = view.orders.get(order_id)
    if order is None:
        raise ToolRefused("order not found")
    if order["status"] != status:
        raise ToolRefused(f"non-{status} order cannot be {done}")
    return order


def _method(view: View, order: Order, payment_method_id: str) -> PaymentMethod:
    """Return a payment method of the user of an order. Raises ToolRefused."""
    user = view.users.get(order["user_id"])
    method = user["payment_methods"].get(payment_method_id) if user is not None else None
    if method is None:
        raise ToolRefused("payment method not found")
    return method


def _replacements(
    view: View, order: Order, item_ids: Sequence[str], new_item_ids: Sequence[str]
) -> tuple[list[Variant], float]:
    """Return the available variants that replace items of an order, and the difference in price in dollars. Raises
    ToolRefused."""
    if missing := Counter(item_ids) - Counter(item["item_id"] for item in order["items"]):
        raise ToolRefused(f"{next(iter(missing))[:MAX_ECHO]} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolRefused("the number of items to be exchanged should match")
    items = {item["item_id"]: item for item in reversed(order["items"])}
    variants: list[Variant] = []
    # An integer until a price is added, as in the original: the type of the number is part of the hash.
    difference: float = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        product = view.products.get(items[item_id]["product_id"])
        variant = product["variants"].get(new_item_id) if product is not None else None
        if variant is None or not variant["available"]:
            raise ToolRefused(f"new item {new_item_id[:MAX_ECHO]} not found or available")
        variants.append(variant)
        difference += variant["price"] - items[item_id]["price"]
    return variants, difference


def _check_pays(method: PaymentMethod, amount: float, what: str) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolRefused(f"insufficient gift card balance to pay for {what}")


def _record(order: Order, kind: str, amount: float, payment_method_id: str) -> None:
    order["payment_history"].append(
        {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}
    )


def _add_balance(view: View, order: Order, payment_method_id: str, amount: float) -> None:
    """Add an amount to the balance of a gift card; other methods have none."""
    user = view.users.get(order["user_id"])
    method = user["payment_methods"].get(payment_method_id) if user is not None else None
    if method is not None and method["source"] == "gift_card":
        method = view.users.edit(order["user_id"])["payment_methods"][payment_method_id]
        method["balance"] = round(method["balance"] + amount, 2)


class _Function(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)
    function: _Function


def load_tools(path: Path) -> tuple[ChatTool, ...]:
    """Load the descriptions of the tools from a JSON list in the form of the Chat Completions API. Raises
    ConfigError."""
    try:
        entries = TypeAdapter(list[_Entry]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{path}: cannot be read as a list of tools: {reason}; give the tools_schema.json") from error
    for entry in entries:
        if entry.function.name not in TOOLS:
            raise ConfigError(f"{path}: unknown tool {entry.function.name!r}; the retail shop has {', '.join(TOOLS)}")
    return tuple(
        ChatTool(name=entry.function.name, description=entry.function.description, parameters=entry.function.parameters)
        for entry in entries
    )
