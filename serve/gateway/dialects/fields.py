"""Readers for the fields that the dialects have in common: JSON, headers, content parts and limits.

Invariants:
- The only exception raised is BadRequest; its `field` is the path of the invalid field, as in `messages[3].content`.
- null, "" and a missing field mean the same. Unknown fields, part types and tool types are ignored.
- Every returned string can be encoded as UTF-8, and every returned value can be written as JSON again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

import orjson

from headrace.policies.tokens.pieces import BoundedCache
from headrace.serve.gateway.conversation import Message, Role, Text
from headrace.serve.gateway.dialects.dialect import TokenFields
from headrace.serve.gateway.errors import BadRequest

Parsed = TypeVar("Parsed")
JsonObject: TypeAlias = "dict[str, Any]"

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_AGENT_CHARACTERS = 256
MAX_CLIENT_CHARACTERS = 256
DEFAULT_MODEL = "policy"
MAX_MESSAGES = 4096
MAX_PARTS = 16_384
MAX_CALLS = 4096
MAX_TOOLS = 1024
"""Most messages (or input items), content parts, calls and tools of one request: far more than any agent sends. Each
costs some microseconds before the length of the whole is known to fit, in which no other session is served."""
SPARE_LEVELS = 32
"""Levels of nesting reserved for the document that a value from a body becomes part of; orjson writes at most 254
levels."""
_KNOWN_TOOLS_BYTES = 32 * 2**20
_PARSED_SIZE = 8
"""Upper bound for the number of bytes that one byte of JSON occupies as Python objects."""

MEDIA_LEFT_OUT = "[not shown: this model reads text only]"
NO_MEDIA = "This model reads text only: no images, audio, video or files."
_MEDIA = frozenset(
    (
        "image",
        "image_url",
        "input_image",
        "audio",
        "input_audio",
        "video",
        "video_url",
        "document",
        "file",
        "input_file",
    )
)
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
_TEXT = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text"))


def read_body(body: bytes) -> JsonObject:
    """Return the body as a JSON object. Raises BadRequest for an invalid body, which includes NaN, lone surrogates and
    more than 1024 levels, all of which orjson refuses."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.")
    return document


def read_request(body: bytes, messages: str) -> JsonObject:
    """Return the body of a request whose messages are the field `messages`. Raises BadRequest like `read_body`, and for
    more messages, parts, calls or tools than the caps allow, before any of them is read."""
    document = read_body(body)
    entries = document.get(messages)
    _check_number(_length(entries), MAX_MESSAGES, messages)
    parts, calls = _parts(document.get("system"), 0, "system"), 0
    for entry in entries if isinstance(entries, list) else ():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if name == "tool_calls":
                calls += _length(value)
                _check_number(calls, MAX_CALLS, "tool_calls")
            else:
                parts = _parts(value, parts, messages)
    tools = document.get("tools")
    number = _length(tools)
    _check_number(number, MAX_TOOLS, "tools")
    _check_number(_length(document.get("functions")), MAX_TOOLS, "functions")
    for tool in tools if isinstance(tools, list) else ():
        # A namespace has tools of its own.
        number += _length(tool.get("tools")) if isinstance(tool, dict) else 0
        _check_number(number, MAX_TOOLS, "tools")
    return document


def _parts(value: object, before: int, messages: str) -> int:
    """Return the number of parts, with the `before` earlier ones: those of a content, and those of results in it."""
    number = before + _length(value)
    _check_number(number, MAX_PARTS, f"parts of {messages}")
    for part in value if isinstance(value, list) else ():
        if isinstance(part, dict):
            number += _length(part.get("content"))
            _check_number(number, MAX_PARTS, f"parts of {messages}")
    return number


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _check_number(number: int, most: int, what: str) -> None:
    if number > most:
        raise BadRequest(f"{what}: a request may have at most {most}, and this one has more.", what.rpartition(" ")[2])


def as_object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object.", where)
    return value


def as_list(value: object, where: str) -> list[Any]:
    """Return the value if it is a list, and an empty list for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list.", where)
    return value


def string(document: JsonObject, name: str, where: str = "") -> str:
    """Return a string field of the object at the path `where`; "" if it is missing."""
    value = document.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        path = f"{where}.{name}" if where else name
        raise BadRequest(f"{path} must be a string.", path)
    return value


def boolean(document: JsonObject, name: str) -> bool:
    value = document.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.", name)
    return value


def max_tokens(document: JsonObject, *names: str) -> int | None:
    """Return the value of the first of these fields that is present."""
    for name in names:
        value = document.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1.", name)
        return value
    return None


def stop_strings(document: JsonObject, name: str) -> tuple[str, ...]:
    value = document.get(name)
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"{name} must be a string or a list of at most {MAX_STOP_STRINGS} strings.", name)
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in strings):
        raise BadRequest(f"{name}: a stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", name)
    return tuple(strings)


def sampling_digest(document: JsonObject) -> str:
    """Return a digest of a request's sampling parameters; "" if it has none."""
    given = {name: document[name] for name in _SAMPLING if document.get(name) is not None}
    if not given:
        return ""
    return blake2b(json_text(given, "sampling parameters").encode(), digest_size=8).hexdigest()


def token_fields(document: JsonObject) -> TokenFields:
    """Return what a request asks to be told of the sampled tokens. Raises BadRequest for alternatives to them, which
    are not recorded."""
    asked = TokenFields(
        logprobs=boolean(document, "logprobs"),
        ids=boolean(document, "return_token_ids"),
        names_ids=boolean(document, "return_tokens_as_token_ids"),
    )
    if asked.logprobs and document.get("top_logprobs") not in (None, 0):
        raise BadRequest("top_logprobs must be 0: only the sampled tokens have log-probabilities here.", "top_logprobs")
    return asked


def json_text(value: object, where: str) -> str:
    """Return the value as compact JSON."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # too many levels
        raise BadRequest(f"{where} is nested too deeply.", where) from None


def check_depth(value: object, where: str) -> None:
    """Raise BadRequest if a value is nested too deeply to become part of another document."""
    for _ in range(SPARE_LEVELS):
        value = [value]
    json_text(value, where)


class KnownTools(Generic[Parsed]):
    """Cache of parsed tool descriptions: an agent sends the same ones with every request, and thousands of agents send
    them at once. The result of `parse` must not be changed; its errors are not cached."""

    def __init__(self, parse: Callable[[object], Parsed]) -> None:
        self._parse = parse
        self._known: BoundedCache[bytes, Parsed] = BoundedCache(_KNOWN_TOOLS_BYTES)

    def of(self, value: object) -> Parsed:
        """Return the parsed `tools` of a request."""
        try:
            spelled = orjson.dumps(value)
        except TypeError:  # too many levels
            return self._parse(value)
        key = blake2b(spelled, digest_size=16).digest()
        if (known := self._known.get(key)) is None:
            known = self._parse(value)
            self._known.put(key, known, _PARSED_SIZE * len(spelled))
        return known


def tool_name(tool: JsonObject, where: str) -> str:
    name = string(tool, "name", where)
    if not name:
        raise BadRequest(f"{where}.name must be the name of the tool.", f"{where}.name")
    return name


def tool_parameters(value: object, where: str) -> JsonObject:
    """Return a tool's JSON schema; a tool without a schema has no arguments."""
    if value is None:
        return {"type": "object", "properties": {}}
    schema = as_object(value, where)
    check_depth(schema, where)
    return schema


def part_text(part: JsonObject, where: str) -> str:
    """Return the text of a content part; "" for an unknown type. Raises BadRequest for media."""
    kind = string(part, "type", where)
    if kind in _MEDIA:
        raise BadRequest(f"{where}: {NO_MEDIA}", where)
    if kind == "refusal":
        return string(part, "refusal", where)
    if kind in _TEXT:
        return string(part, "text", where)
    text = part.get("text")
    return text if isinstance(text, str) else ""


def texts(content: object, where: str) -> tuple[Text, ...]:
    """Return the non-empty text blocks of a content that is a string or a list of parts."""
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (Text(content),)
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of parts.", where)
    found = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        if text := part_text(as_object(part, path), path):
            found.append(Text(text))
    return tuple(found)


def result_text(content: object, where: str) -> str:
    """Return a tool's result as one string."""
    if not isinstance(content, list):
        return joined(content, where)
    shown = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        # An image that the policy requested cannot be shown to it; a note is milder than ending the agent.
        is_media = isinstance(kind, str) and kind in _MEDIA
        shown.append({"type": "text", "text": MEDIA_LEFT_OUT} if is_media else part)
    return joined(shown, where)


def joined(content: object, where: str, separator: str = "\n") -> str:
    """Return the `texts` of a content, joined into one string."""
    return separator.join(block.text for block in texts(content, where))


def checked(messages: Iterable[Message], where: str, *, prefill: bool = False) -> tuple[Message, ...]:
    """Return the whole conversation, with consecutive tool results in one message. Raises BadRequest if it is empty or,
    unless `prefill` is true, if it ends with an assistant message."""
    whole: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        if role is Role.TOOL:
            whole.append(Message(role, tuple(block for message in run for block in message.blocks)))
        else:
            whole.extend(run)
    if not whole:
        raise BadRequest(f"{where} must contain at least one message.", where)
    if whole[-1].role is Role.ASSISTANT and not prefill:
        raise BadRequest("The last message must not be the assistant's: an answer cannot be prefilled.", where)
    return tuple(whole)


def client(headers: Mapping[str, str]) -> str:
    """Return the name and version of the program that sends a request, by its User-Agent."""
    return header(headers, "user-agent")[:MAX_CLIENT_CHARACTERS]


def header(headers: Mapping[str, str], name: str) -> str:
    """Return a header by its lower-case name from a mapping whose keys may have any case; "" if it is missing."""
    value = headers.get(name)
    if value is None:
        value = next((other for key, other in headers.items() if key.lower() == name), "")
    # Servers return bytes that are not valid UTF-8 as surrogates, which cannot be encoded later.
    return value.encode("utf-8", "replace").decode()
