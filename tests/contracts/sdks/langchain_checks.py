"""Checks of the gateway with LangChain's models for OpenAI's and Anthropic's APIs."""

from checks import BASE_URL, check_each, equal, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODELS = {
    "openai": ChatOpenAI(model="policy", base_url=f"{BASE_URL}/v1", api_key="any"),
    "responses": ChatOpenAI(model="policy", base_url=f"{BASE_URL}/v1", api_key="any", use_responses_api=True),
    "anthropic": ChatAnthropic(model="policy", base_url=BASE_URL, api_key="any", max_tokens=500),
}


class Sum(BaseModel):
    """A sum."""

    total: int


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"[sum] {a + b}"


on_all = check_each(MODELS)


@on_all
def invoke(model):
    answer = model.invoke("[hello]")
    equal(answer.text, "Hello there.")
    assert answer.usage_metadata["output_tokens"] > 1


@on_all
def stream(model):
    equal("".join(chunk.text for chunk in model.stream("[hello]")), "Hello there.")


@on_all
def tool_round_trip(model):
    bound = model.bind_tools([add])
    history = [HumanMessage("[two calls]")]
    first = bound.invoke(history)
    equal([call["args"] for call in first.tool_calls], [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    results = [ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
    equal(bound.invoke([*history, first, *results]).text, "The sum is 3.")


@on_all
def structured_by_call(model):
    answer = model.with_structured_output(Sum, method="function_calling").invoke("[sum call]")
    equal(answer, Sum(total=3))


@on_all
def structured_by_schema(model):
    equal(model.with_structured_output(Sum, method="json_schema").invoke("[sum json]"), Sum(total=3))


run()
