"""Checks of the gateway with LiteLLM, by its clients for OpenAI's and Anthropic's APIs."""

import asyncio
import json

import litellm
from checks import ADD, BASE_URL, CLOSED_URL, TOO_LONG, check_each, equal, run

TOOLS = [{"type": "function", "function": ADD}]
APIS = {
    "openai": {"model": "openai/policy", "api_base": f"{BASE_URL}/v1", "api_key": "any"},
    "anthropic": {"model": "anthropic/policy", "api_base": BASE_URL, "api_key": "any", "max_tokens": 500},
}


def user(text):
    return [{"role": "user", "content": text}]


on_both = check_each(APIS)


@on_both
def whole(api):
    answer = litellm.completion(messages=user("[hello]"), **api)
    equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("Hello there.", "stop"))
    assert answer.usage.completion_tokens > 1
    assert answer.usage.prompt_tokens > 1


@on_both
def asynchronous(api):
    answer = asyncio.run(litellm.acompletion(messages=user("[hello]"), **api))
    equal(answer.choices[0].message.content, "Hello there.")


@on_both
def streamed(api):
    chunks = list(
        litellm.completion(messages=user("[hello]"), stream=True, stream_options={"include_usage": True}, **api)
    )
    built = litellm.stream_chunk_builder(chunks)
    equal(built.choices[0].message.content, "Hello there.")
    assert built.usage.completion_tokens > 1


@on_both
def tool_round_trip(api):
    first = litellm.completion(messages=user("[two calls]"), tools=TOOLS, **api).choices[0]
    calls = first.message.tool_calls
    equal([json.loads(call.function.arguments) for call in calls], [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    results = [{"role": "tool", "tool_call_id": call.id, "content": "[sum]"} for call in calls]
    second = litellm.completion(messages=[*user("[two calls]"), first.message, *results], tools=TOOLS, **api)
    equal(second.choices[0].message.content, "The sum is 3.")


@on_both
def streamed_calls(api):
    chunks = list(litellm.completion(messages=user("[call]"), tools=TOOLS, stream=True, **api))
    [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    equal((call.function.name, json.loads(call.function.arguments)), ("add", {"a": 1, "b": 2}))


@on_both
def context_exceeded(api):
    try:
        litellm.completion(messages=user(TOO_LONG), **api)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@on_both
def closed_session(api):
    closed = api | {"api_base": api["api_base"].replace(BASE_URL, CLOSED_URL)}
    try:
        litellm.completion(messages=user("[hello]"), **closed)
    except litellm.BadRequestError as error:
        assert "session" in str(error), error
    else:
        raise AssertionError("no error")


run()
