"""Exports of finished sessions over HTTP, and the folder into which a gateway writes them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import Budgets, SessionId
from headrace.serve.gateway.errors import OptionRefused
from headrace.serve.gateway.exports.export_form import ExportForm
from headrace.serve.gateway.http import exports
from support.full_disks import files_of_at_most
from support.gateway_rig import ADMIN, WIRES, Client, Lines, Wire, World, call_text, world

FORMS = pytest.mark.parametrize("form", ExportForm)
TURNS = (
    "<think>\nI should look.\n</think>\n\nI look.\n" + call_text("bash", command="ls  é"),
    call_text("bash", command="a") + "\n" + call_text("edit", path="x", replace_all=False),
    "Half of it is\n\ndone.  ",
    "All of it.",
)


async def get(w: World, session: str, form: str = "", *, token: str = ADMIN) -> tuple[int, Any]:
    query = f"?form={form}" if form else ""
    headers = {"Authorization": f"Bearer {token}"}
    async with w.http.get(f"{w.url}/sessions/{session}/export{query}", headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


def files(folder: Path) -> dict[str, Any]:
    """The names of a folder's files, with their documents."""
    return {path.name: json.loads(path.read_bytes()) for path in sorted(folder.iterdir())}


async def play(client: Client) -> None:
    """Four turns, with a call, two parallel calls, and text."""
    reply = await client.say("mend it")
    reply = await client.give((reply.calls[0][0], "a.txt"))
    await client.give((reply.calls[0][0], "done"), (reply.calls[1][0], ""))
    await client.say("go on")


# Routes.


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_a_finished_session_is_exported_in_every_form(model_dir: Path, tmp_path: Path, wire: Wire) -> None:
    async with world(model_dir, Lines(*TURNS), session_log_dir=tmp_path) as w:
        await play(await w.client(wire, tools=("bash", "edit")))
        status, report = await w.post("/sessions/rollout-1/finish", {"tree": True})
        assert status == 200
        sampled = w.engines[0].sampled
        prompts, outputs = [list(one.prompt_ids) for one in sampled], w.engines[0].outputs()
        status, rows = await get(w, "rollout-1")
        assert status == 200
        tree = report.pop("tree")
        assert {name: rows[name] for name in report} == report
        assert [{name: turn[name] for name in old} for turn, old in zip(rows["tree"], tree, strict=True)] == tree
        assert [turn["sampled_ids"] for turn in rows["tree"]] == outputs
        [detail] = (await get(w, "rollout-1", "rollout-details"))[1]
        assert detail["prompt_token_ids"] == prompts
        assert detail["completion_token_ids"] == outputs
        assert detail["logprobs"] == [list(one.logprobs) for one in w.engines[0].sampled]
        _, atif = await get(w, "rollout-1", "atif")
        steps = atif["steps"]
        assert [step["source"] for step in steps] == ["system", "user", "agent", "agent", "agent", "user", "agent"]
        own = [step for step in steps if step["source"] == "agent"]
        assert [step["metrics"]["prompt_token_ids"] for step in own] == prompts
        assert [step["metrics"]["completion_token_ids"] for step in own] == outputs
        assert [step["metrics"]["cached_tokens"] for step in own] == [1] * 4
        assert own[0]["reasoning_content"] == "I should look."
        assert [call["function_name"] for call in own[1]["tool_calls"]] == ["bash", "edit"]
        assert own[2]["message"] == TURNS[2], "also of a turn that the agent has accepted"


async def test_what_cannot_be_exported_is_refused(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), session_log_dir=tmp_path) as w:
        client = await w.client()
        await client.say("go")
        status, refused = await get(w, "rollout-1")
        assert (status, refused["error"]["code"]) == (409, "session_unfinished")
        status, refused = await get(w, "never")
        assert (status, refused["error"]["code"]) == (404, "unknown_session")
        await w.finish()
        assert (await get(w, "rollout-1"))[0] == 200
        status, refused = await get(w, "rollout-1", "parquet")
        assert (status, refused["error"]["param"]) == (400, "form")
        assert "rows, atif, rollout-details" in refused["error"]["message"]
        assert (await get(w, "rollout-1", token="wrong"))[0] == 401
        await w.http.delete(f"{w.url}/sessions/rollout-1", headers={"Authorization": f"Bearer {ADMIN}"})
        assert (await get(w, "rollout-1"))[0] == 404


async def test_without_session_logs_the_refusal_names_the_option(model_dir: Path) -> None:
    async with world(model_dir, Lines("Well.")) as w:
        await (await w.client()).say("go")
        await w.finish()
        status, refused = await get(w, "rollout-1")
        assert (status, refused["error"]["code"]) == (404, "unknown_session")
        assert "--state" in refused["error"]["message"]


async def test_an_unread_session_of_an_earlier_gateway_is_unfinished(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), session_log_dir=tmp_path) as w:
        await (await w.client()).say("go")
        await (await w.client(session_id="done")).say("go")
        await w.finish("done")
    async with world(model_dir, session_log_dir=tmp_path) as w:
        assert (await get(w, "rollout-1"))[0] == 409
        assert (await get(w, "done", "rollout-details"))[0] == 200


async def test_a_session_id_with_slashes_is_exported(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), session_log_dir=tmp_path / "s", export_dir=tmp_path / "out") as w:
        name = "run:1/export/finish"
        await (await w.client(session_id=name)).say("go")
        assert (await get(w, name))[0] == 409
        await w.finish(name)
        assert (await get(w, name))[0] == 200
        for other in ("../up", ".."):
            await (await w.client(session_id=other)).say("go")
            await w.finish(other)
        assert list(files(tmp_path / "out")) == ["..%2Fup.json", "...json", "run%3A1%2Fexport%2Ffinish.json"]


@FORMS
async def test_a_client_that_leaves_during_an_export_disturbs_nobody(
    model_dir: Path, tmp_path: Path, form: ExportForm, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(model_dir, Lines("word " * 4000), session_log_dir=tmp_path) as w:
        client = await w.client(spec={"budgets": Budgets(max_tokens_per_turn=20_000, max_context_tokens=60_000)})
        await client.say("go")
        await client.say("and on")
        await w.finish()
        url = f"{w.url}/sessions/rollout-1/export?form={form}"
        headers = {"Authorization": f"Bearer {ADMIN}"}
        left = await w.http.get(url, headers=headers)
        await left.content.readany()
        left.close()
        status, whole = await get(w, "rollout-1", form)
        assert status == 200
        assert len(json.dumps(whole)) > 65_536, "several pieces"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# The folder.


@FORMS
async def test_each_finished_session_has_a_file_before_its_finish_is_answered(
    model_dir: Path, tmp_path: Path, form: ExportForm
) -> None:
    out, state = tmp_path / "a" / "out", tmp_path / "state"
    async with world(model_dir, Lines(*TURNS), session_log_dir=state, export_dir=out, export_form=form) as w:
        await play(await w.client(tools=("bash", "edit")))
        await w.open("empty")
        await w.open("forgotten")
        assert files(out) == {}
        await w.finish()
        written = {"rollout-1.json": (await get(w, "rollout-1", form))[1]}
        assert files(out) == written, "the same that the route gives"
        await w.finish("empty")
        assert files(out) == {"empty.json": (await get(w, "empty", form))[1]} | written
        assert (await w.gateway.in_flight()).failed_exports == 0


async def test_without_session_logs_the_answers_are_kept_for_the_folder(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines(*TURNS), export_dir=tmp_path, export_form=ExportForm.ATIF) as w:
        await play(await w.client(tools=("bash", "edit")))
        await w.finish()
        steps = json.loads((tmp_path / "rollout-1.json").read_bytes())["steps"]
        messages = [step["message"] for step in steps if step["source"] == "agent"]
        assert messages == ["I look.", "", TURNS[2], TURNS[3]]


async def test_a_restarted_gateway_exports_what_it_restored(model_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "session_log_dir": tmp_path / "state", "export_dir": tmp_path / "out", "export_form": ExportForm.ATIF,
    }  # fmt: skip
    async with world(model_dir, Lines(*TURNS), **settings) as w:
        client = await w.client(tools=("bash", "edit"))
        await client.say("mend it")
        await client.say("on")
    (tmp_path / "out" / "rollout-1.json.partial").write_bytes(b"{")
    (tmp_path / "out" / "mine.json").write_bytes(b"{}")
    async with world(model_dir, Lines(*TURNS), **settings) as w:
        assert list(files(tmp_path / "out")) == ["mine.json"], "what a kill left is gone"
        await w.finish()
        steps = json.loads((tmp_path / "out" / "rollout-1.json").read_bytes())["steps"]
        assert [step["message"] for step in steps if step["source"] == "agent"] == ["I look.", ""]


async def test_a_session_that_is_finished_again_is_written_again(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with world(model_dir, Lines("Well."), session_log_dir=tmp_path / "state", export_dir=out) as w:
        await (await w.client()).say("go")
        await w.finish()
        first = (out / "rollout-1.json").read_bytes()
        (out / "rollout-1.json").unlink()
        await w.finish()
        assert (out / "rollout-1.json").read_bytes() == first


async def test_many_sessions_that_are_finished_together_are_all_written(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), export_dir=tmp_path) as w:
        names = [SessionId(f"s-{number}") for number in range(20)]
        for name in names:
            await (await w.client(session_id=name)).say("go")
        # Some of them twice at the same time.
        await asyncio.gather(*map(w.admin.finish, [*names, *names[:3]]))
        found = files(tmp_path)
        assert list(found) == sorted(f"{name}.json" for name in names)
        assert all(document["trained_tokens"] for document in found.values())


async def test_a_long_id_has_a_file_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), export_dir=tmp_path) as w:
        names = [":" * 199 + end for end in "ab"]
        for name in names:
            await (await w.client(session_id=name)).say("go")
            await w.finish(name)
        assert sorted(document["session_id"] for document in files(tmp_path).values()) == names


async def test_a_full_disk_fails_no_finish_and_is_logged_once(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(model_dir, Lines("Well."), export_dir=tmp_path) as w:
        for name in ("a", "b", "c"):
            await (await w.client(session_id=name)).say("go")
        with caplog.at_level(logging.INFO, exports.__name__), files_of_at_most(100):
            assert (await w.finish("a")).turns == 1
            assert (await w.finish("b")).turns == 1
        assert files(tmp_path) == {}, "nothing half written is left"
        [line] = caplog.records
        assert "session a is not exported" in line.getMessage()
        assert line.exc_info is None
        assert (await w.gateway.in_flight()).failed_exports == 2
        await w.finish("c")
        assert list(files(tmp_path)) == ["c.json"]
    assert "2 sessions were not exported" in caplog.records[-1].getMessage()


async def test_a_folder_that_vanished_fails_no_finish(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with world(model_dir, Lines("Well."), export_dir=out) as w:
        await (await w.client()).say("go")
        out.rmdir()
        assert (await w.finish()).turns == 1
        assert (await w.gateway.in_flight()).failed_exports == 1


async def test_an_unusable_folder_is_refused_at_start(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OptionRefused, match=r"--export .*file/out: "):
        async with world(model_dir, export_dir=tmp_path / "file" / "out"):
            pass
    with pytest.raises(OptionRefused, match="--export /proc: "):
        async with world(model_dir, export_dir=Path("/proc")):
            pass
