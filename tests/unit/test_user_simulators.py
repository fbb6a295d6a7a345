"""Simulated users: the rules of the one without a model, and the prompts and checks of those with a helper model."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.services.rule_user import STOP, RuleUser, Script
from headrace.actors.services.service import ServiceDown
from headrace.actors.services.user_simulators import (
    Goal,
    SimulatorConfig,
    SimulatorKind,
    UserSimulator,
    make_user,
)
from support.retail_shop import OneModel, ScriptedModel

WISHES = (
    "You are Una Bergh in 10001. You want to return the red lamp of order #W2 via gift_card_1. You'd also like to know "
    "the price of your rug. If the agent asks for confirmation, say yes. You are a shy person."
)
TOLD = ["I want to return the red lamp of order #W2 via gift_card_1.", "I'd also like to know the price of my rug."]


def model_user(kind: SimulatorKind, answers: list[str | Exception]) -> tuple[UserSimulator, ScriptedModel]:
    helper = ScriptedModel(answers)
    config = SimulatorConfig(simulator=kind, service="user", seed=3)
    return make_user(config, Goal(instruction=WISHES), OneModel(helper), name="t1"), helper


async def test_a_conversation_with_the_rule_user() -> None:
    user = RuleUser(orders=frozenset({"#W2"}), outputs=("1,100.10",))
    first = await user.reset(WISHES)
    assert first.endswith(f"! {TOLD[0]}")
    assert await user.step("Could you give me your e-mail, or your name and zip code?") == (
        "My name is Una Bergh. I do not remember my e-mail. My zip code is 10001."
    )
    assert "No, that is not what I want." in await user.step("I will cancel order #W1. Do you confirm (yes/no)?")
    assert (await user.step("I will return the lamp of #W2. Do you confirm (yes/no)?")).startswith("Yes")
    assert await user.step("The return has been requested and processed. Anything else?") == TOLD[1]
    assert await user.step("Which rug do you mean?") == TOLD[1]
    # The price was not told yet.
    assert TOLD[1] in await user.step("Everything has been done.")
    assert await user.step("The rug costs $1100.10. Can I help you with anything else?") == STOP


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Please confirm your zip code.", "My name is"),
        ("May I have your full name?", "My name is"),
        ("Shall I go ahead with the return?", "Yes"),
        ("Please confirm the return to gift_card_1.", "Yes"),
        ("Is this correct?", "Yes"),
        ("Your order has been cancelled.", STOP),
        ("Sorry, I cannot do that.", STOP),
        ("Is there anything else I can help you with?", STOP),
        ("What is the order id of the lamp?", TOLD[0]),
        ("What is your favourite composer?", "I do not remember more than that."),
    ],
)
async def test_the_rule_users_answers(text: str, answer: str) -> None:
    user = RuleUser()
    await user.reset(WISHES)
    # The remaining request is told first.
    await user.step("Anything else?")
    assert (await user.step(text)).startswith(answer)


async def test_the_rule_user_loses_patience() -> None:
    user = RuleUser(patience=3)
    await user.reset(WISHES)
    lines = [await user.step("One moment.") for _ in range(4)]
    assert STOP not in lines[:3]
    assert lines[3] == STOP


async def test_the_rule_user_is_deterministic() -> None:
    async def lines(seed: int) -> list[str]:
        user = RuleUser(seed=seed)
        return [await user.reset(WISHES), *[await user.step("Do you confirm (yes/no)?") for _ in range(5)]]

    assert await lines(1) == await lines(1)
    assert len({tuple(await lines(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("instruction", "identity"),
    [
        (
            "Your name is Una Bergh and your email is una@shop.example. Cancel order #W1.",
            "My name is Una Bergh. My e-mail is una@shop.example.",
        ),
        (
            "You are una_bergh_1 (zip code 10001) and you want to return a lamp to 5 Hill St, 20002.",
            "My name is Una Bergh. I do not remember my e-mail. My zip code is 10001.",
        ),
        ("You want a lamp.", "I do not remember my e-mail."),
        ("You are Una, with u@shop.example or b@shop.example.", "My e-mail is u@shop.example or b@shop.example."),
    ],
)
def test_the_identity_is_read_from_the_instruction(instruction: str, identity: str) -> None:
    assert Script.parse(instruction, "una_bergh_1").identity == identity


def test_directions_are_not_told() -> None:
    script = Script.parse(f"{WISHES} Return #W1 via paypal_1: Lamp; Rug; Cancel order #W3 because no longer needed. ")
    later = ("Return #W1 via paypal_1: Lamp; Rug", "Cancel order #W3 because no longer needed.")
    assert script.requests == (*TOLD, *later)


async def test_a_model_writes_single_lines() -> None:
    user, helper = model_user(SimulatorKind.LLM, ["<think>hm\n</think>Hi,\n I need help.", STOP])
    assert await user.reset(WISHES) == "Hi, I need help."
    assert await user.step("What is it?") == STOP
    first, second = helper.requests
    assert WISHES in first[0].content
    assert [message.role for message in second] == ["system", "user", "assistant", "user"]
    assert second[3].content == "What is it?"
    assert helper.seeds[1] == (helper.seeds[0] or 0) + 1


async def test_a_thinking_model_does_not_show_its_thoughts() -> None:
    answers: list[str | Exception] = ["Thought: greet\nUser Response:\nHi there", "no marker", "User Response: Bye"]
    user, helper = model_user(SimulatorKind.REACT, answers)
    assert await user.reset(WISHES) == "Hi there"
    assert await user.step("Hello") == "Bye"
    assert len(helper.requests) == 3


async def test_a_model_that_writes_nothing_is_down() -> None:
    user, _ = model_user(SimulatorKind.REACT, ["no marker"] * 3)
    with pytest.raises(ServiceDown, match="service user: the simulated user wrote no line in 3 answers"):
        await user.reset(WISHES)


async def test_wrong_lines_are_written_anew() -> None:
    user, helper = model_user(SimulatorKind.VERIFY, ["Bad", "False. It invents.", "Good", "true"])
    assert await user.reset(WISHES) == "Good"
    check = helper.requests[1][0].content
    assert WISHES in check
    assert "Bad" in check
    assert helper.requests[2] == helper.requests[0]


async def test_the_third_line_is_used_unchecked() -> None:
    user, helper = model_user(SimulatorKind.VERIFY, ["1", "false", "2", "false", "3"])
    assert await user.reset(WISHES) == "3"
    assert not helper.answers


async def test_wrong_lines_are_revised_with_the_reason() -> None:
    user, helper = model_user(
        SimulatorKind.REFLECTION, ["Bad", "**false**: it invents.", "Good", "true", "Bye", "true"]
    )
    assert await user.reset(WISHES) == "Good"
    revision = helper.requests[2]
    assert revision[-2].content == "Bad"
    assert "it invents." in revision[-1].content
    # The rejected line is not part of the conversation.
    await user.step("Hello")
    assert [message.content for message in helper.requests[4]][1:] == [helper.requests[0][1].content, "Good", "Hello"]


async def test_delays_do_not_block_other_users() -> None:
    """Each of two users waits until the other one is waiting as well."""
    arrived = asyncio.Barrier(2)

    class Meeting(RuleUser):
        async def step(self, text: str) -> str:
            async with asyncio.timeout(30):
                await arrived.wait()
            return await super().step(text)

    async def talk(seed: int) -> str:
        user = Meeting(seed=seed)
        await user.reset(WISHES)
        return await user.step("Anything else?")

    assert await asyncio.gather(talk(1), talk(2)) == [TOLD[1]] * 2
