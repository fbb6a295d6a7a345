"""Config and vocabulary of the tiny policy, a Qwen3 of 333k parameters that one CPU core trains in minutes.

Invariants:
- Ids depend only on this file and the task family's vocabulary: 256 bytes, then the special tokens, the pieces, and
  reserved tokens up to a multiple of 64. There are no merges: other text is encoded as bytes.
- The files are in Hugging Face's format and load unchanged in transformers (Qwen3ForCausalLM, AutoTokenizer).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.buffer.tasks.datasets.terminal import CONSTANTS, NAMES, NUMBERS, WORDS, WRONG_NUMBER
from headrace.policies.tokens.token_bytes import byte_alphabet

END, SYSTEM, USER, ASSISTANT, TOOL = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
PAD = "<|pad|>"
SPECIALS = (PAD, END, SYSTEM, USER, ASSISTANT, TOOL)
ROLE_MARKERS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

PIECES = (
    *WORDS, *NAMES, *CONSTANTS, *NUMBERS, WRONG_NUMBER,
    "write ", " to the file named in ", "move the last line of ", " to ", "rename the file that has ",
    "repair ", " in calc.py so that test.py passes",
    "cat ", "tail -n 1 ", "grep -l ", "echo ", "mv ", "sed -i ", "ls", "test.py", "calc.py",
    " *", " > ", " >> ", "; exit", "; ",
    'sed -i "s/= .*/= ', '/" calc.py', "/d ", " = ", "head ", "cp ",
    "from calc import total; assert total(1) == ", "def total(count):", "    return count * ",
    ": No such file or directory", "bash: line 1: ", ": command not found",
    "mv: ", "sed: ", "cat: ", "grep: ", "tail: ",
    "cannot stat ", "cannot open ", "can't read ", "syntax error near unexpected token ", "Is a directory", "timeout",
)  # fmt: skip
"""Tokens for frequent text; the longest match is used."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Template that puts only role markers around contents, so that rendering more messages only appends."""

VOCABULARY_MULTIPLE = 64
MAX_CONTEXT_TOKENS = 1024


def vocabulary(pieces: Sequence[str] = PIECES) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the byte alphabet (ids 0 to 255) and the added tokens (ids from 256), in order of their ids. `pieces` are
    the tokens for frequent text, which other miniatures replace by their own."""
    alphabet = byte_alphabet()
    used = 256 + len(SPECIALS) + len(pieces)
    reserved = tuple(f"<|reserved_{index}|>" for index in range(-used % VOCABULARY_MULTIPLE))
    return alphabet, (*SPECIALS, *pieces, *reserved)


def tokenizer_json(pieces: Sequence[str] = PIECES) -> dict[str, Any]:
    """Return the contents of tokenizer.json."""
    alphabet, added = vocabulary(pieces)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": len(alphabet) + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content.startswith("<|"),
            }
            for index, content in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": alphabet,
            "merges": [],
        },
    }


def tokenizer_config(chat_template: str = CHAT_TEMPLATE) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT_TOKENS,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def model_config(pieces: Sequence[str] = PIECES) -> dict[str, Any]:
    """Return the contents of config.json: 3 layers, width 96, 3 heads of 32 with 1 key-value head, tied embeddings."""
    alphabet, added = vocabulary(pieces)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(alphabet) + len(added),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": len(alphabet) + SPECIALS.index(END),
        "pad_token_id": len(alphabet) + SPECIALS.index(PAD),
        "use_cache": True,
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": model_config()["eos_token_id"],
        "pad_token_id": model_config()["pad_token_id"],
    }


def write_description(folder: Path, pieces: Sequence[str] = PIECES, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write all files of the model directory except the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": model_config(pieces),
        "generation_config.json": generation_config(),
        "tokenizer.json": tokenizer_json(pieces),
        "tokenizer_config.json": tokenizer_config(chat_template),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
