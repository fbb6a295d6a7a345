"""Lists in the docs equal the code: routes, keys, flags, exit codes, providers, kinds of agents, folders, schema."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.actors.agents.programs import versions
from headrace.actors.agents.registry.config import AgentKind
from headrace.actors.run import exit_codes
from headrace.actors.run.config import RunConfig
from headrace.actors.runtime.pools.config import SandboxKind
from headrace.buffer.ledger.schema import SCHEMA_VERSION
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.sandboxes.simulated.provider import SimulatedProvider
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.sandbox_servers.e2b.server import ServerSettings, make_application
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes
from headrace.serve.sandbox_servers.e2b_state.table import SandboxTables
from headrace.serve.sandbox_servers.e2b_state.templates import Templates
from headrace.serve.sandbox_servers.exec.server import ExecPart
from headrace.serve.tracing import span_names
from support.pages import PAGES, ROOT, command_words, rows_of, tables_of

Route = tuple[str, str]
METHODS = re.compile(r"((?:GET|POST|PUT|DELETE|OPTIONS)(?:, (?:GET|POST|PUT|DELETE|OPTIONS))*) ((?:`[^`]+`(?:, )?)+)")


def listed(page: str) -> set[Route]:
    """Return the routes in the first cells of a page's tables: methods, and the paths that they are followed by. A path
    without a slash replaces the last part of the path before it. Names of parameters are left out."""
    found = set()
    for header, *rows in tables_of(ROOT / "docs" / page):
        for cell in [header[0], *(row[0] for row in rows)]:
            for methods, paths in METHODS.findall(cell):
                path = ""
                for name in re.findall(r"`([^`]+)`", paths):
                    name = name.partition("?")[0]
                    path = name if name.startswith("/") else f"{path.rpartition('/')[0]}/{name}"
                    found |= {(method, without_names(path)) for method in methods.split(", ")}
    return found


def without_names(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def served(application: web.Application) -> set[Route]:
    """Return the routes of a server, with `*` for any method."""
    routes = [(route.method, route.resource.canonical) for route in application.router.routes() if route.resource]
    return {(method, without_names(path)) for method, path in routes if method != "HEAD"}


async def test_the_pages_list_every_route_of_the_sandbox_servers(tmp_path: Path) -> None:
    provider, settings, tasks = SimulatedProvider(), ServerSettings(), ServerTasks()
    tables = SandboxTables(None)
    sandboxes = Sandboxes(provider, tables, settings.images, tasks)
    templates = Templates(sandboxes, ImageBuilder(LocalProvider()), settings.images, 1)
    e2b = served(make_application(sandboxes, settings.keys, templates))
    part = ExecPart(provider=provider, settings=settings, apis=frozenset({"exec", "dropin"}), lease_s=60.0)
    others = web.Application()
    async with AsyncExitStack() as stack:
        others.add_routes(part.open(stack, tasks))
    tables.close()
    assert listed("remote.md") == served(others)
    assert listed("e2b.md") == {route for route in e2b if route[0] != "*"}
    families = {re.sub(r"^/v\d|\{\}$", "", path).removesuffix("{}") for method, path in e2b if method == "*"}
    assert [name for name in families if f"`{name}`" not in (ROOT / "docs" / "e2b.md").read_text()] == []


async def test_the_page_lists_every_route_of_the_gateway(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applications = []

    class Runner(web.AppRunner):
        def __init__(self, application: web.Application, **settings: Any) -> None:
            applications.append(application)
            super().__init__(application, **settings)

    monkeypatch.setattr(web, "AppRunner", Runner)
    gateway = Gateway(GatewayConfig(tokenizer_dir=model_dir), "x" * 16)
    await gateway.start()
    await gateway.stop()
    [application] = applications
    # Agents may send their token in a header instead.
    in_path = {route for route in served(application) if not is_second(route, served(application))}
    assert listed("gateway.md") == in_path


def is_second(route: Route, routes: set[Route]) -> bool:
    return route[1] != "/" and (route[0], f"/s/{{}}{route[1]}") in routes


@pytest.mark.parametrize(
    ("page", "column", "kinds"), [("sandboxes.md", "provider", SandboxKind), ("agents.md", "kind", AgentKind)]
)
def test_a_guide_lists_every_kind(page: str, column: str, kinds: type[StrEnum]) -> None:
    assert {re.findall(r"`([\w-]+)`", row[0])[0] for row in rows_of(page, column)} == set(kinds)


def test_the_help_of_run_lists_every_provider_of_sandboxes() -> None:
    [said] = re.findall(r"sandbox\.provider=NAME \(([^)]+)\)", (ROOT / "docs" / "cli.md").read_text())
    assert set(said.split(", ")) == set(SandboxKind)


def test_the_guide_of_agents_has_the_pinned_versions() -> None:
    named = re.findall(r"\d+\.\d+\.\d+", " ".join(row[1] for row in rows_of("agents.md", "kind")))
    pinned = {versions.CLAUDE_CODE, versions.CODEX, versions.MINI_SWE_AGENT, versions.QWEN_CODE, versions.OPENCODE}
    assert set(named) == pinned


def test_pages_name_no_other_schema_of_the_ledger() -> None:
    named = [number for page in PAGES for number in re.findall(r"\bschema (\d+)\b", page.read_text())]
    assert set(named) == {str(SCHEMA_VERSION)}


def test_the_map_of_the_packages_has_their_folders_and_no_others() -> None:
    """A folder below another one may be left to the line of that one."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Wings")[1]
    drawn: dict[str, set[str]] = {}
    for line in re.findall(r"```\n(.*?)```", text, re.DOTALL)[0].splitlines():
        if not line.startswith(" "):
            package = drawn.setdefault(line.split()[0], set()) if line else set()
            continue
        # Two spaces, names of folders, and at least three more; or, below such a line, only spaces.
        found = re.fullmatch(r"  (\w+(?:  \w+)*)? {3,}(.*)|  (\w+)  (.*)", line)
        assert found, line
        names, about, one, about_one = found.groups("")
        package |= {*names.split(), *one.split(), *re.findall(r"(?:^|\.  )(\w+): ", about or about_one)}
    folders = {
        name: [path.parent.relative_to(ROOT / name) for path in (ROOT / name).rglob("*/__init__.py")] for name in drawn
    }
    assert set(drawn) == {"actors", "buffer", "policies", "sandboxes", "serve"}
    for name, found in folders.items():
        assert drawn[name] <= {folder.name for folder in found}, name
        assert {folder.name for folder in found if len(folder.parts) == 1} <= drawn[name], name


def test_entries_of_the_limits_name_a_test_or_the_day_on_which_they_were_checked() -> None:
    """That the tests exist is checked with those of all pages."""
    entries = re.findall(r"^- .*$", (ROOT / "docs" / "limits.md").read_text(), re.MULTILINE)
    ends = [re.search(r" (?:Checked ([\d-]+)|Test: `tests/[\w/]+\.py::\w+`)\.$", entry) for entry in entries]
    assert len(entries) > 30
    assert [entry for entry, end in zip(entries, ends, strict=True) if end is None] == []
    assert all(date.fromisoformat(end[1]) <= datetime.now(UTC).date() for end in ends if end and end[1])


FOREIGN_FLAGS = {
    *("--block", "--dashboard-host", "--disable-usage-stats", "--head", "--labels", "--node-ip-address", "--num-cpus"),
    *("--object-store-memory", "--redis-password"),  # Ray
    *("--api-key", "--base-gpu-id", "--constrained-json-disable-any-whitespace", "--enable-metrics", "--enable-trace"),
    *("--grammar-backend", "--mem-fraction-static", "--otlp-traces-endpoint", "--tp-size"),  # SGLang
    *("--hidden-size", "--num-layers", "--swiglu", "--use-rollout-logprobs"),  # slime
    *(
        "--advantage-estimator",
        "--custom-advantage-function-path",
        "--entropy-coef",
        "--eps-clip-c",
        "--keep-old-actor",
    ),
    *("--get-mismatch-metrics", "--loss-type", "--normalize-advantages", "--opd-teacher-load", "--opsm-delta"),
    *("--tis-clip", "--tis-clip-low", "--use-kl-loss", "--use-opd", "--use-opsm", "--use-tis", "--use-unbiased-kl"),
    *("--dist", "--forked", "--maxfail", "--stepwise", "--strict-config"),  # pytest
    *("--bare", "--config", "--enable-feature", "--from", "--from-file", "--gil", "--git", "--mount", "--preserve-env"),
    *("--scope", "--search", "--user"),
}
"""Flags of other programs that pages name."""


def test_flags_that_a_page_names_exist() -> None:
    """The page of all commands is written from the code."""
    flag = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
    known = set(flag.findall((ROOT / "docs" / "cli.md").read_text())) | FOREIGN_FLAGS
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "kubernetes" / "README.md"]
    named = {page.name: set(flag.findall(page.read_text())) for page in pages}
    assert {name: flags - known for name, flags in named.items() if flags - known} == {}
    assert set().union(*named.values()) >= FOREIGN_FLAGS, "remove those that no page names any more"


def is_key(names: list[str], schema: dict[str, Any], of: dict[str, Any]) -> bool:
    """Return whether the JSON schema `schema`, or a definition of `of` that it names, has this path of keys."""
    if "$ref" in schema:
        schema = of[schema["$ref"].rpartition("/")[2]]
    if not names or any(is_key(names, choice, of) for choice in schema.get("anyOf", [])):
        return True
    if schema.get("type") == "array":
        return is_key(names, schema["items"], of)
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    inner = [schema.get("properties", {}).get(names[0]), *values]
    return any(isinstance(found, dict) and is_key(names[1:], found, of) for found in inner)


def keys_of(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of a TOML document. Tables of a source of tasks are those of a recipe."""
    for name, value in table.items():
        path = (*above, name)
        inner = value if isinstance(value, list) else [value]
        if name == "settings" or not isinstance(inner[0] if inner else None, dict):
            yield path
        else:
            for one in inner:
                yield from keys_of(one, () if path == ("tasks", "sources") else path)


def test_recipes_in_guides_have_keys_that_exist() -> None:
    schema = RunConfig.model_json_schema()
    own = schema["$defs"]["SourceSection"]["properties"]
    blocks = [
        (page.name, tomllib.loads(block))
        for page in PAGES
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    named = [(page, path) for page, block in blocks if block.keys() & schema["properties"] for path in keys_of(block)]
    unknown = [
        (page, path)
        for page, path in named
        if not is_key([*path], schema, schema["$defs"]) and not (len(path) == 1 and path[0] in own)
    ]
    assert len(named) > 20
    assert unknown == []


OTHER_NAMES = {"service.NAME", "service.instance.id", "buffer.KEY"}
"""A station, an attribute of OpenTelemetry, and the keys of a table."""


def test_keys_of_recipes_that_a_page_names_exist() -> None:
    schema = RunConfig.model_json_schema()
    spans = {name for name in vars(span_names).values() if isinstance(name, str)}
    named = [
        (page.name, key)
        for page in PAGES
        for pattern in (r"`([a-z_]+(?:\.[A-Za-z0-9_]+)+)(?: ?= ?[^`]*)?`", r"--set ([a-z_]+\.[A-Za-z0-9_.]+)=")
        for key in re.findall(pattern, page.read_text())
        if key.partition(".")[0] in schema["properties"] and not key.endswith((".json", ".jsonl"))
    ]
    unknown = [
        f"{page}: {key}"
        for page, key in named
        if key not in OTHER_NAMES | spans and not is_key(key.split("."), schema, schema["$defs"])
    ]
    assert len(named) > 300
    assert unknown == []
    assert not is_key(["buffer", "absent"], schema, schema["$defs"])


def commands_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z -]+?)(?: --\w+)?`", text))


def test_every_command_with_exit_code_3_is_in_the_lists_of_exit_codes() -> None:
    said = set()
    for words, command in command_words().items():
        texts = (
            [command.help or "", *(getattr(option, "help", "") or "" for option in command.params)] if command else []
        )
        if re.search(r"exit code 3\b", " ".join(" ".join(texts).split())):
            said.add(words)
    [row] = [row for row in rows_of("reliability.md", "code") if row[0] == "3"]
    assert len(said) > 3
    assert commands_in(row[1]) == said
    assert commands_in(exit_codes.HELP.partition("; 3 ")[2].partition("; 4 ")[0]) == said
