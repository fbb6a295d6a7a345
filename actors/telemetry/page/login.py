"""The form that asks for the secret of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What a page needs, in words of the form: its name, and a sentence that says where users find it."""

    name: str
    hint: str


TOKEN: Final = Secret(
    name="token", hint="Open the URL that \u201cheadrace observe\u201d printed, or enter the token that it ends with."
)


def login_form(templates: Environment, next_path: str, secret: Secret, *, wrong: bool = False) -> str:
    """Return the form, which shows the view at `next_path` afterwards; `wrong` says that another secret was given."""
    return templates.get_template("login.html").render(next=next_path, secret=secret, wrong=wrong)


def local_path(path: object, below: str = "/") -> str:
    """Return a path `below` one of this page for a path that a form gave; the overview for anything else."""
    text = str(path)
    # Browsers take `//host` and `/\\host` for other hosts.
    harmless = text.startswith(below) and not text.startswith(("//", "/\\")) and text.isascii() and text.isprintable()
    return text if harmless else "."
