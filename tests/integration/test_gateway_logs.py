"""Events that the gateway logs while it answers an agent name the attempt that the session works for."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.rendering.template_renderer import TemplateRenderer
from headrace.serve.tracing.retention import RetentionConfig
from headrace.serve.tracing.tracing import trace_id_for
from support.gateway_rig import world

RUN = "a" * 32


class BrokenRenderer(TemplateRenderer):
    """A renderer with a defect: it refuses some conversations with an error that nobody expects."""

    def render(self, messages: Any, *given: Any, **named: Any) -> Any:
        if "break" in str(messages):
            raise ZeroDivisionError("a defect of the renderer")
        return super().render(messages, *given, **named)


async def test_a_failed_turn_is_logged_for_the_attempt_of_its_session(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "gateway.jsonl"
    handler = LogFile(path, RetentionConfig(), EventFormatter({"run": RUN}, Redaction({})))
    logger = logging.getLogger("headrace.serve.gateway.http")
    logger.addHandler(handler)
    try:
        async with world(model_dir, renderer=BrokenRenderer(ChatTokenizer(model_dir))) as w:
            attempts = {f"s{number}": {"rollout": f"g{number}-0.1", "attempt": number} for number in (1, 2)}
            clients = [await w.client(session_id=name, spec=spec) for name, spec in attempts.items()]
            nobodys = await w.client(session_id="s3")
            replies = await asyncio.gather(*(client.say("break it") for client in (*clients, nobodys)))
            assert {reply.status for reply in replies} == {500}
            assert (await clients[0].say("break it again")).status == 500
    finally:
        logger.removeHandler(handler)
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert all(event["exception"].endswith("a defect of the renderer") for event in events)
    found = sorted((event.get("rollout", ""), event.get("attempt", 0), event.get("trace", "")) for event in events)
    traces = {number: f"{trace_id_for(RUN, f'g{number}-0.1', number):032x}" for number in (1, 2)}
    named = [(f"g{number}-0.1", number, traces[number]) for number in (1, 1, 2)]
    assert found == [("", 0, ""), *named]
