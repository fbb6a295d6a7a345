"""Token ids and log-probabilities in Chat Completions, as other trainers' agents read them: those that the engine
served, and those of the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import FINAL_TEXT, Budgets
from support.gateway_rig import CHAT, Client, Lines, call_text, world
from support.scripted_engine import Sampled
from support.wires import read_events

EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ASKED = {"logprobs": True, "return_token_ids": True}
TURNS = ("<think>\nHm.\n</think>\n\nI look, 漢字 🧪.\n" + call_text("bash", command="ls"), "Done: é.")


async def told(client: Client, text: str, **fields: Any) -> list[dict[str, Any]]:
    """Ask; return what each choice tells of its tokens, and `prompt`, the ids of the prompt."""
    reply = await client.say(text, **ASKED | fields)
    assert reply.status == 200, reply.raw
    if not client.stream:
        whole = json.loads(reply.raw)
        return [
            {"prompt": whole["prompt_token_ids"], "ids": choice["token_ids"], "logprobs": choice["logprobs"]["content"]}
            for choice in whole["choices"]
        ]
    found: dict[int, dict[str, Any]] = {}
    for _, data in read_events(reply.raw)[:-1]:
        for choice in data["choices"]:
            one = found.setdefault(choice["index"], {"prompt": None, "ids": [], "logprobs": []})
            one["prompt"] = data.get("prompt_token_ids", one["prompt"])
            one["ids"] += choice.get("token_ids", [])
            one["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
    return [found[index] for index in sorted(found)]


def check(one: dict[str, Any], sampled: Sampled) -> None:
    assert one["prompt"] == list(sampled.prompt_ids)
    assert one["ids"] == list(sampled.output_ids), "the stop token included, as in the row"
    assert [token["logprob"] for token in one["logprobs"]] == list(sampled.logprobs)
    spelled = b"".join(bytes(token["bytes"]) for token in one["logprobs"])
    assert spelled.decode() == sampled.text + "<|im_end|>"


@EITHER
async def test_the_ids_are_those_that_the_engine_served_and_those_of_the_row(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines(*TURNS)) as w:
        client = await w.client(stream=stream, tools=("bash",))
        turns = [await told(client, "mend it"), await told(client, "on")]
        for [one], sampled in zip(turns, w.engines[0].sampled, strict=True):
            check(one, sampled)
        report = await w.finish()
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        tokens, mask = row.tokens_T.tolist(), row.loss_mask_T.tolist()
        [last] = turns[-1]
        assert last["prompt"] + last["ids"] == tokens
        assert [token for token, trained in zip(tokens, mask, strict=True) if trained] == [
            token for [one] in turns for token in one["ids"]
        ]


@EITHER
async def test_each_of_several_samples_has_its_own_ids(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines("one", "two and more", "three")) as w:
        client = await w.client(stream=stream)
        client.history += CHAT.user("go")
        body = client.body(n=3, **ASKED)
        async with w.http.post(client.base_url + CHAT.path, json=body) as response:
            raw = await response.read()
        documents = [data for _, data in read_events(raw)[:-1]] if stream else [json.loads(raw)]
        choices = [choice for document in documents for choice in document["choices"]]
        found = sorted(choice["token_ids"] for choice in choices if choice.get("token_ids"))
        assert found == sorted(w.engines[0].outputs())
        prompts = [document["prompt_token_ids"] for document in documents if "prompt_token_ids" in document]
        assert prompts == [list(w.engines[0].sampled[0].prompt_ids)] * (3 if stream else 1)


async def test_a_replayed_answer_has_the_same_ids(model_dir: Path) -> None:
    async with world(model_dir, Lines(*TURNS)) as w:
        client = await w.client()
        client.history += CHAT.user("mend it")
        first = json.loads((await client.send(client.body(**ASKED))).raw)
        client.headers["x-stainless-retry-count"] = "1"
        again = json.loads((await client.send(client.body(**ASKED))).raw)
        assert len(w.engines[0].sampled) == 1
        assert first["choices"] == again["choices"]
        assert first["prompt_token_ids"] == again["prompt_token_ids"]
        # What it asks to be told makes no other request of it.
        plain = json.loads((await client.send(client.body())).raw)
        assert len(w.engines[0].sampled) == 1
        assert "prompt_token_ids" not in plain
        assert plain["choices"][0]["message"] == first["choices"][0]["message"]


async def test_a_restarted_gateway_replays_the_same_ids(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines(*TURNS), session_log_dir=tmp_path) as w:
        client = await w.client()
        client.history += CHAT.user("mend it")
        first = json.loads((await client.send(client.body(**ASKED))).raw)
        token = client.base_url.rpartition("/")[2]
    async with world(model_dir, Lines("something else"), session_log_dir=tmp_path) as w:
        again = Client(w.http, f"{w.url}/s/{token}", CHAT, headers={"x-stainless-retry-count": "1"})
        again.history = client.history
        answer = json.loads((await again.send(again.body(**ASKED))).raw)
        assert w.engines[0].sampled == []
        assert answer["choices"] == first["choices"]
        assert answer["prompt_token_ids"] == first["prompt_token_ids"]


async def test_tokens_can_be_named_by_their_ids(model_dir: Path) -> None:
    async with world(model_dir, Lines("Well.")) as w:
        client = await w.client()
        [one] = await told(client, "go", return_tokens_as_token_ids=True, top_logprobs=0)
        [output] = w.engines[0].outputs()
        assert [token["token"] for token in one["logprobs"]] == [f"token_id:{token_id}" for token_id in output]
        assert [token["top_logprobs"] for token in one["logprobs"]] == [[]] * len(output)


async def test_a_turn_cut_at_a_stop_string_has_the_ids_of_the_row(model_dir: Path) -> None:
    async with world(model_dir, Lines("<a>b</a> and much more")) as w:
        client = await w.client()
        [one] = await told(client, "go", stop=["</a>"])
        report = await w.finish()
        assert report.trajectory is not None
        assert one["prompt"] + one["ids"] == report.trajectory.rows[0].tokens_T.tolist()
        assert len(one["logprobs"]) == len(one["ids"])


async def test_an_answer_that_was_not_sampled_has_no_tokens(model_dir: Path) -> None:
    async with world(model_dir, Lines("Well.")) as w:
        client = await w.client(spec={"budgets": Budgets(max_turns=1)})
        await client.say("go")
        answer = json.loads((await client.say("on", **ASKED)).raw)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == FINAL_TEXT
        assert (answer["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == (None, None, None)


async def test_the_session_log_is_the_same_whatever_a_request_asks_to_be_told(model_dir: Path, tmp_path: Path) -> None:
    async def play(folder: Path, **asked: Any) -> None:
        async with world(model_dir, Lines(*TURNS), session_log_dir=folder) as w:
            client = await w.client()
            await client.say("mend it", **asked)
            await client.say("on", **asked)

    await play(tmp_path / "plain")
    await play(tmp_path / "told", **ASKED)
    assert events_in(tmp_path / "plain") == events_in(tmp_path / "told")


def events_in(folder: Path) -> list[Any]:
    """The events of the only log in a folder."""
    [log] = folder.glob("*.jsonl")
    return [json.loads(line) for line in log.read_bytes().splitlines()[1:]]
