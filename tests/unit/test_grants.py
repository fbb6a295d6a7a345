"""What recipes may name, by the role of the key that submits them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from headrace.actors.cluster.runs import grants
from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.layout import ClusterTerms, config_of, create_run
from headrace.actors.cluster.runs.quotas import Quota, Quotas, load_quotas
from headrace.actors.cluster.runs.records import ApiRole, Caller, Submission
from headrace.actors.errors import ConfigError, RoleTooSmall
from headrace.actors.run.config import RunConfig
from headrace.actors.run.sources import OWN_TABLES
from headrace.buffer.primitives.sections import overlaid
from headrace.policies.miniatures.names import cache_folder

BASE: dict[str, dict[str, Any]] = {
    "model": {"path": "miniature:echo"},
    "sandbox": {"provider": "remote", "remote": {"urls": ["http://127.0.0.1:9"]}},
    "engines": {"backend": "sglang"},
    "agent": {"kind": "loop"},
}
SIMULATED: dict[str, dict[str, Any]] = {
    "engines": {"backend": "simulated"},
    "learner": {"kind": "simulated"},
    "agent": {"kind": "simulated"},
    "sandbox": {"provider": "simulated"},
}
SERVICE = {"url": "http://127.0.0.1:9"}
OPERATE, CODE = (Caller(owner="alice", role=role, key="0123456789ab") for role in (ApiRole.OPERATE, ApiRole.CODE))
PART = "package.parts:Part"
TEXTS = frozenset(
    {
        *("agent.loop.system", "agent.loop.first", "agent.loop.observation", "agent.loop.malformed"),
        *("agent.loop.stop", "agent.loop.context", "agent.loop.judge.service"),
        *("agent.shell.working_directory", "agent.program.in_image", "agent.program.user"),
        *("agent.program.working_directory", "agent.program.prompt", "agent.program.arguments"),
        *("agent.program.environment", "agent.program.model", "agent.mini_swe_agent.python"),
        *("agent.simulated.tools", "agent.simulated.slowdowns.name", "agent.simulated.slowdowns.tool"),
        *("environment.shell.working_directory", "environment.shell.user", "environment.shell.observation"),
        *("environment.shell.timeout_observation", "environment.shell.warnings", "environment.shell.ends"),
        *("environment.terminal.working_directory", "environment.terminal.user", "environment.terminal.observation"),
        *("environment.terminal.timeout_observation", "environment.terminal.warnings", "environment.terminal.ends"),
        *("environment.terminal.environment", "environment.search.retriever", "environment.retail.service"),
        *(
            "gateway.parser",
            "gateway.model_policy",
            "sandbox.e2b.template",
            "sandbox.e2b.metadata_image_key",
            "sandbox.e2b.metadata",
        ),
        *("sandbox.remote.urls", "sandbox.simulated.images", "sandbox.simulated.slowdowns.name"),
        *("sandbox.simulated.slowdowns.tool", "sandbox.pool.warm", "buffer.rule"),
        *("engines.simulated.slowdowns.name", "engines.simulated.slowdowns.tool", "engines.attach", "engines.router"),
        *("learner.slime.model", "push.host", "telemetry.recipe", "telemetry.page", "tasks.sources.name"),
        *("services.url", "services.engine.dtype", "services.model"),
        *("cluster.address", "cluster.roles.control", "cluster.roles.rollout", "cluster.roles.engine"),
        "cluster.roles.learner",
        # Settings of a part go to a part that is registered, and tables of sources are checked as those of the run.
        *("agent.settings", "environment.settings", "sandbox.settings", "services.settings"),
        *(f"tasks.sources.{table}" for table in OWN_TABLES),
    }
)
"""Keys whose texts are not run, imported or opened outside of sandboxes: prompts, names, URLs, commands there."""


def keys_with_text(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key whose value can be text, and its type; tables with names of the user's have none."""
    for name, field in model.model_fields.items():
        below = list(models_in(field.annotation))
        for kind in below:
            yield from keys_with_text(kind, f"{above}{name}.")
        if not below and any(kind in str(field.annotation) for kind in ("str", "Path", "Any")):
            yield f"{above}{name}", str(field.annotation)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def test_every_key_with_text_is_classified() -> None:
    """A new key that names something must get its place in `grants`, or be known here to be harmless."""
    checked = {*grants.PARTS, *grants.FOLDERS, *map(".".join, grants.SECRETS), *grants.FLAGS, *grants.URLS}
    known = {key.replace(".*", "") for key in (*checked, *grants.CODE)} | TEXTS
    found = dict(keys_with_text(RunConfig))
    # A path is refused unless `grants` knows better.
    assert {key for key, kind in found.items() if "Path" not in kind} - known == set()
    assert known - found.keys() == set()


def rights(caller: Caller = OPERATE, **grant: Any) -> Rights:
    return Rights(owner="alice", caller=caller, quotas=Quotas(owners={"alice": Quota(**grant)}))


def check(recipe: dict[str, dict[str, Any]], allowed: Rights) -> RunConfig:
    terms = ClusterTerms(state=Path("/state"), storage=Path("/storage"))
    return config_of(overlaid(BASE, recipe), terms, "0" * 32, allowed, rollout_nodes=1)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"services": {"x": {"kind": PART, "settings": {"args": ["touch"]}}}},
            r"services\.x\.kind .* retriever, model",
        ),
        ({"agent": {"kind": PART}}, r"agent\.kind .* import path .* claude-code"),
        ({"agent": {"loop": {"judge": {"rule": PART}}}}, r"agent\.loop\.judge\.rule"),
        ({"environment": {"kind": PART}}, r"environment\.kind .* retail"),
        ({"sandbox": {"provider": PART}}, r"sandbox\.provider .* e2b"),
        ({"learner": {"objective": PART}}, r"learner\.objective .* grpo"),
        ({"engines": {"sglang": {"python": "/tmp/python"}}}, r"engines\.sglang\.python"),
        ({"engines": {"sglang": {"arguments": ["--a=1"]}}}, "has --a=1, which is not in"),
        (
            {"learner": {"slime": {"arguments": ["--custom-loss-path", "a.b"]}}},
            "--custom-loss-path",
        ),
        ({"learner": {"slime": {"environment": {"LD_PRELOAD": "/x"}}}}, r"slime\.environment"),
        ({"learner": {"slime": {"slime_dir": "/x", "megatron_dir": "/y"}}}, r"learner\.slime\.slime_dir"),
        ({"agent": {"program": {"folder": "/root"}}}, r"agent\.program\.folder"),
        ({"services": {"x": SERVICE | {"key_file": "/root/.ssh/id"}}}, r"services\.x\.key_file .* secret:NAME"),
        ({"engines": {"key_file": "/etc/shadow"}}, r"engines\.key_file .* secret:NAME"),
        ({"sandbox": {"remote": {"key_file": "/k"}}}, r"sandbox\.remote\.key_file"),
        ({"sandbox": {"e2b": {"api_key_file": "/k"}}}, r"sandbox\.e2b\.api_key_file"),
        ({"sandbox": {"e2b": {"api_url": "http://mine"}}}, "credentials of the nodes"),
        ({"telemetry": {"otlp_endpoint": "http://mine:4318/v1/traces"}}, "credentials of the nodes"),
        ({"telemetry": {"page_key_file": "/k"}}, r"telemetry\.page_key_file"),
        ({"model": {"path": "/root"}}, r"model\.path .* `folders` \(none\)"),
        ({"tasks": {"train": "/a.jsonl", "heldout": "/b.jsonl"}}, r"tasks\.train"),
        ({"environment": {"retail": {"data": "/root"}}}, r"environment\.retail\.data"),
    ],
)
def test_a_recipe_without_the_role_code_names_no_code_and_no_file(
    recipe: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(RoleTooSmall, match=message) as refused:
        check(recipe, rights())
    assert "the role code is needed, and this is key 0123456789ab (operate) of alice" in str(refused.value)
    assert "\n" not in str(refused.value)
    check(recipe, rights(CODE))


def test_a_source_is_checked_like_the_run() -> None:
    source = {"name": "one", "share": 1.0, "agent": {"loop": {"judge": {"rule": PART}}}}
    with pytest.raises(RoleTooSmall, match=r"tasks\.sources\.one\.agent\.loop\.judge\.rule"):
        check({"tasks": {"sources": [source]}}, rights())


@pytest.mark.parametrize(
    ("grant", "recipe"),
    [
        ({"parts": (PART,)}, {"services": {"x": {"kind": PART}}}),
        (
            {"flags": ("--tp", "--ep")},
            {"engines": {"sglang": {"arguments": ["--tp", "-1", "--ep=2"]}}},
        ),
        ({"urls": ("http://own:4318",)}, {"telemetry": {"otlp_endpoint": "http://own:4318/v1/traces"}}),
    ],
)
def test_what_an_operator_lists_may_be_named(grant: dict[str, Any], recipe: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(RoleTooSmall):
        check(recipe, rights())
    check(recipe, rights(**grant))


def test_urls_match_whole_hosts_and_arguments_begin_with_a_flag() -> None:
    with pytest.raises(RoleTooSmall, match="not in `urls`"):
        check({"telemetry": {"otlp_endpoint": "http://own:43180/v1/traces"}}, rights(urls=("http://own:4318",)))
    with pytest.raises(RoleTooSmall, match="has model, which"):
        arguments = ["model", "--tp", "1"]
        check({"engines": {"sglang": {"arguments": arguments}}}, rights(flags=("--tp",)))


def test_folders_hold_where_links_lead(tmp_path: Path) -> None:
    listed, other = tmp_path / "listed", tmp_path / "other"
    for folder in (listed / "model", other):
        folder.mkdir(parents=True)
    (listed / "link").symlink_to(other)
    (tmp_path / "alias").symlink_to(listed)
    allowed = rights(folders=(tmp_path / "alias",))
    for path in (tmp_path / "alias" / "model", listed / "model"):
        assert check({"model": {"path": str(path)}}, allowed).model.path == listed / "model"
    for path in (listed / "link", f"{listed}/model/../../other", other, f"{listed}-2"):
        with pytest.raises(RoleTooSmall, match=r"model\.path"):
            check({"model": {"path": str(path)}}, allowed)
    check({"model": {"path": "miniature:echo"}}, rights())
    for path in ("miniature:echo/../../../../root", f"{cache_folder()}/../../../root", "./miniature:x"):
        with pytest.raises(RoleTooSmall, match=r"model\.path"):
            check({"model": {"path": path}}, rights())
    with pytest.raises(RoleTooSmall, match=r"tasks\.train"):
        check({"tasks": {"train": ".", "heldout": "."}}, rights())


def test_links_inside_a_folder_lead_nowhere_else(tmp_path: Path) -> None:
    shop, secret = tmp_path / "data" / "shop", tmp_path / "secret"
    shop.mkdir(parents=True)
    secret.touch()
    (tmp_path / "data" / "blob").touch()
    (shop / "db.json").symlink_to(tmp_path / "data" / "blob")
    recipe = {"environment": {"retail": {"data": str(shop)}}}
    allowed = rights(folders=(tmp_path / "data",))
    check(recipe, allowed)
    (shop / "wiki.md").symlink_to(secret)
    with pytest.raises(RoleTooSmall, match=r"environment\.retail\.data"):
        check(recipe, allowed)


def test_a_model_that_names_code_needs_the_role_with_slime(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"\\u0061uto_map": {"AutoConfig": "evil.Config"}}')
    recipe = {"model": {"path": str(tmp_path)}, "learner": {"kind": "slime"}}
    recipe |= {"engines": {"device": "cuda"}, "push": {"transport": "disk"}}
    with pytest.raises(RoleTooSmall, match="auto_map"):
        check(recipe, rights(folders=(tmp_path,)))
    (tmp_path / "config.json").write_text("{}")
    check(recipe, rights(folders=(tmp_path,)))


def test_secrets_are_those_of_the_owner(tmp_path: Path) -> None:
    (tmp_path / "alice-key").write_text("0123456789abcdef\n")
    for owner in ("alice", "bob"):
        (tmp_path / owner).mkdir()
    (tmp_path / "alice" / "alice").symlink_to(tmp_path / "alice-key")
    (tmp_path / "bob" / "bob").write_text("0123456789abcdef\n")
    recipe = {"services": {"x": SERVICE | {"key_file": "secret:alice"}}}
    allowed = Rights(owner="alice", caller=OPERATE, quotas=Quotas(secrets=tmp_path))
    config = check(recipe, allowed)
    assert config.services["x"].key_file == tmp_path / "alice" / "alice"
    # The driver checks the configuration that is recorded.
    allowed.check_recipe(config)
    for name in ("bob", "wbe"):
        with pytest.raises(ConfigError, match=r"alice has no such secret \(alice\)"):
            check({"services": {"x": SERVICE | {"key_file": f"secret:{name}"}}}, allowed)
    for name in ("../bob/bob", "", "/etc/shadow", "alice/../../bob/bob"):
        for key_file in (f"secret:{name}", f"./secret:{name}", "./secret:alice", str(tmp_path / "bob" / "bob")):
            with pytest.raises(RoleTooSmall, match="named as secret:NAME"):
                check({"services": {"x": SERVICE | {"key_file": key_file}}}, allowed)
            with pytest.raises(RoleTooSmall, match="named as secret:NAME"):
                check({"sandbox": {"e2b": {"api_key_file": key_file}}}, allowed)
        with pytest.raises(ConfigError, match=r"alice has no such secret \(alice\)"):
            check({"engines": {"key_file": f"secret:{name}"}}, replace(allowed, caller=CODE))


def test_the_folder_of_secrets_is_no_folder_of_data(tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"
    for folder in ("/etc/headrace", "/etc/headrace/secrets", "/etc/headrace/secrets/alice"):
        path.write_text(f'secrets = "/etc/headrace/secrets"\n[owners.alice]\nfolders = ["{folder}"]\n')
        with pytest.raises(ConfigError, match="could read /etc/headrace/secrets as data"):
            load_quotas(path)
    path.write_text('[default]\nfolders = ["data"]\n')
    with pytest.raises(ConfigError, match="must be an absolute path"):
        load_quotas(path)
    path.write_text('[default]\nfolders = ["/data"]\nruns = 2\n[owners.alice]\nruns = 3\n')
    assert load_quotas(path).of("alice").folders == (Path("/data"),)


@pytest.mark.parametrize("evaluator", [{"kind": "plugin", "plugin": PART}, {"kind": "function", "function": PART}])
def test_functions_of_tasks_need_the_role_before_they_are_imported(tmp_path: Path, evaluator: dict[str, Any]) -> None:
    import orjson

    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "heldout"):
        task = {"id": name, "family": "f", "instruction": f"do {name}", "files": {}, "evaluator": evaluator}
        (data / f"{name}.jsonl").write_bytes(orjson.dumps(task) + b"\n")
    recipe = SIMULATED | {"tasks": {name: str(data / f"{name}.jsonl") for name in ("train", "heldout")}}
    terms = ClusterTerms(state=tmp_path / "state", storage=tmp_path / "storage")
    submission = Submission(name="run", owner="alice", recipe=recipe, idempotency_key="k")
    allowed = rights(folders=(data,))
    config = config_of(recipe, terms, "0" * 32, allowed, rollout_nodes=1)
    with pytest.raises(RoleTooSmall, match=rf"task train: evaluator\.{evaluator['kind']} 'package.parts:Part'"):
        create_run(config, terms.directory("0" * 32), submission, allowed)
    assert not list(terms.storage.iterdir())
