"""The dialect of OpenAI's Chat Completions: `POST /v1/chat/completions`.

Invariants:
- Reasoning is sent as `reasoning_content`, which agents echo; this API has no field for a signature.
- Consecutive messages with the role `tool` answer one turn and become one message.
- A request with the older `functions` in place of `tools` is answered with `function_call`, which holds one call
  without an id: of several sampled calls the agent gets the first.
- A text part of a message may say `"headrace_kind": "warning"` (docs/gateway.md). The parts of such a
  content are joined as they are. Whether the mark counts is up to the session: only agents of ours may set it.
- A request may ask for the sampled tokens: for OpenAI's `logprobs`, and for vLLM's `prompt_token_ids` and `token_ids`
  (`return_token_ids`). They are those of the row, and so are in no place where an agent must echo them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from headrace.serve.gateway.conversation import (
    AnswerTokens,
    AnswerWithTokens,
    Block,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    TurnAnswer,
    TurnEnd,
    TurnRequest,
    WarningText,
    say,
)
from headrace.serve.gateway.dialects import constraints, fields, openai
from headrace.serve.gateway.dialects.dialect import TokenFields, WireRequest
from headrace.serve.gateway.dialects.fields import JsonObject
from headrace.serve.gateway.errors import BadRequest, WireError

COMPLETION_PREFIX: Final = "chatcmpl-"
"""Beginning of a completion's id; the id of its turn follows."""
KIND: Final = "headrace_kind"
"""Field of a text part that says what its text is."""
WARNING: Final = "warning"
MAX_SAMPLES: Final = 16
"""Largest number of answers to one request; each is a turn of the session."""

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM, "function": Role.TOOL}
_FINISH_REASONS = {
    TurnEnd.STOP: "stop",
    TurnEnd.STOP_STRING: "stop",
    TurnEnd.CALLS: "tool_calls",
    TurnEnd.LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """Request for the tokens of a conversation, which end with the opening of the policy's turn if `opens_turn`, or
    (with `turn` None) for those of a plain text."""

    turn: TurnRequest | None = None
    opens_turn: bool = True
    prompt: str = ""


class ChatCompletions:
    """Dialect of `POST /v1/chat/completions`."""

    @property
    def ping(self) -> bytes:
        return openai.COMMENT

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        document = fields.read_request(body, "messages")
        model, options = fields.string(document, "model"), document.get("stream_options")
        continues = fields.boolean(document, "continue_final_message")
        if options is not None:
            options = fields.as_object(options, "stream_options").get("include_usage")
        tools = _KNOWN_TOOLS.of(document.get("tools"))
        choice = constraints.openai_choice(document.get("tool_choice"), tools, _function_name)
        if legacy := not tools and bool(document.get("functions")):
            tools = _KNOWN_FUNCTIONS.of(document["functions"])
            choice = constraints.openai_choice(
                document.get("function_call"),
                tools,
                lambda named, where: fields.string(named, "name", where),
                "function_call",
            )
        form = constraints.text_format(document.get("response_format"), "response_format", nested="json_schema")
        turn = TurnRequest(
            messages=_messages(document, continues=continues),
            tools=tools,
            calls_allowed=choice.allowed,
            constraint=choice.forced or form,
            max_tokens=fields.max_tokens(document, "max_completion_tokens", "max_tokens"),
            stop=fields.stop_strings(document, "stop"),
            keeps_stop=fields.boolean(document, "include_stop_str_in_output"),
            separates_reasoning=_separates_reasoning(document),
            continues=continues,
            model=model,
            sampling=fields.sampling_digest(document),
            client=fields.client(headers),
            keeps_order=False,
        )
        if continues and turn.constraint is not None:
            field = turn.constraint.field
            raise BadRequest(f"continue_final_message: a message that is continued cannot honour {field}.", field)
        return WireRequest(
            turn=turn,
            stream=fields.boolean(document, "stream"),
            model=model or fields.DEFAULT_MODEL,
            include_usage=options is True,
            samples=_samples(document),
            token_fields=fields.token_fields(document),
            legacy_calls=legacy,
        )

    def parse_tokenize(self, body: bytes, headers: Mapping[str, str]) -> TokenizeRequest:
        """Parse the body of vLLM's `POST /tokenize`. Raises BadRequest."""
        document = fields.read_request(body, "messages")
        if document.get("messages") is None and document.get("prompt") is not None:
            return TokenizeRequest(prompt=fields.string(document, "prompt"))
        continues = fields.boolean(document, "continue_final_message")
        opens_turn = document.get("add_generation_prompt") is None or fields.boolean(document, "add_generation_prompt")
        turn = TurnRequest(
            messages=_messages(document, continues=continues, may_end=True),
            tools=_KNOWN_TOOLS.of(document.get("tools")),
            continues=continues,
        )
        return TokenizeRequest(turn=turn, opens_turn=opens_turn or continues)

    def tokenized(self, ids: Sequence[int], max_tokens: int) -> dict[str, object]:
        """Return the response to `POST /tokenize`; `max_tokens` is the session's context length."""
        return {"count": len(ids), "max_model_len": max_tokens, "tokens": list(ids)}

    def answer(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> dict[str, object]:
        turns = (turn, *others)
        choices = [_choice(request, each, index) for index, each in enumerate(turns)]
        whole = _head(request, turn, "chat.completion", created_s) | {"choices": choices, "usage": _usage(turns)}
        return whole | _prompt_ids(turn, request.token_fields)

    def stream(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> bytes:
        head = _head(request, turn, "chat.completion.chunk", created_s)
        if request.include_usage:
            head["usage"] = None
        turns = (turn, *others)
        parts = [part for index, each in enumerate(turns) for part in _chunks(request, head, each, index)]
        if request.include_usage:
            parts.append(openai.data(head | {"choices": [], "usage": _usage(turns)}))
        return b"".join([*parts, openai.DONE])

    def status(self, failure: WireError) -> int:
        return openai.status(failure)

    def error(self, failure: WireError) -> dict[str, object]:
        return openai.error(failure)

    def refuses_in_stream(self, failure: WireError) -> bool:
        return False

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        return openai.data(openai.error(failure))

    def models(self, created_s: int) -> dict[str, object]:
        return openai.models(created_s)

    def model(self, name: str, created_s: int) -> dict[str, object]:
        return openai.model(name, created_s)


def _separates_reasoning(document: JsonObject) -> bool:
    """Return SGLang's field `separate_reasoning`, which is true by default."""
    if document.get("separate_reasoning") is None or fields.boolean(document, "separate_reasoning"):
        return True
    if document.get("tools"):
        raise BadRequest(
            "separate_reasoning: false returns the sampled text as it is, so that calls are not parsed; send no tools.",
            "separate_reasoning",
        )
    return False


def _messages(document: JsonObject, *, continues: bool, may_end: bool = False) -> tuple[Message, ...]:
    """Return the messages. With `continues`, the last one is the assistant's and open; with `may_end`, it may be the
    assistant's otherwise too."""
    messages = fields.checked(_conversation(document), "messages", prefill=continues or may_end)
    if not continues:
        return messages
    name, last = "continue_final_message", messages[-1]
    if document.get("add_generation_prompt") is True:
        raise BadRequest(f"{name} and add_generation_prompt cannot both be true.", name)
    if last.role is not Role.ASSISTANT:
        raise BadRequest(f"{name}: the last message must be the assistant's.", name)
    if last.calls:
        raise BadRequest(f"{name}: a message with tool calls has ended, so it cannot be continued.", name)
    if len(messages) > 1 and messages[-2].role is Role.ASSISTANT:
        raise BadRequest(f"{name}: join the assistant's last two messages into one.", name)
    return messages


def _conversation(document: JsonObject) -> Iterator[Message]:
    for index, entry in enumerate(fields.as_list(document.get("messages"), "messages")):
        where = f"messages[{index}]"
        message = fields.as_object(entry, where)
        name = message.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise BadRequest(f"{where}.role must be one of {', '.join(sorted(_ROLES))}.", f"{where}.role")
        content = message.get("content")
        if role is Role.ASSISTANT:
            yield Message(role, tuple(_assistant(message, where)))
        elif role is Role.TOOL:
            call_id = fields.string(message, "tool_call_id", where)
            if said := _said_with_kinds(content, f"{where}.content"):
                yield Message(role, (ToolResult(call_id, "".join(text.text for text in said), _warnings(said)),))
            else:
                yield Message(role, (ToolResult(call_id, fields.result_text(content, f"{where}.content")),))
        elif role is Role.USER:
            said = _said_with_kinds(content, f"{where}.content")
            yield Message(role, said or fields.texts(content, f"{where}.content"))
        elif text := fields.joined(content, f"{where}.content", "\n\n"):
            yield say(role, text)


def _said_with_kinds(content: object, where: str) -> tuple[Text, ...]:
    """Return the texts of a content whose parts say their kinds; none if no part does."""
    if not isinstance(content, list) or not any(isinstance(part, dict) and KIND in part for part in content):
        return ()
    said: list[Text] = []
    for index, entry in enumerate(content):
        part = fields.as_object(entry, f"{where}[{index}]")
        if text := fields.part_text(part, f"{where}[{index}]"):
            said.append(WarningText(text) if part.get(KIND) == WARNING else Text(text))
    return tuple(said)


def _warnings(said: Sequence[Text]) -> tuple[tuple[int, int], ...]:
    """Return the characters `[start, end)` of each warning in the joined texts."""
    ends = list(accumulate(len(text.text) for text in said))
    spans = zip([0, *ends], ends, strict=False)
    return tuple(span for span, text in zip(spans, said, strict=True) if isinstance(text, WarningText))


def _assistant(message: JsonObject, where: str) -> Iterator[Block]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning and isinstance(reasoning, str):
        yield Reasoning(reasoning)
    content = message.get("content")
    yield from _said_with_kinds(content, f"{where}.content") or fields.texts(content, f"{where}.content")
    for index, entry in enumerate(fields.as_list(message.get("tool_calls"), f"{where}.tool_calls")):
        path = f"{where}.tool_calls[{index}]"
        call = fields.as_object(entry, path)
        if call.get("type") not in (None, "function"):
            continue
        function = fields.as_object(call.get("function"), f"{path}.function")
        yield _function_call(function, f"{path}.function", fields.string(call, "id", path))

    if (given := message.get("function_call")) is not None:
        yield _function_call(fields.as_object(given, f"{where}.function_call"), f"{where}.function_call")


def _function_call(function: JsonObject, where: str, call_id: str = "") -> ToolCall:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else fields.json_text(arguments, f"{where}.arguments")
    return ToolCall(call_id, fields.string(function, "name", where), arguments)


def _tools(value: object) -> tuple[ToolSpec, ...]:
    specs = []
    for index, entry in enumerate(fields.as_list(value, "tools")):
        tool = fields.as_object(entry, f"tools[{index}]")
        if tool.get("type") not in (None, "function"):
            continue
        specs.append(_spec(tool.get("function"), f"tools[{index}].function"))
    return tuple(specs)


def _spec(value: object, where: str) -> ToolSpec:
    function = fields.as_object(value, where)
    parameters = fields.tool_parameters(function.get("parameters"), f"{where}.parameters")
    return ToolSpec(fields.tool_name(function, where), fields.string(function, "description", where), parameters)


_KNOWN_TOOLS = fields.KnownTools(_tools)
_KNOWN_FUNCTIONS = fields.KnownTools(
    lambda value: tuple(
        _spec(entry, f"functions[{index}]") for index, entry in enumerate(fields.as_list(value, "functions"))
    )
)


def _function_name(choice: JsonObject, where: str) -> str:
    """Return the name of a chosen tool."""
    return fields.string(fields.as_object(choice.get("function"), f"{where}.function"), "name", f"{where}.function")


def _head(request: WireRequest, turn: TurnAnswer, kind: str, created_s: int) -> dict[str, object]:
    return {"id": f"{COMPLETION_PREFIX}{turn.turn_id}", "object": kind, "created": created_s, "model": request.model}


def _usage(turns: Sequence[TurnAnswer]) -> dict[str, object]:
    """Return the usage of all samples of a request, whose prompt counts once, as in OpenAI's API."""
    prompt, completion = turns[0].prompt_tokens, sum(turn.completion_tokens for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": turns[0].cached_tokens},
    }


def _choice(request: WireRequest, turn: TurnAnswer, index: int) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": _content(turn), "refusal": None}
    if calls := [_call(call) for call in turn.calls]:
        message |= {"function_call": calls[0]["function"]} if request.legacy_calls else {"tool_calls": calls}
    if reasoning := [block.text for block in turn.blocks if isinstance(block, Reasoning)]:
        message["reasoning_content"] = "\n".join(reasoning)
    whole = {"index": index, "message": message, "logprobs": None} | _token_fields(turn, request.token_fields)
    return whole | _end(turn, legacy=request.legacy_calls)


def _chunks(request: WireRequest, head: Mapping[str, object], turn: TurnAnswer, index: int) -> Iterator[bytes]:
    """Yield the events of one choice. Its tokens are in that of its first block, which need not be the one that they
    spell: clients join them, as they join the texts."""
    asked, legacy = request.token_fields, request.legacy_calls
    first = {"role": "assistant", "content": None if _content(turn) is None else ""}
    yield _chunk({**head, **_prompt_ids(turn, asked)}, first, index)
    calls, separator, tokens = 0, "", _token_fields(turn, asked)
    for block in turn.blocks:
        if isinstance(block, Reasoning):
            # Clients join the deltas, which must give the same text as the answer that is not streamed.
            delta: dict[str, object] = {"reasoning_content": separator + block.text}
            separator = "\n"
        elif isinstance(block, ToolCall):
            call = _call(block)
            calls += 1
            if legacy and calls > 1:
                continue
            delta = {"function_call": call["function"]} if legacy else {"tool_calls": [{"index": calls - 1} | call]}
        else:
            delta = {"content": block.text}
        yield _chunk(head, delta, index, tokens)
        tokens = {}
    yield _chunk(head, {}, index, tokens | _end(turn, legacy=legacy))


def _tokens_of(turn: TurnAnswer) -> AnswerTokens | None:
    return turn.tokens if isinstance(turn, AnswerWithTokens) else None


def _prompt_ids(turn: TurnAnswer, asked: TokenFields) -> dict[str, object]:
    """Return vLLM's field for the ids of the prompt, if it is asked for; it is null if nothing was sampled."""
    if not asked.ids:
        return {}
    tokens = _tokens_of(turn)
    return {"prompt_token_ids": tokens and list(tokens.prompt_ids)}


def _token_fields(turn: TurnAnswer, asked: TokenFields) -> dict[str, object]:
    """Return the fields of a choice for its sampled tokens that are asked for; they are null if nothing was sampled."""
    tokens, found = _tokens_of(turn), dict[str, object]()
    if asked.ids:
        found["token_ids"] = tokens and list(tokens.ids)
    if asked.logprobs and tokens is not None:
        content = [
            {
                "token": f"token_id:{token_id}" if asked.names_ids else piece.decode(errors="replace"),
                "logprob": logprob,
                "bytes": list(piece),
                "top_logprobs": [],
            }
            for token_id, logprob, piece in zip(tokens.ids, tokens.logprobs, tokens.pieces, strict=True)
        ]
        found["logprobs"] = {"content": content, "refusal": None}
    return found


def _samples(document: JsonObject) -> int:
    number = document.get("n")
    if number is None:
        return 1
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_SAMPLES:
        raise BadRequest(f"n must be a whole number from 1 to {MAX_SAMPLES}.", "n")
    return number


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _content(turn: TurnAnswer) -> str | None:
    """Return the text, or None if there are only calls, as in OpenAI's API."""
    only_calls = not turn.text and bool(turn.calls)
    return None if only_calls else turn.text


def _end(turn: TurnAnswer, *, legacy: bool) -> dict[str, object]:
    """Return the fields of a choice that tell how it ended; `stop_reason` is vLLM's."""
    reason = "function_call" if legacy and turn.end is TurnEnd.CALLS else _FINISH_REASONS[turn.end]
    return {"finish_reason": reason, "stop_reason": turn.stop_string or None}


def _chunk(
    head: Mapping[str, object], delta: Mapping[str, object], index: int, more: Mapping[str, object] | None = None
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | dict(more or {})
    return openai.data({**head, "choices": [choice]})
