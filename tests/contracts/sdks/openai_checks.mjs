// Checks of the gateway with OpenAI's SDK for Node.
import { deepEqual, equal, ok, rejects } from "node:assert/strict";
import OpenAI from "openai";
import { ADD, BASE_URL, CLOSED_URL, TOO_LONG, run, user } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "any" });
const tools = [{ type: "function", function: ADD }];
const flatTools = [{ type: "function", ...ADD }];
const chat = (text, fields = {}, options = {}) =>
  client.chat.completions.create({ model: "policy", messages: user(text), ...fields }, options);
const argumentsOf = (calls) => calls.map((call) => JSON.parse(call.function.arguments));
const BOTH = [{ a: 1, b: 2 }, { a: 3, b: 4 }];

await run({
  async chat_whole() {
    const answer = await chat("[hello]");
    equal(answer.choices[0].message.content, "Hello there.");
    equal(answer.choices[0].finish_reason, "stop");
    ok(answer.usage.completion_tokens > 1);
  },
  async chat_streamed_with_usage() {
    const chunks = [];
    for await (const chunk of await chat("[hello]", { stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "Hello there.");
    ok(chunks.at(-1).usage.completion_tokens > 1);
    equal(chunks.filter((chunk) => chunk.usage).length, 1);
  },
  async chat_tool_round_trip() {
    const first = (await chat("[call]", { tools })).choices[0];
    equal(first.finish_reason, "tool_calls");
    deepEqual(argumentsOf(first.message.tool_calls), [{ a: 1, b: 2 }]);
    const result = { role: "tool", tool_call_id: first.message.tool_calls[0].id, content: "[sum]" };
    const second = await chat("", { messages: [...user("[call]"), first.message, result], tools });
    equal(second.choices[0].message.content, "The sum is 3.");
  },
  async chat_parallel_calls() {
    const first = (await chat("[two calls]", { tools, parallel_tool_calls: true })).choices[0].message;
    deepEqual(argumentsOf(first.tool_calls), BOTH);
    const results = first.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "[sum]" }));
    const second = await chat("", { messages: [...user("[two calls]"), first, ...results], tools });
    equal(second.choices[0].message.content, "The sum is 3.");
  },
  async chat_stream_helper() {
    const calls = client.chat.completions.stream({ model: "policy", messages: user("[two calls]"), tools });
    deepEqual(argumentsOf((await calls.finalChatCompletion()).choices[0].message.tool_calls), BOTH);
    const text = client.chat.completions.stream({ model: "policy", messages: user("[hello]") });
    equal(await text.finalContent(), "Hello there.");
  },
  async chat_three_choices() {
    const { choices } = await chat("[hello]", { n: 3 });
    deepEqual(choices.map((choice) => [choice.index, choice.message.content]), [0, 1, 2].map((index) => [index, "Hello there."]));
  },
  async chat_stop_strings() {
    const [choice] = (await chat("[stop]", { stop: ["HALT", "END"] })).choices;
    deepEqual([choice.message.content, choice.finish_reason], ["before ", "stop"]);
  },
  async chat_max_tokens() {
    equal((await chat("[hello]", { max_completion_tokens: 1 })).choices[0].finish_reason, "length");
    equal((await chat("[hello]", { max_tokens: 1 })).usage.completion_tokens, 1);
  },
  async chat_required_call() {
    const [choice] = (await chat("[call]", { tools, tool_choice: "required" })).choices;
    equal(choice.message.tool_calls[0].function.name, "add");
  },
  async chat_logprobs_and_token_ids() {
    const answer = await chat("[hello]", { logprobs: true, return_token_ids: true });
    const [choice] = answer.choices;
    equal(choice.token_ids.length, answer.usage.completion_tokens);
    equal(choice.logprobs.content.length, choice.token_ids.length);
    equal(answer.prompt_token_ids.length, answer.usage.prompt_tokens);
  },
  async models() {
    const [first] = (await client.models.list()).data;
    equal((await client.models.retrieve(first.id)).id, first.id);
    equal((await client.models.retrieve("other")).id, "other");
  },
  async context_exceeded() {
    await rejects(chat(TOO_LONG), (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded");
  },
  async closed_session() {
    const closed = new OpenAI({ baseURL: `${CLOSED_URL}/v1`, apiKey: "any" });
    const asked = closed.chat.completions.create({ model: "policy", messages: user("[hello]") });
    await rejects(asked, (error) => error instanceof OpenAI.BadRequestError && /session/.test(error.message));
  },
  async too_many_requests() {
    const control = new AbortController();
    const options = { maxRetries: 0, signal: control.signal };
    const asked = Array.from({ length: 65 }, () => chat("[hang]", {}, options));
    const ends = Promise.allSettled(asked);
    try {
      await rejects(Promise.race(asked), OpenAI.RateLimitError);
    } finally {
      control.abort();
    }
    equal((await ends).filter((end) => end.reason instanceof OpenAI.APIUserAbortError).length, 64);
  },
  async retried_after_503() {
    equal((await chat("[down once]")).choices[0].message.content, "It is up.");
  },
  async timeout_ends_the_turn() {
    await rejects(chat("[hang]", {}, { timeout: 1000, maxRetries: 0 }), OpenAI.APIConnectionTimeoutError);
  },
  async aborted_stream_ends_the_turn() {
    (await chat("[hang]", { stream: true })).controller.abort();
  },
  async responses_whole() {
    const answer = await client.responses.create({ model: "policy", input: "[hello]", instructions: "Be brief." });
    deepEqual([answer.output_text, answer.status], ["Hello there.", "completed"]);
  },
  async responses_call_round_trip() {
    const first = await client.responses.create({ model: "policy", input: "[call]", tools: flatTools });
    const call = first.output.find((item) => item.type === "function_call");
    deepEqual(JSON.parse(call.arguments), { a: 1, b: 2 });
    const result = { type: "function_call_output", call_id: call.call_id, output: "[sum]" };
    const input = [...user("[call]"), ...first.output, result];
    equal((await client.responses.create({ model: "policy", input, tools: flatTools })).output_text, "The sum is 3.");
  },
  async responses_streamed() {
    const stream = client.responses.stream({ model: "policy", input: "[call]", tools: flatTools });
    const final = await stream.finalResponse();
    deepEqual(final.output.filter((item) => item.type === "function_call").map((item) => item.name), ["add"]);
    let text = "";
    for await (const event of await client.responses.create({ model: "policy", input: "[hello]", stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    equal(text, "Hello there.");
  },
  async responses_input_tokens() {
    const counted = await client.responses.inputTokens.count({ model: "policy", input: "[hello]" });
    const answer = await client.responses.create({ model: "policy", input: "[hello]" });
    equal(counted.input_tokens, answer.usage.input_tokens);
  },
  async responses_retried_after_503() {
    equal((await client.responses.create({ model: "policy", input: "[down once]" })).output_text, "It is up.");
  },
});
