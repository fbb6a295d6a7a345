"""The digest of the retail database: equal exactly for equal databases, and the same however a state was reached."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.environments.retail.database import Database
from headrace.actors.environments.retail.tools import TOOLS, call
from support.retail_shop import tables

LEAVES = st.one_of(st.text(max_size=3), st.booleans(), st.none(), st.integers(-2, 2), st.sampled_from([0.0, 1.0, 0.5]))
CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(TOOLS)),
        st.fixed_dictionaries(
            {},
            optional={
                "order_id": st.sampled_from(["#W1", "#W2", "#W3", "#W4"]),
                "user_id": st.sampled_from(["una_bergh_1", "odd_dal_2"]),
                "reason": st.just("no longer needed"),
                "payment_method_id": st.sampled_from(["gift_card_1", "credit_card_1", "paypal_1"]),
                "item_ids": st.lists(st.sampled_from(["11", "12", "21"]), max_size=2),
                "new_item_ids": st.lists(st.sampled_from(["11", "12", "14", "21"]), max_size=2),
            },
        ),
    ),
    max_size=6,
)


def only_known(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "1")
    return {key: value for key, value in (address | arguments).items() if key in TOOLS[name].parameters}


def same(first: Any, second: Any) -> bool:
    """Compare plain data; numbers of different types differ."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@st.composite
def changed_tables(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Return the shop with an additional field in one record, and perhaps without another record."""
    shop = tables()
    table = draw(st.sampled_from(sorted(shop)))
    key = draw(st.sampled_from(sorted(shop[table])))
    shop[table][key]["note"] = draw(st.recursive(LEAVES, lambda part: st.lists(part, max_size=2), max_leaves=3))
    if draw(st.booleans()):
        shop["orders"].pop(draw(st.sampled_from(sorted(shop["orders"]))))
    return shop


@given(first=changed_tables(), second=changed_tables())
def test_digests_are_equal_exactly_for_equal_databases(first: Any, second: Any) -> None:
    equal = Database(first).view().digest() == Database(second).view().digest()
    assert equal == same(first, second)


@given(shop=changed_tables())
def test_the_order_of_keys_does_not_matter(shop: Any) -> None:
    turned = {name: dict(reversed(table.items())) for name, table in reversed(shop.items())}
    assert Database(turned).view().digest() == Database(shop).view().digest()


@settings(max_examples=60)
@given(calls=CALLS)
def test_the_incremental_digest_is_that_of_the_changed_database(calls: list[tuple[str, dict[str, Any]]]) -> None:
    database = Database(tables())
    view, other = database.view(), database.view()
    start = other.digest()
    for name, arguments in calls:
        call(view, name, only_known(name, arguments))
    whole = json.loads(json.dumps(view.to_json()))
    assert view.digest() == Database(deepcopy(whole)).view().digest()
    assert (view.digest() == start) == same(whole, tables())
    # The other episode and the shared records are untouched.
    assert other.digest() == start == Database(other.to_json()).view().digest()
    assert same(other.to_json(), tables())
