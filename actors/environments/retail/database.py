"""The retail shop's database: loaded once, shared by all episodes, and copied record by record when one is changed.

Invariants:
- The loaded database is never changed. A view holds copies of the records that its episode changed, and no others.
- Two databases have the same digest exactly when they have the same tables, ids and records. Numbers of different
  types differ (100 and 100.0), as they do in the text that tau-bench hashes.
- The digest of a view costs as much as the records that it changed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, NotRequired, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from headrace.actors.errors import ConfigError

_LENIENT = with_config(ConfigDict(extra="allow", strict=True))
TABLES: Final = ("orders", "products", "users")
RecordT = TypeVar("RecordT", bound=Mapping[str, Any])


class Address(TypedDict):
    """Postal address."""

    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


@_LENIENT
class Item(TypedDict):
    """One bought item of an order; `price` in dollars."""

    name: str
    product_id: str
    item_id: str
    price: float
    options: dict[str, str]


class Payment(TypedDict):
    """A payment or a refund; `amount` in dollars."""

    transaction_type: str
    amount: float
    payment_method_id: str


@_LENIENT
class Order(TypedDict):
    """An order. Fields that are not required are set by the tool that changes the order's status."""

    order_id: str
    user_id: str
    address: Address
    items: list[Item]
    status: str
    payment_history: list[Payment]
    cancel_reason: NotRequired[str | None]
    return_items: NotRequired[list[str] | None]
    return_payment_method_id: NotRequired[str | None]
    exchange_items: NotRequired[list[str] | None]
    exchange_new_items: NotRequired[list[str] | None]
    exchange_payment_method_id: NotRequired[str | None]
    exchange_price_difference: NotRequired[float | None]


@_LENIENT
class PaymentMethod(TypedDict):
    """A payment method of a user. Only gift cards have a balance, in dollars."""

    source: str
    id: str
    balance: NotRequired[float]


class Name(TypedDict):
    """Name of a user."""

    first_name: str
    last_name: str


@_LENIENT
class User(TypedDict):
    """A customer."""

    name: Name
    address: Address
    email: str
    payment_methods: dict[str, PaymentMethod]
    orders: list[str]


@_LENIENT
class Variant(TypedDict):
    """A variant of a product; `price` in dollars."""

    item_id: str
    options: dict[str, str]
    available: bool
    price: float


@_LENIENT
class Product(TypedDict):
    """A type of product. `variants` is keyed by item id."""

    name: str
    product_id: str
    variants: dict[str, Variant]


class _Tables(TypedDict):
    orders: dict[str, Order]
    products: dict[str, Product]
    users: dict[str, User]


class _Table(Generic[RecordT]):
    """A loaded table, which is never changed."""

    def __init__(self, records: Mapping[str, RecordT]) -> None:
        self.records = records
        self.digests = {key: record_digest(key, records[key]) for key in sorted(records)}
        """SHA-256 of each record, by id in sorted order."""
        self.digest = _combined(self.digests.values())


class TableView(Generic[RecordT]):
    """An episode's view of a table. Records that `get` and `items` return must not be changed."""

    def __init__(self, table: _Table[RecordT]) -> None:
        self._table = table
        self._changed: dict[str, RecordT] = {}

    def get(self, key: str) -> RecordT | None:
        """Return a record to read, or None if there is none."""
        return self._changed.get(key, self._table.records.get(key))

    def items(self) -> Iterator[tuple[str, RecordT]]:
        """Yield all ids and records, in the order of the loaded table."""
        for key, record in self._table.records.items():
            yield key, self._changed.get(key, record)

    def edit(self, key: str) -> RecordT:
        """Return the episode's own copy of a record, to change it. Raises KeyError."""
        if key not in self._changed:
            self._changed[key] = deepcopy(self._table.records[key])
        return self._changed[key]

    def digest(self) -> bytes:
        """Return the SHA-256 of the table; only changed records are hashed again."""
        if not self._changed:
            return self._table.digest
        changed = {key: record_digest(key, record) for key, record in self._changed.items()}
        return _combined((self._table.digests | changed).values())


class View:
    """An episode's view of the database."""

    def __init__(self, database: Database) -> None:
        self.orders = TableView(database.orders)
        self.products = TableView(database.products)
        self.users = TableView(database.users)

    def digest(self) -> str:
        """Return the SHA-256 of the database as this episode sees it, in hexadecimal."""
        return _combined((self.orders.digest(), self.products.digest(), self.users.digest())).hex()

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return all tables as plain data."""
        tables: tuple[TableView[Any], ...] = (self.orders, self.products, self.users)
        return {name: dict(table.items()) for name, table in zip(TABLES, tables, strict=True)}


class Database:
    """The loaded database."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the tables orders, products and users. Raises ValueError if one is missing or a record has another
        form."""
        checked: Any = dict(tables)
        try:
            _adapter().validate_python(checked)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the tables'}: {first['msg']}") from error
        self.orders: _Table[Order] = _Table(checked["orders"])
        self.products: _Table[Product] = _Table(checked["products"])
        self.users: _Table[User] = _Table(checked["users"])

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load `db.json`, `db.json.gz`, or the three files `orders.json`, `products.json` and `users.json`. Raises
        ConfigError."""
        whole = next((path for path in (folder / "db.json", folder / "db.json.gz") if path.is_file()), None)
        try:
            tables = _read(whole) if whole is not None else {name: _read(folder / f"{name}.json") for name in TABLES}
            return cls(tables)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder}: {Path(str(error.filename)).name} is missing; give a folder with db.json, db.json.gz, or "
                "orders.json, products.json and users.json"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{folder}: not a retail database: {reason}; copy the data files again") from error

    def view(self) -> View:
        """Return a view for a new episode."""
        return View(self)


def record_digest(key: str, record: object) -> bytes:
    """Return the SHA-256 of a record and its id."""
    text = json.dumps([key, record], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def _combined(digests: Iterator[bytes] | Any) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


def _read(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


@cache
def _adapter() -> TypeAdapter[_Tables]:
    # Built on first use, because that takes long.
    return TypeAdapter(_Tables)
