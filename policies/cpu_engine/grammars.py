"""Grammars of requests: which tokens may come next in a JSON value or a structural tag, computed by llguidance.

Invariants:
- A mask allows exactly the tokens after which the output can still be completed. A stop id is allowed only where the
  output is complete, and nothing else is allowed after that.
- JSON is written as models write it: `, ` and `: ` between items, and no other blanks, so that an output cannot go on
  in blanks forever.
- An invalid or unsupported schema is refused when the request arrives, with SGLang's words.
- Text matches no special token; for llguidance, added tokens like `<tool_call>` are special too. A tag may spell such
  tokens, which then stand for themselves.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.policies.cpu_engine.requests import SamplingParams
from headrace.policies.engine import MAX_GRAMMAR_CHARACTERS, GrammarKind
from headrace.policies.errors import RequestInvalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

MISSING: Final = (
    "Grammar-based generation (json_schema, structural_tag) is not supported by this engine: install the package "
    "llguidance (headrace[cpu])"
)
_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarState:
    """Position of one output in its grammar. `error` says why the output cannot go on; "" if it can."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._stop_ids = list(stop_ids)
        self.error = matcher.get_error()
        self.allowed_V = self._allowed()
        """Mask of the tokens that may come next."""

    def fork(self) -> GrammarState:
        """Return a state at the same position that advances on its own."""
        return GrammarState(self._matcher.deep_copy(), self._stop_ids)

    def advance(self, token: int) -> None:
        """Go on to the position after a token, which must be one of the allowed tokens and no stop id."""
        self._matcher.consume_token(token)
        self.allowed_V = self._allowed()
        self.error = self._matcher.get_error()

    def _allowed(self) -> NDArray[np.bool_]:
        allowed_V: NDArray[np.bool_] = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        # Also a stop id that the grammar takes for text ends the output, so it has to wait for the end.
        allowed_V[self._stop_ids] = self._matcher.is_accepting()
        return allowed_V


class Grammars:
    """Compiler of grammars for one tokenizer. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._special_ids: dict[str, int] = {}

    def compile_for(self, samplings: Sequence[SamplingParams]) -> list[GrammarState | None]:
        """Return a state for each sequence that has a grammar, and compile equal ones once. Raises RequestInvalid like
        `compile`."""
        compiled: dict[tuple[object, ...], GrammarState] = {}
        states: list[GrammarState | None] = []
        for sampling in samplings:
            if (named := sampling.grammar) is None:
                states.append(None)
                continue
            stop_ids = tuple(sampling.stop_token_ids or ())
            key = (*named, stop_ids)
            if key not in compiled:
                compiled[key] = self.compile(*named, stop_ids)
            states.append(compiled[key].fork())
        return states

    def compile(self, kind: GrammarKind, text: str, stop_ids: Sequence[int]) -> GrammarState:
        """Return the state before the first token of an output that ends with one of the `stop_ids` or the model's own.
        Raises RequestInvalid with the message of the 400 reply, also if llguidance is not installed."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestInvalid(MISSING) from None
        stops = [stop_id for stop_id in (*self._eos_ids, *stop_ids) if 0 <= stop_id < self._vocab_size]
        try:
            if not stops:
                raise ValueError("the model has no stop id; send stop_token_ids")
            if len(text) > MAX_GRAMMAR_CHARACTERS:
                raise ValueError(f"{len(text)} characters, but at most {MAX_GRAMMAR_CHARACTERS} are allowed")
            document, tokens = json.loads(text), self._tokens()
            lark = _Lark(self._special_ids)
            if kind is GrammarKind.JSON_SCHEMA:
                start = lark.json_value(document)
            else:
                start = lark.format_of(_member(document, "format", dict))
            matcher = LLMatcher(tokens, lark.grammar(start), log_level=0)
            state = GrammarState(matcher, stops)
            if state.error:
                # Without the place in our own text, which follows with it.
                stated = re.split(r"\n\s*\d+ \| ", state.error)[0]
                raise ValueError(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", stated))
        except (ValueError, RecursionError) as error:
            raise RequestInvalid(f"Failed to compile {kind.value} grammar: {error}") from error
        return state

    def _tokens(self) -> LLTokenizer:
        """Return the vocabulary in llguidance's form, which takes about a second for a large one."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._known is None:
                eos = self._eos_ids or None
                known = LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=eos)
                added = self._tokenizer.get_added_tokens_decoder()
                special = {token.content: number for number, token in added.items() if known.is_special_token(number)}
                self._special_ids, self._known = special, known
            return self._known


class _Lark:
    """Writer of a grammar in llguidance's Lark syntax. Methods return the name of the rule that they add, or an
    expression. Raises ValueError for what the grammar does not know."""

    def __init__(self, special_ids: dict[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def json_value(self, schema: object) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema must be an object")
        return self._rule(f"%json {json.dumps(schema | {'x-guidance': _SPELLING})}")

    def format_of(self, form: dict[str, Any]) -> str:
        """Return the expression of a part of a structural tag."""
        match form.get("type"):
            case "const_string":
                return self._literal(_member(form, "value", str))
            case "json_schema":
                if form.get("style", "json") == "qwen_xml":
                    return self._xml_parameters(_member(form, "json_schema", dict))
                return self.json_value(form.get("json_schema"))
            case "qwen_xml_parameter":
                return self._xml_parameters(_member(form, "json_schema", dict))
            case "sequence":
                return self._rule(" ".join(map(self.format_of, _members(form, "elements"))))
            case "or":
                return self._rule(" | ".join(map(self.format_of, _members(form, "elements"))))
            case "optional":
                return self._rule(f"({self.format_of(_member(form, 'content', dict))})?")
            case "tag":
                return self._tag(form)
            case "tags_with_separator":
                tag = self._rule(" | ".join(map(self._tag, _members(form, "tags"))))
                if not form.get("stop_after_first"):
                    tag = self._rule(f"{tag} ({self._literal(_member(form, 'separator', str))} {tag})*")
                return tag if form.get("at_least_one") else self._rule(f"{tag}?")
        raise ValueError(f"structural_tag: a part of type {form.get('type')!r} is not supported")

    def _tag(self, form: dict[str, Any]) -> str:
        begin, content, end = _member(form, "begin", str), _member(form, "content", dict), _member(form, "end", str)
        if content.get("type") == "any_text":
            return self._rule(f"{self._literal(begin)} {self._text_until(end)}")
        return self._rule(f"{self._literal(begin)} {self.format_of(content)} {self._literal(end)}")

    def _text_until(self, end: str) -> str:
        """Return the expression of any text up to the first occurrence of `end`, included."""
        first, *others = self._pieces(end) or [""]
        if not first:
            raise ValueError("structural_tag: any_text needs an end")
        if first in self._special_ids:
            # Text may spell the token in other tokens, and a parser takes both for the same.
            spelled = json.dumps(first, ensure_ascii=False)
            text = f"T{len(self._rules)}"
            self._rules.append(f"{text}: /(?s:.*)/ & ~(/(?s:.*)/ {spelled} /(?s:.*)/)")
            return f"{text} {self._literal(end)}"
        text = self._rule("/(?s:.*)/", f"[suffix={json.dumps(first, ensure_ascii=False)}]")
        return " ".join([text, *(self._literal(other) for other in others)])

    def _xml_parameters(self, schema: dict[str, Any]) -> str:
        """Return the expression of arguments in the form of Qwen3-Coder: an element for each property, in their order,
        with text between its tags where a string is allowed, and else JSON."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"required names {missing[0]!r}, which is not in properties")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        elements = []
        for name, given in properties.items():
            value = {} if given is True else given
            if not isinstance(value, dict):
                raise ValueError(f"properties.{name} must be an object")
            begin, end = self._literal(f"<parameter={name}>\n"), "\n</parameter>\n"
            choices = value.get("enum", [value["const"]] if "const" in value else None)
            if isinstance(choices, list) and choices:
                spelled = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
                content = f"{self._rule(' | '.join(map(self._literal, spelled)))} {self._literal(end)}"
            elif _allows_text(value):
                content = self._text_until(end)
            else:
                content = f"{self.json_value(definitions | value)} {self._literal(end)}"
            element = self._rule(f"{begin} {content}")
            elements.append(element if name in required else f"{element}?")
        return self._rule(" ".join(elements or ['""']))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        pieces = [
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece, ensure_ascii=False)
            for piece in self._pieces(text)
        ]
        return " ".join(pieces or ['""'])

    def _pieces(self, text: str) -> list[str]:
        """Return the text cut at its special tokens."""
        if not self._special_ids:
            return [text] if text else []
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if piece]


def _allows_text(schema: dict[str, Any]) -> bool:
    """Return whether a value of this schema is spelled as text: it may be a string, or its type is not given."""
    types = schema.get("type")
    if isinstance(types, str):
        return types == "string"
    if isinstance(types, list):
        return "string" in types
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key) or () if isinstance(part, dict)]
    return any(map(_allows_text, parts)) if parts else "$ref" not in schema


def _member(form: object, name: str, kind: type) -> Any:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"structural_tag: {name} must be a {kind.__name__}")
    return value


def _members(form: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    parts = _member(form, name, list)
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"structural_tag: {name} must be a list of at least one object")
    return iter(parts)
