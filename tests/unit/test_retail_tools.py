"""The sixteen tools of the retail shop: success, every error, and arguments that are not what the schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.actors.environments.retail.database import Database, View
from headrace.actors.environments.retail.tools import TOOLS, call
from support.retail_shop import ADDRESS, MOVED, tables

BOTH = {"item_ids": ["11"], "new_item_ids": ["12"], "payment_method_id": "credit_card_1"}


@pytest.fixture
def view() -> View:
    return Database(tables()).view()


def answer(view: View, name: str, **arguments: Any) -> Any:
    return json.loads(call(view, name, arguments))


def balance(view: View) -> float:
    user = view.users.get("una_bergh_1")
    assert user is not None
    return user["payment_methods"]["gift_card_1"]["balance"]


def test_reading_returns_the_records_as_json(view: View) -> None:
    shop = tables()
    assert answer(view, "get_order_details", order_id="#W1") == shop["orders"]["#W1"]
    assert answer(view, "get_user_details", user_id="odd_dal_2") == shop["users"]["odd_dal_2"]
    assert answer(view, "get_product_details", product_id="1") == shop["products"]["1"]
    assert call(view, "list_all_product_types", {}) == '{"Lamp": "1", "Rug": "2"}'
    assert call(view, "find_user_id_by_email", {"email": "UNA@shop.example"}) == "una_bergh_1"
    named = {"first_name": "una", "last_name": "BERGH", "zip": "10001"}
    assert call(view, "find_user_id_by_name_zip", named) == "una_bergh_1"
    assert call(view, "think", {"thought": "hm"}) == ""
    assert call(view, "transfer_to_human_agents", {"summary": "?"}) == "Transfer successful"


def test_a_user_is_found_at_the_new_address(view: View) -> None:
    answer(view, "modify_user_address", user_id="una_bergh_1", **MOVED)
    named = {"first_name": "Una", "last_name": "Bergh"}
    assert call(view, "find_user_id_by_name_zip", named | {"zip": "20002"}) == "una_bergh_1"
    assert call(view, "find_user_id_by_name_zip", named | {"zip": "10001"}) == "Error: user not found"


def test_a_cancelled_order_is_refunded(view: View) -> None:
    order = answer(view, "cancel_pending_order", order_id="#W1", reason="ordered by mistake")
    assert (order["status"], order["cancel_reason"]) == ("cancelled", "ordered by mistake")
    refund = {"transaction_type": "refund", "amount": 120.6, "payment_method_id": "gift_card_1"}
    assert order["payment_history"][1:] == [refund]
    assert balance(view) == 170.6


def test_addresses_change(view: View) -> None:
    assert answer(view, "modify_pending_order_address", order_id="#W1", **MOVED)["address"] == MOVED
    assert answer(view, "modify_user_address", user_id="una_bergh_1", **MOVED)["address"] == MOVED
    assert answer(view, "get_user_details", user_id="odd_dal_2")["address"] == ADDRESS


def test_another_payment_method_pays_and_the_first_is_refunded(view: View) -> None:
    order = answer(view, "modify_pending_order_payment", order_id="#W3", payment_method_id="gift_card_1")
    made = [(entry["transaction_type"], entry["payment_method_id"]) for entry in order["payment_history"]]
    assert made == [("payment", "credit_card_1"), ("payment", "gift_card_1"), ("refund", "credit_card_1")]
    assert (order["status"], balance(view)) == ("pending", 19.75)
    assert call(view, "modify_pending_order_payment", {"order_id": "#W3", "payment_method_id": "paypal_1"}) == (
        "Error: there should be exactly one payment for a pending order"
    )


def test_items_of_a_pending_order_change_once(view: View) -> None:
    arguments = {"order_id": "#W1", **BOTH, "payment_method_id": "gift_card_1"}
    order = answer(view, "modify_pending_order_items", **arguments)
    assert order["items"][0] == tables()["orders"]["#W3"]["items"][0]
    paid = {"transaction_type": "payment", "amount": 9.75, "payment_method_id": "gift_card_1"}
    assert (order["status"], order["payment_history"][1:]) == ("pending (item modified)", [paid])
    assert balance(view) == 40.25
    assert call(view, "modify_pending_order_items", arguments) == "Error: non-pending order cannot be modified"


def test_a_cheaper_item_is_refunded(view: View) -> None:
    arguments = {"order_id": "#W3", "item_ids": ["12"], "new_item_ids": ["11"], "payment_method_id": "gift_card_1"}
    order = answer(view, "modify_pending_order_items", **arguments)
    assert order["payment_history"][1]["transaction_type"] == "refund"
    assert balance(view) == 59.75


def test_an_exchange_is_requested(view: View) -> None:
    twice = BOTH | {"item_ids": ["11", "11"], "new_item_ids": ["14", "12"]}
    order = answer(view, "exchange_delivered_order_items", order_id="#W2", **twice)
    expected = {
        "status": "exchange requested",
        "exchange_items": ["11", "11"],
        "exchange_new_items": ["12", "14"],
        "exchange_payment_method_id": "credit_card_1",
        "exchange_price_difference": 489.25,
    }
    assert order == tables()["orders"]["#W2"] | expected


@pytest.mark.parametrize("method", ["credit_card_1", "gift_card_1"])
def test_a_return_is_requested(view: View, method: str) -> None:
    order = answer(
        view, "return_delivered_order_items", order_id="#W2", item_ids=["11", "11"], payment_method_id=method
    )
    expected = {"status": "return requested", "return_items": ["11", "11"], "return_payment_method_id": method}
    assert order == tables()["orders"]["#W2"] | expected


PENDING = {"order_id": "#W1", **BOTH}
DELIVERED = {"order_id": "#W2", **BOTH}
RETURN = {"order_id": "#W2", "item_ids": ["11"], "payment_method_id": "credit_card_1"}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("get_order_details", {"order_id": "W1"}, "order not found"),
        ("get_user_details", {"user_id": "?"}, "user not found"),
        ("get_product_details", {"product_id": "11"}, "product not found"),
        ("find_user_id_by_email", {"email": "x"}, "user not found"),
        ("find_user_id_by_name_zip", {"first_name": "Una", "last_name": "Bergh", "zip": "1"}, "user not found"),
        ("cancel_pending_order", {"order_id": "#W9", "reason": "no longer needed"}, "order not found"),
        (
            "cancel_pending_order",
            {"order_id": "#W2", "reason": "no longer needed"},
            "non-pending order cannot be cancelled",
        ),
        ("cancel_pending_order", {"order_id": "#W1", "reason": "too dear"}, "invalid reason"),
        ("modify_pending_order_address", {"order_id": "#W9", **MOVED}, "order not found"),
        ("modify_pending_order_address", {"order_id": "#W5", **MOVED}, "non-pending order cannot be modified"),
        ("modify_user_address", {"user_id": "?", **MOVED}, "user not found"),
        ("modify_pending_order_payment", {"order_id": "#W9", "payment_method_id": "paypal_1"}, "order not found"),
        (
            "modify_pending_order_payment",
            {"order_id": "#W4", "payment_method_id": "paypal_1"},
            "non-pending order cannot be modified",
        ),
        (
            "modify_pending_order_payment",
            {"order_id": "#W3", "payment_method_id": "paypal_2"},
            "payment method not found",
        ),
        (
            "modify_pending_order_payment",
            {"order_id": "#W3", "payment_method_id": "credit_card_1"},
            "the new payment method should be different from the current one",
        ),
        ("modify_pending_order_items", PENDING | {"order_id": "#W9"}, "order not found"),
        ("modify_pending_order_items", PENDING | {"order_id": "#W2"}, "non-pending order cannot be modified"),
        ("modify_pending_order_items", PENDING | {"item_ids": ["99"]}, "99 not found"),
        ("modify_pending_order_items", PENDING | {"item_ids": ["11", "11"]}, "11 not found"),
        (
            "modify_pending_order_items",
            PENDING | {"new_item_ids": []},
            "the number of items to be exchanged should match",
        ),
        ("modify_pending_order_items", PENDING | {"new_item_ids": ["13"]}, "new item 13 not found or available"),
        ("modify_pending_order_items", PENDING | {"new_item_ids": ["21"]}, "new item 21 not found or available"),
        ("modify_pending_order_items", PENDING | {"payment_method_id": "paypal_2"}, "payment method not found"),
        (
            "modify_pending_order_items",
            PENDING | {"new_item_ids": ["14"], "payment_method_id": "gift_card_1"},
            "insufficient gift card balance to pay for the new item",
        ),
        ("exchange_delivered_order_items", DELIVERED | {"order_id": "#W9"}, "order not found"),
        (
            "exchange_delivered_order_items",
            DELIVERED | {"order_id": "#W1"},
            "non-delivered order cannot be exchanged",
        ),
        ("exchange_delivered_order_items", DELIVERED | {"item_ids": ["21"]}, "21 not found"),
        (
            "exchange_delivered_order_items",
            DELIVERED | {"new_item_ids": ["12", "12"]},
            "the number of items to be exchanged should match",
        ),
        ("exchange_delivered_order_items", DELIVERED | {"new_item_ids": ["?"]}, "new item ? not found or available"),
        ("exchange_delivered_order_items", DELIVERED | {"payment_method_id": "?"}, "payment method not found"),
        (
            "exchange_delivered_order_items",
            DELIVERED | {"new_item_ids": ["14"], "payment_method_id": "gift_card_1"},
            "insufficient gift card balance to pay for the price difference",
        ),
        ("return_delivered_order_items", RETURN | {"order_id": "#W9"}, "order not found"),
        ("return_delivered_order_items", RETURN | {"order_id": "#W3"}, "non-delivered order cannot be returned"),
        ("return_delivered_order_items", RETURN | {"payment_method_id": "?"}, "payment method not found"),
        (
            "return_delivered_order_items",
            RETURN | {"payment_method_id": "paypal_1"},
            "payment method should be either the original payment method or a gift card",
        ),
        ("return_delivered_order_items", RETURN | {"item_ids": ["11", "11", "11"]}, "some item not found"),
    ],
)
def test_errors_change_nothing(view: View, name: str, arguments: dict[str, Any], error: str) -> None:
    before = view.digest()
    assert call(view, name, arguments) == f"Error: {error}"
    assert view.digest() == before


def test_a_gift_card_without_enough_balance_cannot_pay_an_order() -> None:
    shop = tables()
    shop["users"]["una_bergh_1"]["payment_methods"]["gift_card_1"]["balance"] = 30
    view = Database(shop).view()
    assert call(view, "modify_pending_order_payment", {"order_id": "#W3", "payment_method_id": "gift_card_1"}) == (
        "Error: insufficient gift card balance to pay for the order"
    )


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 2", "4.0"),
        ("(1.5 - .25) * -3", "-3.75"),
        ("7 // 2 + 2 ** 3", "11.0"),
        ("10 / 3", "3.33"),
        ("1 / 0", "Error: division by zero"),
        ("1 2", "Error: invalid syntax"),
        ("", "Error: invalid syntax"),
        ("2(3)", "Error: invalid syntax"),
        ("__import__('os')", "Error: invalid characters in expression"),
        ("1e5", "Error: invalid characters in expression"),
        ("nan", "Error: invalid characters in expression"),
        ("9" * 400, "Error: int too large to convert to float"),
        ("9 ** 9 ** 9", "Error: the number is too large"),
        ("(9 ** 999) * (9 ** 999)", "Error: the number is too large"),
        ("1" * 501, "Error: the expression is too long"),
    ],
)
def test_calculate(view: View, expression: str, result: str) -> None:
    assert call(view, "calculate", {"expression": expression}) == result


@pytest.mark.parametrize(
    "expression", ["(" * 400, "-" * 499 + "1", "(-8) ** 0.5", "...", "0 ** (-1)", "1." + "9" * 450]
)
def test_calculate_survives_odd_expressions(view: View, expression: str) -> None:
    assert isinstance(call(view, "calculate", {"expression": expression}), str)


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("value", [None, 1, float("nan"), True, {"a": 1}, [1], "x", ["x"], "\ud800", ["\ud800"]])
def test_every_tool_answers_values_of_any_type(view: View, name: str, value: object) -> None:
    before = view.digest()
    arguments = dict.fromkeys(TOOLS[name].parameters, value)
    assert isinstance(call(view, name, arguments), str)
    assert view.digest() == before


def test_wrong_argument_names_are_errors(view: View) -> None:
    assert call(view, "get_order_details", {}) == "Error: missing argument 'order_id'"
    assert call(view, "get_order_details", {"order_id": "#W1", "x": 1}) == "Error: unexpected argument 'x'"
    assert call(view, "get_order_details", {"order_id": 1}) == "Error: order_id must be a string"
    refused = call(view, "return_delivered_order_items", {**RETURN, "item_ids": "11"})
    assert refused == "Error: item_ids must be a list of strings"
    assert call(view, "drop_table", {}) == "Unknown action drop_table"
