"""Command lines of `sudo`, as far as a sandbox can serve them (sudo(8)).

Invariants: pure. An option that would change what runs is served or refused by name; those about passwords have no
effect, because nobody is asked for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_KEPT: Final = frozenset(("TERM", "COLORTERM", "LANG", "LANGUAGE", "TZ", "DISPLAY"))
"""Variables of the caller that the command gets without `-E`."""
_OPTIONS: Final = {
    "A": "askpass",
    "b": "background",
    "D": "chdir",
    "E": "preserve-env",
    "e": "edit",
    "g": "group",
    "H": "set-home",
    "h": "help",
    "i": "login",
    "K": "remove-timestamp",
    "k": "reset-timestamp",
    "l": "list",
    "n": "non-interactive",
    "P": "preserve-groups",
    "p": "prompt",
    "S": "stdin",
    "s": "shell",
    "T": "command-timeout",
    "u": "user",
    "V": "version",
    "v": "validate",
}
"""Options of sudo(8) by their letter."""
_WITH_VALUE: Final = frozenset("DgpTu")
_UNSUPPORTED: Final = "begT"
_INFORMING: Final = {
    "h": "",
    "V": "sudo of a headrace sandbox",
    "l": "(ALL : ALL) NOPASSWD: ALL",
    "v": "",
    "k": "",
    "K": "",
}
"""Options that need no command, and what they print."""
_USAGE: Final = "usage: sudo [-EHins] [-u user] [-D folder] [VARIABLE=value] command"


class SudoRefused(Exception):
    """The command is not run; the message is the reason."""


class SudoOrder(NamedTuple):
    """A parsed command line. `kept` names the caller's variables to keep, or is None for all of them."""

    command: list[str]
    user: str
    folder: str | None
    kept: frozenset[str] | None
    env: dict[str, str]


def parse_sudo(arguments: Sequence[str]) -> SudoOrder:
    """Parse the arguments of sudo (sudo(8)). Raises SudoRefused."""
    given, rest = parse_options(arguments)
    for letter in _UNSUPPORTED:
        if letter in given:
            raise SudoRefused(f"-{letter} (--{_OPTIONS[letter]}) is not supported in this sandbox; {_USAGE}")
    env: dict[str, str] = {}
    while rest and "=" in rest[0].lstrip("=") and not rest[0].startswith("/"):
        name, _, value = rest.pop(0).partition("=")
        env[name] = value
    informing = next((letter for letter in _INFORMING if letter in given), "")
    if rest:
        pass
    elif informing:
        text = _USAGE if informing == "h" else _INFORMING[informing]
        rest = ["/bin/bash", "-c", 'test -z "$1" || echo "$1"', "sudo", text]
    elif "i" not in given and "s" not in given:
        raise SudoRefused(_USAGE)
    if "i" in given or "s" in given:
        rest = ["/bin/bash", *(["-l"] if "i" in given else []), *(["-c", 'exec "$@"', "sudo", *rest] if rest else [])]
    if "i" in given:
        rest = ["/bin/bash", "-c", 'cd; exec "$@"', "sudo", *rest]
    kept = _KEPT | frozenset(given.get("E", "").split(","))
    return SudoOrder(
        command=rest,
        user=given.get("u", "root").removeprefix("#"),
        folder=given.get("D"),
        kept=None if given.get("E") == "" else kept,
        env=env,
    )


def parse_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by their letter, with their values, and the words after them. Raises SudoRefused."""
    letters = {name: letter for letter, name in _OPTIONS.items()}
    given: dict[str, str] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            letter, more = letters.get(name, "-"), ""
        else:
            equals, value, letter, more = "", "", word[1], word[2:]
        while letter:
            if letter not in _OPTIONS:
                break
            if letter in _WITH_VALUE and not equals:
                if not more and not words:
                    raise SudoRefused(f"{word} needs a value; {_USAGE}")
                value, more = (more or words.pop(0)), ""
            given[letter] = value
            letter, more = more[:1], more[1:]
        else:
            continue
        raise SudoRefused(f"unknown option {word}; {_USAGE}")
    return given, words
