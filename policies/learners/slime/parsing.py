"""Runs slime's own parser in this process."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime import arguments


def parse(terms: arguments.SlimeTerms, *, load: Path, checkout: str) -> Namespace:
    """Return slime's arguments for the recipe, with `load` as for `arguments.flags`. Imports slime and Megatron, which
    must be importable, and reads the model's config. Raises LearnerSettingsInvalid."""
    words = arguments.command_line(terms, load=load)
    parsed, parser = run_parser(words, checkout=checkout)
    arguments.refuse_unknown(words, known_flags(parser), checkout=checkout)
    arguments.check_parsed(parsed, parser, arguments.flags(terms, load=load))
    return parsed


def run_parser(words: Sequence[str], *, checkout: str) -> tuple[Namespace, ArgumentParser]:
    """Return slime's arguments for a command line, and its main parser. Raises LearnerSettingsInvalid."""
    from slime.utils.arguments import parse_args

    parsers: list[ArgumentParser] = []

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(parser)
        parser.error = _refuse  # type: ignore[method-assign]
        return parser

    try:
        with _command_line(words), _log_handlers():
            parsed: Namespace = parse_args(keep)
    except (AssertionError, ValueError, OSError) as error:
        raise LearnerSettingsInvalid(f"{checkout} refuses learner.slime: {error}") from error
    return parsed, parsers[0]


def known_flags(parser: ArgumentParser) -> list[str]:
    """Return the names of all flags of a parser."""
    return [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001 - no public way


def _refuse(message: str) -> NoReturn:
    raise LearnerSettingsInvalid(f"learner.slime.arguments: {message}")


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Set the process's arguments, which slime reads in several places."""
    before = sys.argv
    sys.argv = ["headrace", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _log_handlers() -> Iterator[None]:
    """Keep this process's log handlers and level, which slime's parser replaces."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
