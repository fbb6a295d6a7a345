"""Rendering is prefix-stable, bridges are suffixes, and text survives the ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.tiny import PIECES
from headrace.policies.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer(Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny")


@dataclass(frozen=True)
class Said:
    role: str
    content: str


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from((*PIECES, "<|end|>", "<|user|>", " ", "\n")), max_size=8).map("".join),
)
messages = st.lists(
    st.builds(Said, st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=6
)
observations = st.lists(st.builds(Said, st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3)


@given(text=texts)
def test_text_survives_the_ids(text: str) -> None:
    plain = text.replace("<|", "< |")
    ids = TOKENIZER.encode(plain)
    assert all(0 <= token < TOKENIZER.vocab_size for token in ids)
    assert TOKENIZER.decode(ids) == plain


@given(talk=messages, cut=st.integers(0, 6))
def test_rendering_more_messages_only_appends(talk: list[Said], cut: int) -> None:
    whole = TOKENIZER.text(talk, add_generation_prompt=True)
    assert whole.startswith(TOKENIZER.text(talk[:cut], add_generation_prompt=False))


@given(talk=messages, answer=texts, follows=observations, closed=st.booleans())
def test_history_output_and_bridge_are_the_next_prompt(
    talk: list[Said], answer: str, follows: list[Said], closed: bool
) -> None:
    """With or without a sampled end of turn, the appended ids are those of the whole conversation."""
    plain = answer.replace("<|", "< |")
    output = TOKENIZER.encode(plain) + ((TOKENIZER.eos_id,) if closed else ())
    last = output[-1] if output else TOKENIZER.encode("<|assistant|>")[0]
    appended = TOKENIZER.render(talk) + output + TOKENIZER.bridge(last, follows)
    assert appended == TOKENIZER.render([*talk, Said("assistant", plain), *follows])


@given(follows=observations, sampled=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=6))
def test_the_bridge_depends_on_nothing_but_how_the_turn_ended(follows: list[Said], sampled: list[int]) -> None:
    last = sampled[-1] if sampled else 0
    closed, cut = TOKENIZER.bridge(TOKENIZER.eos_id, follows), TOKENIZER.bridge(0, follows)
    assert cut == (TOKENIZER.eos_id, *closed)
    assert TOKENIZER.bridge(last, follows) == (closed if last in TOKENIZER.stop_ids else cut)
