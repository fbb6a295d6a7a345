"""Checks of the gateway with Anthropic's SDK for Python."""

import anthropic
from checks import ADD, BASE_URL, CLOSED_URL, TOO_LONG, check, equal, run

client = anthropic.Anthropic(base_url=BASE_URL, api_key="any")
TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": ADD["parameters"]}]


def user(text):
    return [{"role": "user", "content": text}]


def create(text, **fields):
    return client.messages.create(**{"model": "policy", "max_tokens": 500, "messages": user(text)} | fields)


@check
def messages_whole():
    answer = create("[hello]", system="Be brief.")
    equal(([block.text for block in answer.content], answer.stop_reason), (["Hello there."], "end_turn"))
    assert answer.usage.output_tokens > 1


@check
def messages_streamed():
    events = list(create("[hello]", stream=True))
    equal(events[-1].type, "message_stop")
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    equal("".join(texts), "Hello there.")


@check
def stream_helper_text():
    with client.messages.stream(model="policy", max_tokens=500, messages=user("[hello]")) as stream:
        equal("".join(stream.text_stream), "Hello there.")
        assert stream.get_final_message().usage.output_tokens > 1


@check
def stream_helper_thinking_and_tool_round_trip():
    with client.messages.stream(
        model="policy",
        max_tokens=2000,
        messages=user("[think and call]"),
        tools=TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        final = stream.get_final_message()
    equal([block.type for block in final.content], ["thinking", "tool_use"])
    thinking, call = final.content
    equal((thinking.thinking.strip(), bool(thinking.signature)), ("I should add.", True))
    equal((call.name, call.input, final.stop_reason), ("add", {"a": 1, "b": 2}, "tool_use"))
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "[sum]"}]
    history = [*user("[think and call]"), {"role": "assistant", "content": final.content}]
    second = create("", messages=[*history, {"role": "user", "content": result}], tools=TOOLS)
    equal(second.content[-1].text, "The sum is 3.")


@check
def tool_round_trip():
    first = create("[two calls]", tools=TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    equal([call.input for call in calls], [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "[sum]"} for call in calls]
    history = [*user("[two calls]"), {"role": "assistant", "content": first.content}]
    second = create("", messages=[*history, {"role": "user", "content": results}], tools=TOOLS)
    equal(second.content[-1].text, "The sum is 3.")


@check
def forced_call():
    first = create("[call]", tools=TOOLS, tool_choice={"type": "tool", "name": "add"})
    equal([block.input for block in first.content if block.type == "tool_use"], [{"a": 1, "b": 2}])


@check
def count_tokens():
    counted = client.messages.count_tokens(model="policy", messages=user("[hello]")).input_tokens
    usage = create("[hello]").usage
    equal(counted, usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


@check
def models():
    listed = list(client.models.list())
    assert listed
    equal(client.models.retrieve(listed[0].id).id, listed[0].id)


@check
def prompt_too_long():
    try:
        create(TOO_LONG)
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in str(error), error
    else:
        raise AssertionError("no error")


@check
def closed_session():
    try:
        client.with_options(base_url=CLOSED_URL).messages.create(model="p", max_tokens=9, messages=user("[hello]"))
    except anthropic.BadRequestError as error:
        assert "session" in str(error), error
    else:
        raise AssertionError("no error")


@check
def overloaded_without_retry():
    try:
        client.with_options(max_retries=0).messages.create(model="p", max_tokens=9, messages=user("[down]"))
    except anthropic.APIStatusError as error:
        equal(error.status_code, 529)
    else:
        raise AssertionError("no error")


@check
def retried_after_529():
    equal(create("[down once]").content[0].text, "It is up.")


@check
def stop_sequences():
    answer = create("[stop]", stop_sequences=["HALT", "END"])
    equal((answer.content[0].text, answer.stop_reason, answer.stop_sequence), ("before ", "stop_sequence", "END"))


@check
def max_tokens():
    equal(create("[hello]", max_tokens=1).stop_reason, "max_tokens")


@check
def aborted_stream_ends_the_turn():
    stream = create("[hang]", stream=True)
    stream.close()


run()
