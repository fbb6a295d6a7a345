"""The model directory of the gateway bench, without weights: a realistic tokenizer and a chat template like Qwen3's.

Invariants:
- Everything is generated from text that comes with every Python installation: nothing is downloaded, and two runs write
  identical files.
- A token of prose or code has between 3 and 4 characters, as with a real vocabulary.
"""

from __future__ import annotations

import json
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END: Final = "<|im_end|>"
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", END)
_ADDED: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VOCABULARY: Final = 12_288
_TRAINING_CHARACTERS: Final = 4_000_000
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TEMPLATE: Final = """
{%- set lead = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or lead %}
{{- '<|im_start|>system\\n' + lead }}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nWrite each call as a JSON object:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <arguments-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > asked.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_model(folder: Path) -> Tokenizer:
    """Train the tokenizer (takes a few seconds) and write the directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    texts = [prose()[: _TRAINING_CHARACTERS // 4], code()[:_TRAINING_CHARACTERS]]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(END)]}))
    return tokenizer


@cache
def prose() -> str:
    """Return English text: the chapters of Python's own manual."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def code() -> str:
    """Return code: the modules of Python's library, in a random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
