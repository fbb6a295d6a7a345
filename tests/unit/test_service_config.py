"""Tables of services in a recipe: what is refused, with the key, before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, load_recipe, of_record
from headrace.actors.run.launch import document_of
from headrace.actors.run.parts import recipe_digest
from headrace.actors.services.clients import ServiceClients, check_services, refuse_missing_services
from headrace.actors.services.config import ServiceConfig, ServiceKind
from headrace.sandboxes.host.key_files import make_key

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"
WIKI = '{"id": "0", "contents": "\\"A\\"\\nsome text"}\n'
URL = 'url = "http://127.0.0.1:8000"'


def recipe_with(folder: Path, table: str, name: str = "wiki") -> RunConfig:
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{MODEL}"\n[services.{name}]\n{table}\n')
    return load_recipe(recipe, (), folder / "run")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("", "services.wiki: url and corpus are missing; set url"),
        (f'{URL}\ncorpus = "wiki.jsonl"', "services.wiki: url and corpus are both set; keep url"),
        ('url = "127.0.0.1:8000"', "services.wiki.url: 127.0.0.1:8000 is not an http or https URL; write one"),
        ('url = "ftp://host/"', "services.wiki.url: ftp://host/ is not an http or https URL"),
        ('url = "http://host:port"', "services.wiki.url: http://host:port is not an http or https URL"),
        ('url = "http://"', "services.wiki.url: http:// is not an http or https URL"),
        ('kind = "model"', "services.wiki: url and path are missing; set url"),
        (f'kind = "model"\n{URL}\ncorpus = "wiki.jsonl"', "services.wiki: corpus is for retrievers"),
        (f'kind = "parts:Mine"\n{URL}', "services.wiki: kind parts:Mine takes settings only; move url into settings"),
        (f"{URL}\nsettings = {{a = 1}}", "services.wiki: settings are for classes of other packages"),
        (f"{URL}\nretry.total_s = 600", "services.wiki.retry.total_s 600 is not below rollout.agent_timeout_s 600"),
        (f"{URL}\nmax_concurency = 2", "unknown key services.wiki.max_concurency; did you mean services.wiki.max_con"),
        (f"{URL}\nprice.request = -1", "services.wiki.price.request: "),
    ],
)
def test_a_table_that_cannot_work_is_refused_with_its_key(tmp_path: Path, table: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe_with(tmp_path, table)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.a/b"):
        recipe_with(tmp_path, URL, '"a/b"')


@pytest.mark.parametrize(
    ("corpus", "says"),
    [
        (None, "No such file or directory; name a JSONL file"),
        ("", "has no passage"),
        ("\n \n", "has no passage"),
        (WIKI + "{", "line 2: not valid JSON"),
        (WIKI + '["a"]\n', "line 2: not an object with id and contents"),
        ('{"id": "1"}\n', "line 1: not an object with id and contents"),
        ('{"id": "1", "contents": 3}\n', "line 1: not an object with id and contents"),
        ('{"id": "1", "contents": " "}\n', "line 1: not an object with id and contents"),
        ('{"id": "1", "contents": "\xff"}', "line 1: not valid JSON"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_with_the_line(tmp_path: Path, corpus: str | None, says: str) -> None:
    if corpus is not None:
        (tmp_path / "wiki.jsonl").write_bytes(corpus.encode("latin-1"))
    config = recipe_with(tmp_path, 'corpus = "wiki.jsonl"')
    with pytest.raises(ConfigError) as refused:
        check_services(config.services)
    assert str(refused.value).startswith(f"services.wiki.corpus: {tmp_path / 'wiki.jsonl'}")
    assert says in str(refused.value)


def test_paths_are_relative_to_the_recipe_and_do_not_define_the_run(tmp_path: Path) -> None:
    (tmp_path / "wiki.jsonl").write_text(WIKI)
    make_key(tmp_path / "key")
    config = recipe_with(tmp_path, 'corpus = "wiki.jsonl"\nkey_file = "key"')
    assert config.services["wiki"].corpus == tmp_path / "wiki.jsonl"
    assert config.services["wiki"].key_file == tmp_path / "key"
    check_services(config.services)
    started = ServiceConfig(url="http://127.0.0.1:1")
    assert recipe_digest(config) == recipe_digest(config.model_copy(update={"services": {"wiki": started}}))


def test_a_recorded_configuration_is_read_again(tmp_path: Path) -> None:
    config = recipe_with(tmp_path, 'kind = "model"\nurl = "http://127.0.0.1:8000/v1/"\nretry.attempts = 2')
    assert config.services["wiki"].url == "http://127.0.0.1:8000/v1"
    assert RunConfig.model_validate(of_record(orjson.loads(document_of(config)))) == config


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"services\.wiki\.key_file .* other users can read it"):
        check_services(recipe_with(tmp_path, f'{URL}\nkey_file = "key"').services)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("wikipedia", {}, "there is no service 'wikipedia'; available: retriever, model"),
        ("absent_module:Mine", {}, "No module named 'absent_module'"),
        ("collections:OrderedDict", {}, "did not return a service: it has none of retrieve, complete, score"),
        ("collections:deque", {"size": 1}, "services.wiki.settings: collections:deque does not accept them"),
        ("math:pi", {}, "'math:pi' is not a valid service: it is not callable"),
    ],
)
def test_an_unknown_kind_is_refused(kind: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_services({"wiki": ServiceConfig(kind=kind, settings=settings)})
    assert str(refused.value).startswith("services.wiki.")
    assert says in str(refused.value)


def test_a_corpus_is_not_served_to_other_nodes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{MODEL}"\n[services.wiki]\ncorpus = "wiki.jsonl"\n[sandbox]\nprovider = "remote"\n'
        '[sandbox.remote]\nurls = ["http://203.0.113.1:1"]\n[cluster]\naddress = "203.0.113.1:6379"\n'
        f'state = "{tmp_path}"\nstorage = "{tmp_path}/storage"\n'
    )
    with pytest.raises(ConfigError, match=r"services\.wiki\.corpus is served on one host"):
        load_recipe(recipe, (), tmp_path / "run")


async def test_services_that_are_missing_or_of_another_kind_are_named() -> None:
    services = {"wiki": ServiceConfig(url="http://127.0.0.1:1")}
    refuse_missing_services(["wiki"], services, kind=ServiceKind.RETRIEVER)
    with pytest.raises(ConfigError, match=r"services\.user is missing; agent\.environment needs it; add the table"):
        refuse_missing_services(["wiki", "user"], services, user="agent.environment")
    async with ServiceClients(services) as clients:
        clients.retriever("wiki")
        with pytest.raises(ConfigError, match=r"services\.wiki\.kind is retriever as a model|is retriever"):
            clients.model("wiki")
        with pytest.raises(ConfigError, match=r"services\.user is missing"):
            clients.model("user")


def test_the_page_has_a_table_that_works(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "services.md").read_text()
    tables = page.split("```toml\n")[1].split("```")[0]
    for name, table in tomllib.loads(tables)["services"].items():
        ServiceConfig.model_validate(table)
        assert name
