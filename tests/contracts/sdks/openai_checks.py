"""Checks of the gateway with OpenAI's SDK for Python."""

import asyncio
import json

import openai
from checks import ADD, BASE_URL, CLOSED_URL, TOO_LONG, check, equal, run

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="any")
TOOLS = [{"type": "function", "function": ADD}]
FLAT_TOOLS = [{"type": "function", **ADD}]


def user(text):
    return [{"role": "user", "content": text}]


def chat(text, **fields):
    return client.chat.completions.create(model="policy", messages=user(text), **fields)


@check
def chat_whole():
    answer = chat("[hello]")
    equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("Hello there.", "stop"))
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    assert answer.usage.completion_tokens > 1


@check
def chat_streamed_with_usage():
    chunks = list(chat("[hello]", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal(text, "Hello there.")
    equal([bool(chunk.usage) for chunk in chunks], [False] * (len(chunks) - 1) + [True])
    assert chunks[-1].usage.completion_tokens > 1


@check
def chat_tool_round_trip():
    first = chat("[call]", tools=TOOLS).choices[0]
    equal(first.finish_reason, "tool_calls")
    [call] = first.message.tool_calls
    equal((call.function.name, json.loads(call.function.arguments)), ("add", {"a": 1, "b": 2}))
    history = [*user("[call]"), first.message, {"role": "tool", "tool_call_id": call.id, "content": "[sum]"}]
    second = client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
    equal(second.choices[0].message.content, "The sum is 3.")


@check
def chat_parallel_calls():
    first = chat("[two calls]", tools=TOOLS, parallel_tool_calls=True).choices[0]
    calls = first.message.tool_calls
    equal([json.loads(call.function.arguments) for call in calls], [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    assert calls[0].id != calls[1].id
    results = [{"role": "tool", "tool_call_id": call.id, "content": "[sum]"} for call in calls]
    history = [*user("[two calls]"), first.message, *results]
    second = client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
    equal(second.choices[0].message.content, "The sum is 3.")


@check
def chat_stream_helper():
    with client.chat.completions.stream(model="policy", messages=user("[two calls]"), tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    arguments = [json.loads(call.function.arguments) for call in final.choices[0].message.tool_calls]
    equal(arguments, [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    with client.chat.completions.stream(model="policy", messages=user("[hello]")) as stream:
        equal(stream.get_final_completion().choices[0].message.content, "Hello there.")


@check
def chat_three_choices():
    answer = chat("[hello]", n=3)
    equal([choice.index for choice in answer.choices], [0, 1, 2])
    equal({choice.message.content for choice in answer.choices}, {"Hello there."})


@check
def chat_stop_strings():
    choice = chat("[stop]", stop=["HALT", "END"]).choices[0]
    equal((choice.message.content, choice.finish_reason), ("before ", "stop"))


@check
def chat_max_tokens():
    choice = chat("[hello]", max_completion_tokens=1).choices[0]
    equal(choice.finish_reason, "length")
    equal(chat("[hello]", max_tokens=1).usage.completion_tokens, 1)


@check
def chat_required_call():
    first = chat("[call]", tools=TOOLS, tool_choice="required").choices[0]
    equal(first.message.tool_calls[0].function.name, "add")


@check
def chat_logprobs_and_token_ids():
    answer = chat("[hello]", logprobs=True, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    ids = choice.model_extra["token_ids"]
    equal(len(ids), answer.usage.completion_tokens)
    equal(len(choice.logprobs.content), len(ids))
    assert all(one.logprob < 0 for one in choice.logprobs.content)
    equal(len(answer.model_extra["prompt_token_ids"]), answer.usage.prompt_tokens)


@check
def models():
    listed = list(client.models.list())
    assert listed
    equal(client.models.retrieve(listed[0].id).id, listed[0].id)
    equal(client.models.retrieve("other").id, "other")


@check
def context_exceeded():
    try:
        chat(TOO_LONG)
    except openai.BadRequestError as error:
        equal((error.status_code, error.code), (400, "context_length_exceeded"))
    else:
        raise AssertionError("no error")


@check
def closed_session():
    try:
        client.with_options(base_url=f"{CLOSED_URL}/v1").chat.completions.create(model="p", messages=user("[hello]"))
    except openai.BadRequestError as error:
        assert "session" in str(error), error
    else:
        raise AssertionError("no error")


@check
def too_many_requests():
    async def flood():
        async with openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="any", max_retries=0) as several:
            ask = several.chat.completions.create
            tasks = [asyncio.create_task(ask(model="policy", messages=user("[hang]"))) for _ in range(65)]
            done, left = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            return [task.exception() for task in done]

    errors = asyncio.run(flood())
    equal([type(error) for error in errors], [openai.RateLimitError])


@check
def retried_after_503():
    equal(chat("[down once]").choices[0].message.content, "It is up.")


@check
def timeout_ends_the_turn():
    try:
        client.with_options(timeout=1.0, max_retries=0).chat.completions.create(model="p", messages=user("[hang]"))
    except openai.APITimeoutError:
        return
    raise AssertionError("no timeout")


@check
def aborted_stream_ends_the_turn():
    stream = chat("[hang]", stream=True)
    stream.close()


@check
def responses_whole():
    answer = client.responses.create(model="policy", input="[hello]", instructions="Be brief.")
    equal((answer.output_text, answer.status), ("Hello there.", "completed"))
    assert answer.usage.output_tokens > 1


@check
def responses_call_round_trip():
    first = client.responses.create(model="policy", input="[call]", tools=FLAT_TOOLS)
    [call] = [item for item in first.output if item.type == "function_call"]
    equal((call.name, json.loads(call.arguments)), ("add", {"a": 1, "b": 2}))
    history = [*user("[call]"), *first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "[sum]"})
    second = client.responses.create(model="policy", input=history, tools=FLAT_TOOLS)
    equal(second.output_text, "The sum is 3.")


@check
def responses_streamed():
    with client.responses.stream(model="policy", input="[call]", tools=FLAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds, kinds
    equal(kinds[-1], "response.completed")
    equal([item.name for item in final.output if item.type == "function_call"], ["add"])
    events = client.responses.create(model="policy", input="[hello]", stream=True)
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), "Hello there.")


@check
def responses_input_tokens():
    counted = client.responses.input_tokens.count(model="policy", input="[hello]").input_tokens
    equal(counted, client.responses.create(model="policy", input="[hello]").usage.input_tokens)


@check
def responses_retried_after_503():
    equal(client.responses.create(model="policy", input="[down once]").output_text, "It is up.")


run()
