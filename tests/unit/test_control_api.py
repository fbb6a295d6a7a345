"""Routes of the control API, called in process: roles, owners, errors, limits."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.cluster.api import refusals
from headrace.actors.cluster.api.bodies import MAX_BODY_BYTES, MAX_DEPTH
from headrace.actors.cluster.runs.quotas import Quota, Quotas
from headrace.actors.cluster.runs.records import ActualState, RunId
from headrace.actors.errors import ActorLost, ActorMissing, CannotBePlaced, RunsMissing
from headrace.buffer.errors import LedgerRefused
from headrace.policies.errors import ModelInvalid
from support.control_rig import Answer, ControlRig, malformed
from support.runs_without_services import ALICE, NODE, RECIPE

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "0" * 32
OPEN = ("/healthz", "/v1/runs/{run}/page", "/v1/runs/{run}/page/login")
TRAINER_ROUTES = ("take", "commit", "release", "weights")


@pytest.fixture
def rig(tmp_path: Path) -> ControlRig:
    return ControlRig(tmp_path)


async def submit(rig: ControlRig, name: str = "a", *, key: str = "alice", **recipe: Any) -> RunId:
    answer = await rig.call(
        "POST", "/v1/runs", {"name": name, "recipe": {**RECIPE, **recipe}}, key=key, idempotency_key=f"{key}-{name}"
    )
    assert answer.status == 201, answer.body
    return RunId(answer.document["run_id"])


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ({"kind": "subprocess:Popen", "settings": {"args": ["touch"]}}, "registered are retriever, model, reward"),
        ({"url": "http://127.0.0.1:9", "key_file": "/etc/shadow", "retry": {"total_s": 5}}, "named as secret:NAME"),
    ],
)
async def test_a_recipe_that_names_code_or_a_file_needs_the_role_code(
    rig: ControlRig, service: dict[str, Any], message: str
) -> None:
    body = {"name": "a", "recipe": {**RECIPE, "services": {"x": service}}}
    refused = await rig.call("POST", "/v1/runs", body, idempotency_key="k")
    assert (refused.status, refused.code) == (403, "role_too_small")
    assert message in refused.document["error"]["message"]
    assert (await rig.runs.runs(ALICE)) == ()
    accepted = await rig.call("POST", "/v1/runs", body, key="alice-code", idempotency_key="k")
    assert (accepted.status, accepted.document["names_code"]) == (201, True)


async def test_a_run_is_submitted_once_per_key(rig: ControlRig) -> None:
    body = {"name": "a", "recipe": RECIPE}
    first = await rig.call("POST", "/v1/runs", body, idempotency_key="k")
    again = await rig.call("POST", "/v1/runs", body, idempotency_key="k")
    assert (first.status, again.status) == (201, 201)
    assert again.document["run_id"] == first.document["run_id"]
    other = await rig.call("POST", "/v1/runs", {**body, "name": "b"}, idempotency_key="k")
    assert (other.status, other.code) == (409, "submission_conflict")
    same_name = await rig.call("POST", "/v1/runs", body, idempotency_key="k2")
    assert (same_name.status, same_name.code) == (409, "run_refused")
    missing = await rig.call("POST", "/v1/runs", body)
    assert (missing.status, missing.code) == (400, "idempotency_key_missing")


async def test_the_owner_is_that_of_the_key(rig: ControlRig) -> None:
    run = await submit(rig)
    record = (await rig.call("GET", f"/v1/runs/{run}")).document
    assert (record["owner"], record["name"], record["actual"]) == ("alice", "a", "starting")
    assert record["demands"]["engines"] == 2


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/status"),
        ("GET", "/report"),
        ("GET", "/events"),
        ("GET", "/logs"),
        ("GET", "/engines"),
        ("POST", "/drain"),
        ("POST", "/stop"),
        ("POST", "/resume"),
        ("POST", "/upgrade"),
        ("POST", "/engines"),
        ("DELETE", "/engines/e"),
    ],
)
async def test_a_run_of_another_owner_does_not_exist(rig: ControlRig, method: str, path: str) -> None:
    run = await submit(rig)
    foreign = await rig.call(
        method, f"/v1/runs/{run}{path}", {"url": "http://h:1"} if path == "/engines" else {}, key="bob"
    )
    absent = await rig.call(method, f"/v1/runs/{ABSENT}{path}", key="bob")
    malformed = await rig.call(method, f"/v1/runs/x{path}", key="bob")
    assert (foreign.status, foreign.code) == (404, "run_unknown")
    assert foreign.body == absent.body.replace(ABSENT.encode(), run.encode())
    assert (malformed.status, malformed.code) == (404, "run_unknown")
    assert (await rig.runs.run(ALICE, run)).actual is ActualState.STARTING


async def test_an_admin_sees_the_runs_of_all_owners(rig: ControlRig) -> None:
    runs = [await submit(rig, key=key) for key in ("alice", "bob")]
    seen = {
        key: [run["run_id"] for run in (await rig.call("GET", "/v1/runs", key=key)).document["runs"]]
        for key in ("alice-read", "bob", "root")
    }
    assert seen == {"alice-read": runs[:1], "bob": runs[1:], "root": runs}
    assert (await rig.call("POST", f"/v1/runs/{runs[0]}/stop", key="root")).document["actual"] == "stopped"


async def test_a_key_for_reading_changes_nothing(rig: ControlRig) -> None:
    run = await submit(rig)
    for method, path in (
        ("POST", "/v1/runs"),
        ("POST", f"/v1/runs/{run}/drain"),
        ("POST", f"/v1/runs/{run}/stop"),
        ("POST", f"/v1/runs/{run}/resume"),
        ("POST", f"/v1/runs/{run}/engines"),
        ("DELETE", f"/v1/runs/{run}/engines/e"),
        *(("POST", f"/v1/runs/{run}/{name}") for name in TRAINER_ROUTES),
    ):
        answer = await rig.call(method, path, key="alice-read", idempotency_key="k")
        assert (answer.status, answer.code) == (403, "role_too_small")
    assert (await rig.call("GET", f"/v1/runs/{run}/status", key="alice-read")).status == 200
    assert (await rig.runs.run(ALICE, run)).actual is ActualState.STARTING


async def test_requests_without_a_valid_key_are_refused(rig: ControlRig) -> None:
    routes = [(method, path.replace("{run}", ABSENT)) for method, path in _routes(rig) if path not in OPEN]
    assert len(routes) > 12
    for method, path in routes:
        if path == "/readyz":
            path = f"/readyz?run={ABSENT}"
        missing = await rig.call(method, path, key="")
        wrong = await rig.call(method, path, key="nobody")
        other_scheme = await rig.call(method, path, key="", authorization="Basic alice")
        assert (missing.status, missing.code, missing.headers["www-authenticate"]) == (401, "key_missing", "Bearer")
        assert (wrong.status, wrong.code) == (401, "key_wrong")
        assert other_scheme.code == "key_missing"


def _routes(rig: ControlRig) -> list[tuple[str, str]]:
    return [(method, route.path) for route in rig.app.routes for method in route.methods - {"HEAD"}]  # type: ignore[attr-defined]


async def test_a_refused_key_file_is_503_without_its_path(rig: ControlRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.key_file.chmod(0o644)
    answer = await rig.call("GET", "/v1/runs")
    assert (answer.status, answer.code) == (503, "keys_refused")
    assert str(rig.key_file).encode() not in answer.body
    assert f"chmod 600 {rig.key_file}" in caplog.text


async def test_a_run_is_drained_resumed_and_stopped(rig: ControlRig) -> None:
    run = await submit(rig)
    assert (await rig.call("POST", f"/v1/runs/{run}/drain")).document["actual"] == "drained"
    resumed = await rig.call("POST", f"/v1/runs/{run}/resume", {"changes": ["training.steps=7"]})
    assert (resumed.status, resumed.document["actual"]) == (200, "starting")
    twice = await rig.call("POST", f"/v1/runs/{run}/resume")
    assert (twice.status, twice.code) == (409, "run_refused")
    assert (await rig.call("POST", f"/v1/runs/{run}/stop")).document["actual"] == "stopped"
    wrong = await rig.call("POST", f"/v1/runs/{run}/resume", {"changes": ["training.stepz=7"]})
    assert (wrong.status, wrong.code) == (400, "config_invalid")
    assert "training.stepz" in wrong.document["error"]["message"]


async def test_engines_are_listed_added_and_removed(rig: ControlRig) -> None:
    run = await submit(rig)
    added = await rig.call("POST", f"/v1/runs/{run}/engines", {"url": "http://h:1"})
    assert added.document == {"engine_id": "added-1", "done": "add"}
    engines = (await rig.call("GET", f"/v1/runs/{run}/engines")).document["engines"]
    assert [(engine["engine_id"], engine["state"], engine["url"]) for engine in engines] == [
        ("added-1", "serving", "http://h:1")
    ]
    assert (await rig.call("DELETE", f"/v1/runs/{run}/engines/added-1")).status == 200
    gone = await rig.call("DELETE", f"/v1/runs/{run}/engines/added-1")
    assert (gone.status, gone.code) == (404, "engine_unknown")


async def test_logs_are_read_page_by_page(rig: ControlRig) -> None:
    run = await submit(rig)
    for number in range(20):
        await rig.runs.note(run, f"note {number}")
    lines, cursor = [], ""
    while page := (await rig.call("GET", f"/v1/runs/{run}/logs?limit_bytes=300&after={cursor}")).document:
        if not page["lines"]:
            break
        assert len(page["lines"]) <= 4
        lines += page["lines"]
        cursor = page["cursor"]
    assert [orjson.loads(line)["number"] for line in lines] == list(range(1, 23))
    wrong = await rig.call("GET", f"/v1/runs/{run}/logs?actor=nobody")
    assert (wrong.status, wrong.code) == (409, "run_refused")


async def test_readiness_names_what_is_not_ready(rig: ControlRig) -> None:
    assert (await rig.call("GET", "/healthz", key="")).document == {"ok": True}
    assert (await rig.call("GET", "/readyz", key="")).document == {"ready": True}
    run = await submit(rig)
    not_ready = await rig.call("GET", f"/readyz?run={run}", key="alice-read")
    assert not_ready.status == 503
    assert (not_ready.document["ready"], not_ready.document["problems"]) == (False, ["no engine serves"])
    await rig.runs.add_engine(ALICE, run, "http://h:1", 1.0)
    await rig.runs.go(run, ActualState.RUNNING)
    ready = await rig.call("GET", f"/readyz?run={run}", key="alice-read")
    assert (ready.status, ready.document["ready"]) == (200, True)
    assert (await rig.call("GET", f"/readyz?run={run}", key="bob")).code == "run_unknown"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RunsMissing("start it"), 404, "runs_missing"),
        (ActorMissing("there is no actor named runs"), 404, "runs_missing"),
        (ActorLost("the handle"), 503, "runs_away"),
        (TimeoutError("of a call"), 503, "runs_away"),
        (CannotBePlaced("no node has the label headrace/role=engine"), 409, "cannot_be_placed"),
        (ModelInvalid("no config.json"), 400, "input_invalid"),
        (LedgerRefused("state on NFS"), 400, "input_invalid"),
        (OSError("no space"), 500, "internal"),
    ],
)
async def test_errors_of_the_service_have_a_status_and_a_code(
    rig: ControlRig, error: Exception, status: int, code: str
) -> None:
    rig.runs.error = error
    answer = await rig.call("GET", "/v1/runs")
    assert (answer.status, answer.code) == (status, code)
    assert (await rig.call("GET", "/readyz", key="")).status == status
    assert ("retry-after" in answer.headers) == (status == 503)
    # What is unexpected may contain anything, so it is logged and not sent.
    is_shown = status not in (500, 503) and not isinstance(error, ActorMissing)
    assert (str(error) in answer.document["error"]["message"]) == is_shown


async def test_a_run_above_its_quota_is_refused_and_others_wait_in_order(tmp_path: Path) -> None:
    rig = ControlRig(tmp_path, Quotas(default=Quota(runs=1, engines=4)))
    big = await rig.call(
        "POST",
        "/v1/runs",
        {"name": "big", "recipe": {**RECIPE, "engines": {"backend": "simulated", "count": 5}}},
        idempotency_key="k",
    )
    assert (big.status, big.code) == (403, "quota_exceeded")
    first, second = await submit(rig, "first"), await submit(rig, "second")
    other = await submit(rig, "first", key="bob")
    waiting = (await rig.call("GET", f"/v1/runs/{second}")).document
    assert waiting["actual"] == "waiting"
    assert waiting["reason"].startswith("needs runs 1; the quota of alice is 1, held: 1 by first (")
    assert (await rig.runs.run(ALICE, other)).actual is ActualState.STARTING
    await rig.call("POST", f"/v1/runs/{first}/stop")
    assert (await rig.call("GET", f"/v1/runs/{second}")).document["actual"] == "starting"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "name is missing"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"name": "a", "recipe": {"a": {"b": NaN}}}', "not valid JSON"),
        (b'{"name": "a", "recipe": {"a": {"b": "\\ud800"}}}', "not valid JSON"),
        ({"name": "a", "recipe": {}, "owner": "bob"}, "unknown key owner"),
        ({"name": "a b", "recipe": {}}, "name: String should match"),
        ({"name": 7, "recipe": {}}, "name: Input should be a valid string"),
        ({"name": "a", "recipe": {"model": 7}}, "recipe.model: Input should be an object"),
    ],
)
async def test_malformed_submissions_are_refused_in_one_line(rig: ControlRig, body: Any, message: str) -> None:
    answer = await rig.call("POST", "/v1/runs", body, idempotency_key="k")
    assert (answer.status, answer.code) == (400, "body_invalid")
    assert message in answer.document["error"]["message"]
    assert "\n" not in answer.document["error"]["message"]


LEASE = "a" * 32


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("take", {"version": "one"}, "version: String should match"),
        ("take", {"timeout_s": 61}, "timeout_s: Input should be less than or equal to 60"),
        ("commit", {}, "lease is missing: set it"),
        ("commit", {"lease": LEASE, "metrics": {"loss": "low"}}, "metrics.loss: Input should be a valid number"),
        ("commit", {"lease": "../x"}, "lease: String should match"),
        ("release", {"lease": LEASE, "refused": ["r-1"]}, "refused: Input should be an object"),
        ("weights", {"version": "1.1"}, "name a directory, or set pushed to true"),
        ("weights", {"version": "1.1", "directory": "weights"}, "directory: String should match"),
    ],
)
async def test_a_trainer_s_malformed_bodies_are_refused_in_one_line(
    rig: ControlRig, route: str, body: Any, message: str
) -> None:
    run = await submit(rig)
    answer = await rig.call("POST", f"/v1/runs/{run}/{route}", body)
    assert (answer.status, answer.code) == (400, "body_invalid")
    assert message in answer.document["error"]["message"]
    assert "\n" not in answer.document["error"]["message"]


@pytest.mark.parametrize(("key", "status", "code"), [("alice", 409, "run_refused"), ("bob", 404, "run_unknown")])
async def test_a_run_that_trains_by_itself_has_no_trainer(rig: ControlRig, key: str, status: int, code: str) -> None:
    run = await submit(rig)
    answer = await rig.call("POST", f"/v1/runs/{run}/take", {}, key=key)
    assert (answer.status, answer.code) == (status, code)


async def test_an_unknown_key_of_a_recipe_is_named(rig: ControlRig) -> None:
    body = {"name": "a", "recipe": {**RECIPE, "buffer": {"max_stalenes": 1}}}
    answer = await rig.call("POST", "/v1/runs", body, idempotency_key="k")
    assert (answer.status, answer.code) == (400, "config_invalid")
    assert "buffer.max_stalenes; did you mean buffer.max_staleness?" in answer.document["error"]["message"]


async def test_large_and_deep_bodies_are_refused(rig: ControlRig) -> None:
    large = await rig.call("POST", "/v1/runs", b" " * (MAX_BODY_BYTES + 1), idempotency_key="k")
    assert (large.status, large.code) == (413, "body_too_large")
    nested = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    deep = await rig.call(
        "POST", "/v1/runs", b'{"name": "a", "recipe": {"a": {"b": %s}}}' % nested, idempotency_key="k"
    )
    assert (deep.status, deep.code) == (400, "body_invalid")
    assert "nested" in deep.document["error"]["message"]


async def test_a_body_is_not_read_without_a_key(rig: ControlRig) -> None:
    answer = await rig.call("POST", "/v1/runs", b" " * (MAX_BODY_BYTES + 1), key="nobody")
    assert answer.status == 401


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/v1/runs?state=x", "unknown query parameter 'state'"),
        ("/v1/runs/RUN/logs?limit_bytes=-1", "limit_bytes: Input should be greater than or equal to 0"),
        ("/v1/runs/RUN/logs?limit_bytes=99999999", "limit_bytes: Input should be less than or equal to 4194304"),
        ("/v1/runs/RUN/logs?actor=a&actor=b", "came twice"),
    ],
)
async def test_wrong_query_parameters_are_refused(rig: ControlRig, target: str, message: str) -> None:
    run = await submit(rig)
    answer = await rig.call("GET", target.replace("RUN", run))
    assert (answer.status, answer.code) == (400, "query_invalid")
    assert message in answer.document["error"]["message"]


async def test_unknown_routes_are_refused_as_json(rig: ControlRig) -> None:
    for method, path, status in (("GET", "/", 404), ("GET", "/docs", 404), ("PUT", "/v1/runs", 405)):
        answer = await rig.call(method, path)
        assert (answer.status, answer.code) == (status, "route_unknown")


def test_the_page_lists_every_route_and_every_code(rig: ControlRig) -> None:
    page = (ROOT / "docs" / "control_api.md").read_text()
    assert set(re.findall(r"^\| (GET|POST|DELETE) `(\S+)` \|", page, re.MULTILINE)) == set(_routes(rig))
    sources = "".join(path.read_text() for path in (ROOT / "actors" / "cluster" / "api").glob("*.py"))
    codes = set(re.findall(r'(?:Refusal|refused)\(\s*(?:\d+|status), "(\w+)"', sources))
    codes |= {code for _, _, code in refusals.CODES} | {refusals.INTERNAL}
    errors = page.split("## Errors")[1].split("## Quotas")[0]
    assert codes == set(re.findall(r"`([a-z]+_[a-z_]+|internal|unavailable)`", errors))


async def test_only_admins_see_and_drain_nodes(rig: ControlRig) -> None:
    run = await submit(rig)
    for method, path in (("GET", "/v1/nodes"), ("POST", f"/v1/nodes/{NODE.address}/drain")):
        refused = await rig.call(method, path)
        assert (refused.status, refused.code) == (403, "role_too_small")
    [node] = (await rig.call("GET", "/v1/nodes", key="root")).document["nodes"]
    assert (node["address"], node["runs"]) == (NODE.address, [run])
    drained = await rig.call("POST", f"/v1/nodes/{NODE.address}/drain", {"deadline_s": 5}, key="root")
    assert list(drained.document["runs"]) == [run]
    unknown = await rig.call("POST", "/v1/nodes/10.9.9.9/drain", {}, key="root")
    assert (unknown.status, unknown.code) == (400, "config_invalid")
    for wrong in ({"deadline_s": -1}, {"deadline_s": "x"}, {"until": 1}):
        assert (await rig.call("POST", f"/v1/nodes/{NODE.node}/drain", wrong, key="root")).code == "body_invalid"


@pytest.mark.whole
async def test_ten_thousand_malformed_bodies_are_all_refused(rig: ControlRig) -> None:
    """Seeded, so that a failure can be repeated."""
    chance = random.Random(18)
    run = await submit(rig)
    for number in range(10_000):
        body = malformed(chance)
        path = chance.choice(["", *(f"/{run}/{name}" for name in ("resume", "engines", *TRAINER_ROUTES))])
        answer = await rig.call("POST", f"/v1/runs{path}", body, idempotency_key=f"k{number}")
        assert answer.status < 500, (number, path, body, answer.body)
        _check_error(answer, body)


def _check_error(answer: Answer, body: bytes) -> None:
    if answer.status >= 400:
        error = answer.document["error"]
        assert set(error) == {"code", "message"}
        assert "\n" not in error["message"], (body, error)
