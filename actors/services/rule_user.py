"""A simulated user that follows fixed rules and needs no model.

Invariants:
- Every fact in a line is a sentence of the instruction, in the first person. Nothing is invented: a question that the
  instruction does not answer is answered with "I do not remember".
- The same instruction, seed and agent's texts give the same lines.
- The conversation ends, at the latest after `patience` texts of the agent.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Self

STOP: Final = "###STOP###"
"""A line that contains this text ends the conversation."""

_ORDER = re.compile(r"#?\bW\d+\b")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ZIP = re.compile(r"\b\d{5}\b")
_NAMED_ZIP = re.compile(r"\bzip(?: ?code)?\D{0,6}(\d{5})\b", re.IGNORECASE)
_USER_ID = re.compile(r"\b[a-z]+_[a-z]+_\d+\b")
_NAME = re.compile(r"\b(?:name is|You are|You're|called)\s+([A-Z][\w'-]*(?: [A-Z][\w'-]*)+)")
# Sentences end at a full stop; in generated instructions, a request can also follow a list that ends with "; ".
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=;)\s+(?=(?:Return|Cancel|For|Exchange|Modify|Change)\b[^;]*#W)")
_REQUEST = re.compile(
    r"#W|\b(?:want|wish|would|like to|need|hope|prefer|ask|order(?:ed|s)?|bought|received|return|exchange|cancel|modify"
    r"|change|refund)\b|\b(?:you'd|you've)\b",
    re.IGNORECASE,
)
# Directions for the user's behaviour, which nobody would say.
_DIRECTION = re.compile(
    r"^\W*if (?:and only if )?the agent\b|\breveal\b|^You are (?:an? )?[\w ,-]*\b(?:person|guy|detail-oriented)\b",
    re.IGNORECASE,
)
_PERSONA = re.compile(r"^(?:You are|You're|You name|Your name|Your|You do not remember|You live)\b")

_CHANGED = (
    r"(?:cancell?ed|returned|exchanged|modified|changed|updated|processed|completed?|done|submitted|placed|refunded)"
)
_MORE = re.compile(r"\b(?:anything|something) else\b|\b(?:further|more) (?:help|assistance|questions)\b")
_IDENTITY = re.compile(r"\be-?mail|\bzip\b|\bname\b|\bidentit|\bverify\b|\bauthenticat|\buser id\b|\bwho you are\b")
_ASKS = re.compile(r"\?|\b(?:please|provide|could you|can you|may i|let me know|tell me|need your|share)\b")
_AGREE = re.compile(
    r"\byes\b|\bproceed\b|\bgo ahead\b|\bshall i\b|\bshould i\b|\b(?:do|would) you (?:want|like) me to\b"
    r"|\b(?:is|are) (?:this|that|these|everything) (?:right|correct|ok|okay|fine)\b|\bconfirm\b"
)
_DONE = re.compile(
    rf"\b(?:has|have|is|are|was|were|been|now|successfully|i've)\s+(?:\w+\s+){{0,2}}{_CHANGED}\b|\ball set\b|^done\b"
)
_REFUSED = re.compile(r"\b(?:cannot|can't|can not|unable|not possible|not able|could not|couldn't)\b")


class _Intent(Enum):
    MORE = auto()
    IDENTITY = auto()
    AGREE = auto()
    DONE = auto()
    REFUSED = auto()
    QUESTION = auto()
    STATEMENT = auto()


def _intent(text: str) -> _Intent:
    """Classify the agent's text."""
    lower = text.lower()
    asks = _ASKS.search(lower) is not None
    if _MORE.search(lower):
        return _Intent.MORE
    # "Please confirm your e-mail" asks for a fact, "confirm (yes/no)" asks for a decision.
    if asks and _IDENTITY.search(lower) and not re.search(r"\byes\b|\bproceed\b", lower):
        return _Intent.IDENTITY
    if _AGREE.search(lower) and (asks or "confirm" in lower):
        return _Intent.AGREE
    if _DONE.search(lower):
        return _Intent.DONE
    if _REFUSED.search(lower):
        return _Intent.REFUSED
    return _Intent.QUESTION if asks else _Intent.STATEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Facts and requests of an instruction, in the first person."""

    identity: str
    requests: tuple[str, ...]

    @classmethod
    def parse(cls, instruction: str, user_id: str = "") -> Self:
        """Parse an instruction. A name that is missing there is derived from a user id that is there."""
        sentences = [sentence.strip(" \n;") for sentence in _SENTENCE_END.split(instruction)]
        requests = [
            sentence
            for sentence in sentences
            if _REQUEST.search(_EMAIL.sub("", sentence)) and not _DIRECTION.search(sentence)
            if not (_PERSONA.search(sentence) and not re.search(r"#W|\b(?:want|wish|would)\b", sentence))
        ]
        about = " ".join(sentence for sentence in sentences if sentence not in requests)
        name, emails = _NAME.search(instruction), _EMAIL.findall(instruction)
        # Other numbers of five digits can be in the address that an order is to get.
        zip_codes = _NAMED_ZIP.findall(instruction) or _ZIP.findall(about)
        named = _USER_ID.search(instruction)
        facts = []
        if name is not None:
            facts.append(f"My name is {name[1]}.")
        elif named is not None and named[0] == (user_id or named[0]):
            first, last, _ = named[0].split("_")
            facts.append(f"My name is {first.title()} {last.title()}.")
        facts.append(f"My e-mail is {' or '.join(emails)}." if emails else "I do not remember my e-mail.")
        if zip_codes:
            facts.append(f"My zip code is {zip_codes[0]}.")
        return cls(identity=" ".join(facts), requests=tuple(map(first_person, requests)))


_PERSONS: Final = {
    "you are": "I am",
    "you're": "I'm",
    "you were": "I was",
    "you've": "I've",
    "you'd": "I'd",
    "you'll": "I'll",
    "yourself": "myself",
    "yours": "mine",
    "your": "my",
    "you": "I",
}
_PERSON = re.compile(rf"\b(?:{'|'.join(_PERSONS)})\b", re.IGNORECASE)


def first_person(sentence: str) -> str:
    """Return a sentence about "you" as one about "I"."""
    said = _PERSON.sub(lambda found: _PERSONS[found[0].lower()], sentence)
    return said[:1].upper() + said[1:]


def normalised(text: str) -> str:
    """Return a text in lower case without commas, as outputs are compared."""
    return text.lower().replace(",", "")


class RuleUser:
    """User that follows fixed rules: opens with the first request, identifies itself when asked, answers questions with
    sentences of the instruction, agrees to changes of its own orders, and ends the conversation when everything that it
    said is done."""

    def __init__(
        self,
        *,
        user_id: str = "",
        orders: frozenset[str] = frozenset(),
        outputs: tuple[str, ...] = (),
        patience: int = 20,
        seed: int | str = 0,
    ) -> None:
        """`orders` are the ids of the orders that the user wants to change, if they are known; `outputs` are strings
        that the user wants to be told."""
        self._user_id = user_id
        self._orders = {order.lstrip("#") for order in orders}
        self._missing = {normalised(output) for output in outputs}
        self._patience = patience
        self._random = random.Random(seed)
        self._script = Script(identity="", requests=())
        self._told = 0
        self._asked_again = False

    async def reset(self, instruction: str) -> str:
        """Return the first line."""
        self._script = Script.parse(instruction, self._user_id)
        self._told = 0
        greeting = self._random.choice(("Hi!", "Hello!", "Hi there!"))
        return f"{greeting} {self._next_request() or 'I need help with an order.'}"

    async def step(self, text: str) -> str:
        """Return the answer to the agent's text."""
        self._patience -= 1
        said = normalised(text)
        self._missing = {output for output in self._missing if output not in said}
        if self._patience < 0:
            return STOP
        match _intent(text):
            case _Intent.IDENTITY:
                return self._script.identity
            case _Intent.AGREE:
                named = {order.lstrip("#") for order in _ORDER.findall(text)}
                if self._orders and named and not named & self._orders:
                    return f"No, that is not what I want. {' '.join(self._script.requests[: self._told])}".strip()
                return self._random.choice(("Yes, please.", "Yes, go ahead.", "Yes."))
            case _Intent.MORE | _Intent.DONE | _Intent.REFUSED:
                return self._next_request() or self._ask_again() or STOP
            case _Intent.QUESTION:
                return self._next_request() or self._closest_request(text)
            case _Intent.STATEMENT:
                return self._next_request() or self._random.choice(("Okay, please go on.", "All right, I am waiting."))

    def _next_request(self) -> str:
        """Return the next request that was not told; empty if there is none."""
        told = self._told
        self._told = min(told + 1, len(self._script.requests))
        return "".join(self._script.requests[told : told + 1])

    def _ask_again(self) -> str:
        """Return all requests once if something that the user wants to know was not told; empty otherwise."""
        if not self._missing or self._asked_again:
            return ""
        self._asked_again = True
        return f"You did not tell me everything that I wanted to know. {' '.join(self._script.requests)}"

    def _closest_request(self, text: str) -> str:
        """Return the request that shares most words with a question."""
        words = set(re.findall(r"[a-z]{3,}", text.lower()))
        shared = [(len(words & set(re.findall(r"[a-z]{3,}", line.lower()))), line) for line in self._script.requests]
        most, line = max(shared, key=lambda pair: pair[0], default=(0, ""))
        return line if most else "I do not remember more than that."
