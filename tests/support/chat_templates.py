"""Model directories in the shapes of well-known families: small tokenizers of our own, and chat templates of our own
wording with the structure that matters: what closes a turn, what is rewritten, how tools and results are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = """The agent reads the file, runs the command and writes what it found. Then it tells the user that all is well.
def total(count: int) -> int:
    return count * 3

{"type": "function", "function": {"name": "bash", "description": "Run a command in the shell", "parameters": {}}}
<tool_response>
drwxr-xr-x 2 root root 4096 calc.py test.py README.md
</tool_response>
AssertionError: expected 12, found 15 in line 7; see the log, please. Ünïcödé und 漢字 are text too.
"""


def byte_level(words: str | None, *, normalized: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer; `words` is the pattern of its words (None: GPT-2's)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if normalized else None
    if words is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


def deepseek_words() -> Tokenizer:
    tokenizer = byte_level(QWEN_WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[一-龥]+"), "isolated"),
            pre_tokenizers.Split(
                Regex(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Blanks become a letter and the very beginning gets one: neither lines nor added tokens isolate text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """`plain` tokens are added without the flag `special`. `spell` writes a turn as the policy would sample it, without
    its end; None where the template shows a turn otherwise than it was sampled. `end_of_turn` and, with calls,
    `end_of_calls` are how the policy ends it, where it is not `eos`."""

    name: str
    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    eos: str
    stops: tuple[str, ...]
    bos: str | None = None
    tokenizer: Callable[[], Tokenizer] = field(default=lambda: byte_level(QWEN_WORDS, normalized=True))
    spell: Callable[[Message], str] | None = None
    end_of_turn: str = ""
    end_of_calls: str = ""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in self.plain])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos, "bos_token": self.bos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(self.template)
        stops = [tokenizer.token_to_id(stop) for stop in self.stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return folder


def _text(message: Message) -> str:
    return "".join(block.text for block in message.blocks if isinstance(block, Text))


def _json(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: json.loads(call.arguments)}, ensure_ascii=False)


_IM_TOOLS = """<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}DEFAULT{% endif %}


# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
Call one as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
"""
_IM_RESULT = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
"""
_IM_CALLS = """
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or said %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""

QWEN3_TEMPLATE = (
    "{%- if tools %}\n"
    + _IM_TOOLS.replace("DEFAULT", "")
    + """{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set said, thought = message.content, message.reasoning_content or '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (loop.last or thought) %}{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' }}{% set said = said.lstrip('\\n') %}{% endif %}
{{- said }}
"""
    + _IM_CALLS
    + _IM_RESULT
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)
QWEN25_TEMPLATE = (
    "{%- if tools %}\n"
    + _IM_TOOLS.replace("DEFAULT", "You are helpful.")
    + """{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set said = message.content %}
{{- '<|im_start|>assistant\\n' ~ said }}
"""
    + _IM_CALLS
    + _IM_RESULT
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)


def _spell_qwen25(message: Message) -> str:
    return "\n".join(
        part
        for part in (_text(message), *(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in message.calls))
        if part
    )


_IM_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IM_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
QWEN3 = Family(
    name="qwen3",
    template=QWEN3_TEMPLATE,
    special=_IM_TOKENS,
    plain=_IM_PLAIN,
    eos="<|im_end|>",
    stops=("<|im_end|>", "<|endoftext|>"),
)
QWEN3_THINKING = Family(
    name="qwen3-thinking",
    template=QWEN3_TEMPLATE.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"),
    special=_IM_TOKENS,
    plain=_IM_PLAIN,
    eos="<|im_end|>",
    stops=("<|im_end|>", "<|endoftext|>"),
)
QWEN25 = Family(
    name="qwen2.5",
    template=QWEN25_TEMPLATE,
    special=_IM_TOKENS,
    plain=_IM_PLAIN[:2],
    eos="<|im_end|>",
    stops=("<|im_end|>", "<|endoftext|>"),
    spell=_spell_qwen25,
)

LLAMA_TEMPLATE = """{{- bos_token }}
{%- set ahead = '' %}
{%- if messages[0].role == 'system' %}{% set ahead = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Today Date: ' ~ strftime_now('%d %b %Y') ~ '\\n\\n' ~ ahead ~ '<|eot_id|>' }}
{%- if tools is not none %}
{%- if not messages %}{{- raise_exception('tools need a message of the user') }}{% endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nThese functions may be called:\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
{{- messages[0].content | trim ~ '<|eot_id|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only single calls') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' }}
{{- call.arguments | tojson ~ '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ message.content | tojson ~ '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""


def _spell_llama(message: Message) -> str:
    return _json(message.calls[0], "parameters") if message.calls else _text(message).strip()


LLAMA31 = Family(
    name="llama3.1",
    template=LLAMA_TEMPLATE,
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ),
    eos="<|eot_id|>",
    stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    tokenizer=lambda: byte_level(None),
    spell=_spell_llama,
)

GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' ~ m.content }}
{%- elif m.role == 'system' %}{{- '<|system|>\\n' ~ m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' ~ (m.reasoning_content.strip() if m.reasoning_content and loop.index0 > last.user else '') ~ '</think>' }}
{%- if m.content.strip() %}{{- '\\n' ~ m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' ~ call.function.name ~ '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""


def _spell_glm(message: Message) -> str:
    said = f"\n{_text(message).strip()}" if _text(message).strip() else ""
    for call in message.calls:
        pairs = json.loads(call.arguments).items()
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in pairs
        )
        said += f"\n<tool_call>{call.name}\n{values}</tool_call>"
    return f"\n<think></think>{said}"


GLM4 = Family(
    name="glm4",
    template=GLM_TEMPLATE,
    special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    plain=(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    eos="<|endoftext|>",
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    tokenizer=lambda: byte_level(QWEN_WORDS),
    spell=_spell_glm,
    end_of_turn="<|user|>",
    end_of_calls="<|observation|>",
)

DEEPSEEK_TEMPLATE = """{%- set ns = namespace(is_tool=false, first_output=true, ahead='') %}
{%- for message in messages %}{% if message.role == 'system' %}{% set ns.ahead = ns.ahead ~ message.content %}{% endif %}{% endfor %}
{%- if tools %}{% set ns.ahead = ns.ahead ~ '\\n\\n## Tools\\n' %}{% for tool in tools %}{% set ns.ahead = ns.ahead ~ '\\n```json\\n' ~ tool | tojson ~ '\\n```' %}{% endfor %}{% endif %}
{{- bos_token ~ ns.ahead }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set ns.is_tool = false %}
{{- '<｜User｜>' ~ message.content ~ '<｜Assistant｜>' }}
{%- elif message.role == 'assistant' %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- set ns.is_tool = false %}
{%- set ns.first_output = true %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.function.name ~ '\\n```json\\n' ~ call.function.arguments | tojson ~ '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{%- set ns.is_tool = true %}
{{- '<｜tool▁outputs▁begin｜>' if ns.first_output else '\\n' }}
{%- set ns.first_output = false %}
{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
"""


def _spell_deepseek(message: Message) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{json.dumps(json.loads(call.arguments), ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for call in message.calls
    )
    return _text(message) + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


DEEPSEEK3 = Family(
    name="deepseek-v3",
    template=DEEPSEEK_TEMPLATE,
    special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    plain=(
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{name}▁{edge}｜>" for name in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
        "<｜tool▁sep｜>",
        *(f"<｜place▁holder▁no▁{number}｜>" for number in range(40)),
    ),
    eos="<｜end▁of▁sentence｜>",
    stops=("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
    tokenizer=deepseek_words,
    spell=_spell_deepseek,
)
DEEPSEEK3_LEAKY = Family(
    name="deepseek-v3-leaky",
    template=DEEPSEEK_TEMPLATE.replace("{%- set ns.first_output = true %}\n", ""),
    special=DEEPSEEK3.special,
    plain=DEEPSEEK3.plain,
    eos=DEEPSEEK3.eos,
    stops=DEEPSEEK3.stops,
    bos=DEEPSEEK3.bos,
    tokenizer=deepseek_words,
)
"""As first published: whether results open their list depends on whether any came before."""

STRICT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate user and assistant') }}{% endif %}
{%- if message.role == 'user' %}{{- '[INST] ' ~ message.content ~ ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' ~ message.content ~ eos_token }}
{%- else %}{{- raise_exception('no such role') }}{% endif %}
{%- endfor %}
"""
STRICT = Family(
    name="strict",
    template=STRICT_TEMPLATE,
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    eos="</s>",
    stops=("</s>",),
    bos="<s>",
    tokenizer=sentencepiece,
)
"""As the first Llama and Mistral templates: users and assistants in turn and nothing else."""

BRIDGING = (QWEN3, QWEN3_THINKING, QWEN25, LLAMA31, GLM4, DEEPSEEK3, STRICT)
FAMILIES = (*BRIDGING, DEEPSEEK3_LEAKY)


def tool_description(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties or {"command": {"type": "string"}}, "title": name}


def said(text: str = "", *calls: ToolCall) -> Message:
    """A turn of the policy."""
    return Message(Role.ASSISTANT, (*((Text(text),) if text else ()), *calls))


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What a user of transformers would write for these messages (no folding)."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.TOOL:
            shown.extend(
                {"role": "tool", "content": block.text, "tool_call_id": block.call_id}
                for block in message.blocks
                if isinstance(block, ToolResult)
            )
            continue
        entry: dict[str, Any] = {"role": str(message.role), "content": _text(message)}
        if message.calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.calls
            ]
        reasoning = "".join(block.text for block in message.blocks if isinstance(block, Reasoning))
        shown.append(entry | ({"reasoning_content": reasoning} if reasoning else {}))
    return shown


LONG = "blah " * 50
FAT = replace(QWEN3, name="fat", plain=(*QWEN3.plain, LONG))
"""LONG is one token of it: an answer of megabytes need not have millions of them."""
