"""Episodes in the retail shop: the verdict, what ends an episode, failures of the simulated customer, and secrets."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.environments.environment import Action
from headrace.actors.environments.retail.environment import ACTIONS, RetailConfig, RetailEnvironment
from headrace.actors.environments.retail.tools import TOOLS
from headrace.actors.errors import ConfigError
from headrace.actors.services.service import ServiceDown
from headrace.buffer.tasks.task import EnvironmentSpec
from headrace.buffer.trajectories.types import Cause
from support.retail_shop import (
    CANCEL,
    POLICY,
    OneModel,
    ScriptedModel,
    open_episode,
    play_oracle,
    retail_task,
    say,
    secret_of,
    tables,
    write_shop,
)

RETURN = {
    "name": "return_delivered_order_items",
    "kwargs": {"order_id": "#W2", "item_ids": ["11"], "payment_method_id": "gift_card_1"},
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


def action_of(gold: Any) -> Action:
    return Action(name=gold["name"], arguments=gold["kwargs"])


async def test_the_oracle_solves_a_task(shop: Path) -> None:
    secret = secret_of(CANCEL, RETURN, outputs=["1,020.50", "Red"])
    episode = await open_episode(shop, retail_task(secret))
    assert [message.role for message in episode.messages] == ["system", "user"]
    assert episode.messages[0].content == POLICY
    assert "#W1" in episode.messages[1].content
    assert [tool.name for tool in episode.tools] == list(TOOLS)
    stopped, end = await play_oracle(episode, secret)
    assert stopped
    assert end.verdict is not None
    assert (end.verdict.reward, end.verdict.cause, end.verdict.solved) == (1.0, Cause.SOLVED, True)
    calls = [json.loads(line) for line in end.artifacts["tool_calls.jsonl"].splitlines()]
    assert [made["name"] for made in calls] == [CANCEL["name"], RETURN["name"]]
    dialogue = [json.loads(line) for line in end.artifacts["dialogue.jsonl"].splitlines()]
    assert [line["role"] for line in dialogue] == ["user", "assistant"] * (len(dialogue) // 2) + ["user"]
    assert dialogue[-1]["content"] == "###STOP###"


@pytest.mark.parametrize(
    ("made", "said", "reward"),
    [
        ((CANCEL,), "It is 1,020.5 dollars, and it is RED.", 1.0),
        ((CANCEL,), "It is 1020.5 dollars.", 0.0),
        ((), "It is 1,020.5 dollars, and it is red.", 0.0),
        ((CANCEL, RETURN), "It is 1,020.5 dollars, and it is red.", 0.0),
    ],
)
async def test_database_and_outputs_decide(shop: Path, made: Any, said: str, reward: float) -> None:
    episode = await open_episode(shop, retail_task(secret_of(CANCEL, outputs=["1020.5", "red"])))
    for gold in made:
        await episode.act(action_of(gold))
    await say(episode, said)
    verdict = (await episode.close()).verdict
    assert verdict is not None
    assert (verdict.reward, verdict.solved) == (reward, reward == 1.0)


async def test_outputs_can_be_told_in_several_texts(shop: Path) -> None:
    episode = await open_episode(shop, retail_task(secret_of(outputs=["red", "7"])))
    await say(episode, "It is red.")
    await say(episode, "There are 7.")
    verdict = (await episode.close()).verdict
    assert verdict is not None
    assert verdict.solved


async def test_the_replay_of_the_solution_does_not_count_as_the_policys_words(shop: Path) -> None:
    """A solution with a response must not tell the outputs in the policy's place."""
    answer = {"name": "respond", "kwargs": {"content": "It is red."}}
    episode = await open_episode(shop, retail_task(secret_of(answer, outputs=["red"])))
    await episode.act(Action(name="think", arguments={"thought": "It is red."}))
    verdict = (await episode.close()).verdict
    assert verdict is not None
    assert verdict.reward == 0.0


READ = {"name": "get_order_details", "kwargs": {"order_id": "#W1"}}
FAILS = {"name": "cancel_pending_order", "kwargs": {"order_id": "#W2", "reason": "no longer needed"}}


@pytest.mark.parametrize(("gold", "reward"), [(READ, 1.0), (FAILS, 1.0), (CANCEL, 0.0)])
async def test_doing_nothing_solves_a_task_that_changes_nothing(shop: Path, gold: Any, reward: float) -> None:
    """This is tau-bench's definition, and the reason why such tasks are worth little for training."""
    verdict = (await (await open_episode(shop, retail_task(secret_of(gold)))).close()).verdict
    assert verdict is not None
    assert verdict.reward == reward
    assert (verdict.detail == "the database was not to be changed") == (reward == 1.0)


async def test_an_end_can_be_required(shop: Path) -> None:
    for text, reward in (("Wait.", 0.0), ("Is there anything else?", 1.0)):
        episode = await open_episode(shop, retail_task(secret_of()), end_required=True)
        await say(episode, text)
        verdict = (await episode.close()).verdict
        assert verdict is not None
        assert verdict.reward == reward


async def test_a_transfer_ends_the_episode(shop: Path) -> None:
    for arguments in ({"summary": "?"}, {}):
        episode = await open_episode(shop, retail_task(secret_of()))
        observation = await episode.act(Action(name="transfer_to_human_agents", arguments=arguments))
        assert observation.ends
        late = await episode.act(action_of(CANCEL))
        assert (late.text, late.ends) == ("Error: the conversation has ended", True)


async def test_the_policys_mistakes_are_observations(shop: Path) -> None:
    episode = await open_episode(shop, retail_task(secret_of()))
    for action, text in (
        (Action(name="respond"), "Error: respond needs `content`, a text that is not empty"),
        (Action(name="respond", arguments={"content": 7}), "Error: respond needs `content`, a text that is not empty"),
        (Action(name="sing"), "Unknown action sing"),
        (Action(name="get_order_details", arguments={"order_id": "\ud800"}), "Error: order not found"),
    ):
        observation = await episode.act(action)
        assert (observation.text, observation.ends) == (text, False)
    await say(episode, "\ud800?")
    json.dumps(dict((await episode.close()).artifacts)).encode()


async def test_stop_anywhere_in_a_line_ends_the_episode(shop: Path) -> None:
    helper = ScriptedModel(["Hi", "Thanks! ###STOP### Bye"])
    episode = await open_episode(shop, retail_task(secret_of()), helper=helper, simulator="llm", service="user")
    assert (await episode.act(Action(name="respond", arguments={"content": "Done."}))).ends


async def test_a_failing_simulator_is_never_a_reward(shop: Path) -> None:
    """F14."""
    settings: dict[str, Any] = {"simulator": "llm", "service": "user"}
    down = ServiceDown("user", "no answer")
    with pytest.raises(ServiceDown, match="no answer"):
        await open_episode(shop, retail_task(secret_of()), helper=ScriptedModel([down]), **settings)
    episode = await open_episode(shop, retail_task(secret_of()), helper=ScriptedModel(["Hi", down]), **settings)
    with pytest.raises(ServiceDown, match="no answer"):
        await say(episode, "Hello")
    with pytest.raises(ServiceDown, match="wrote no line"):
        await open_episode(shop, retail_task(secret_of()), helper=ScriptedModel([" \n"] * 3), **settings)


async def test_episodes_do_not_see_each_other(shop: Path) -> None:
    first = await open_episode(shop, retail_task(secret_of(CANCEL)))
    second = await open_episode(shop, retail_task(secret_of(CANCEL)))
    await first.act(action_of(CANCEL))
    details = Action(name="get_order_details", arguments={"order_id": "#W1"})
    assert json.loads((await first.act(details)).text)["status"] == "cancelled"
    assert json.loads((await second.act(details)).text)["status"] == "pending"
    rewards = [end.verdict.reward for end in (await first.close(), await second.close()) if end.verdict]
    assert rewards == [1.0, 0.0]


async def test_many_episodes_at_once(shop: Path) -> None:
    """Sessions whose customers take time wait for them together, not one after the other."""
    waiting, most = 0, 0

    class SlowModel(ScriptedModel):
        async def complete(self, *args: Any, **settings: Any) -> str:
            nonlocal waiting, most
            waiting, most = waiting + 1, max(most, waiting + 1)
            if waiting == 16:
                together.set()
            await together.wait()
            waiting -= 1
            return await super().complete(*args, **settings)

    together = asyncio.Event()
    settings: dict[str, Any] = {"simulator": "llm", "service": "user"}
    opened = (
        open_episode(shop, retail_task(secret_of(CANCEL)), helper=SlowModel(["Hi"]), **settings) for _ in range(16)
    )
    async with asyncio.timeout(60):
        assert len(await asyncio.gather(*opened)) == 16
    assert most == 16


async def test_secrets_are_not_shown(shop: Path) -> None:
    marked = "MARKED"
    secret = {
        "user_id": f"una_{marked}_1",
        "instruction": f"Your name is Una Bergh. You are {marked}. You want a lamp.",
        "actions": [{"name": "cancel_pending_order", "kwargs": {"order_id": marked, "reason": marked}}],
        "outputs": [marked],
    }
    task = retail_task(secret)
    assert marked not in repr(task)
    episode = await open_episode(shop, task)
    await play_oracle(episode, secret | {"actions": [], "outputs": []})
    end = await episode.close()
    assert marked not in repr((episode.messages, episode.tools, end, episode, vars(episode)["_goal"]))
    broken: tuple[dict[str, Any], ...] = (
        secret | {"instruction": [marked]},
        secret | {"actions": [{"name": marked}]},
        secret | {"outputs": [[marked]]},
        secret | {"user_id": [marked]},
    )
    for wrong in broken:
        with pytest.raises(ConfigError, match=r"task t1: environment\.secret: .*convert") as caught:
            await open_episode(shop, retail_task(wrong))
        assert marked not in str(caught.value)


async def test_tasks_of_other_environments_are_refused(shop: Path) -> None:
    environment = RetailEnvironment(RetailConfig(data=str(shop)))
    task = retail_task(secret_of())
    for spec in (None, EnvironmentSpec(kind="airline")):
        other = type(task)(id=task.id, family="f", instruction="i", evaluator=task.evaluator, environment=spec)
        with pytest.raises(ConfigError, match=r"environment\.kind: must be 'retail'"):
            await environment.open(other, None, OneModel(), lambda: 0.0)


def test_the_environment_is_picklable_and_states_its_needs(shop: Path) -> None:
    environment = pickle.loads(
        pickle.dumps(RetailEnvironment(RetailConfig(data=str(shop), simulator="react", service="user")))
    )
    assert (environment.needs_sandbox, environment.services, environment.actions) == (False, ("user",), ACTIONS)
    assert frozenset({*TOOLS, "respond"}) == ACTIONS
    assert RetailEnvironment(RetailConfig(data=str(shop))).services == ()


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("orders.json", None, "orders.json is missing; give a folder"),
        ("users.json", "{", "not a retail database"),
        ("users.json", '{"u": {"name": "Una"}}', "not a retail database: users.u"),
        ("db.json", '{"orders": {}}', "not a retail database: products"),
        ("wiki.md", None, r"environment\.retail\.policy: .*wiki\.md cannot be read"),
        ("tools_schema.json", "{}", "give the tools_schema.json"),
        ("tools_schema.json", '[{"function": {"name": "sing"}}]', "unknown tool 'sing'"),
    ],
)
async def test_unusable_files_are_named(shop: Path, name: str, text: str | None, error: str) -> None:
    if text is None:
        (shop / name).unlink()
    else:
        (shop / name).write_text(text)
    with pytest.raises(ConfigError, match=error):
        await open_episode(shop, retail_task(secret_of()))


@pytest.mark.parametrize("name", ["db.json", "db.json.gz"])
async def test_one_file_can_hold_the_database(shop: Path, name: str) -> None:
    data = json.dumps(tables()).encode()
    (shop / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for table in ("orders", "products", "users"):
        (shop / f"{table}.json").unlink()
    stopped, end = await play_oracle(await open_episode(shop, retail_task(secret_of(CANCEL))), secret_of(CANCEL))
    assert stopped
    assert end.verdict is not None
    assert end.verdict.solved


@pytest.mark.parametrize("settings", [{"simulator": "llm"}, {"service": "user"}])
def test_a_model_user_needs_a_service_and_no_other_has_one(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="service: is "):
        RetailConfig(data="x", **settings)  # type: ignore[arg-type]
