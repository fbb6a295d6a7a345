// Checks of the gateway with Anthropic's SDK for Node.
import { deepEqual, equal, ok, rejects } from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { ADD, BASE_URL, CLOSED_URL, TOO_LONG, run, user } from "./checks.mjs";

const client = new Anthropic({ baseURL: BASE_URL, apiKey: "any" });
const tools = [{ name: "add", description: "Add two numbers.", input_schema: ADD.parameters }];
const create = (text, fields = {}, options = {}) =>
  client.messages.create({ model: "policy", max_tokens: 500, messages: user(text), ...fields }, options);
const inputs = (message) => message.content.filter((block) => block.type === "tool_use").map((block) => block.input);
const results = (message) =>
  message.content
    .filter((block) => block.type === "tool_use")
    .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "[sum]" }));

await run({
  async messages_whole() {
    const answer = await create("[hello]", { system: "Be brief." });
    deepEqual([answer.content[0].text, answer.stop_reason], ["Hello there.", "end_turn"]);
    ok(answer.usage.output_tokens > 1);
  },
  async messages_streamed() {
    const events = [];
    for await (const event of await create("[hello]", { stream: true })) events.push(event);
    equal(events.at(-1).type, "message_stop");
    const deltas = events.filter((event) => event.type === "content_block_delta");
    equal(deltas.map((event) => event.delta.text).join(""), "Hello there.");
  },
  async stream_helper_text() {
    const stream = client.messages.stream({ model: "policy", max_tokens: 500, messages: user("[hello]") });
    equal(await stream.finalText(), "Hello there.");
  },
  async stream_helper_thinking_and_tool_round_trip() {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const asked = { model: "policy", max_tokens: 2000, messages: user("[think and call]"), tools, thinking };
    const final = await client.messages.stream(asked).finalMessage();
    deepEqual(final.content.map((block) => block.type), ["thinking", "tool_use"]);
    equal(final.content[0].thinking.trim(), "I should add.");
    ok(final.content[0].signature);
    deepEqual(inputs(final), [{ a: 1, b: 2 }]);
    const history = [...asked.messages, { role: "assistant", content: final.content }];
    const second = await create("", { messages: [...history, { role: "user", content: results(final) }], tools });
    equal(second.content.at(-1).text, "The sum is 3.");
  },
  async tool_round_trip() {
    const first = await create("[two calls]", { tools });
    deepEqual(inputs(first), [{ a: 1, b: 2 }, { a: 3, b: 4 }]);
    const history = [...user("[two calls]"), { role: "assistant", content: first.content }];
    const second = await create("", { messages: [...history, { role: "user", content: results(first) }], tools });
    equal(second.content.at(-1).text, "The sum is 3.");
  },
  async forced_call() {
    deepEqual(inputs(await create("[call]", { tools, tool_choice: { type: "tool", name: "add" } })), [{ a: 1, b: 2 }]);
  },
  async count_tokens() {
    const counted = await client.messages.countTokens({ model: "policy", messages: user("[hello]") });
    const { usage } = await create("[hello]");
    const cached = (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0);
    equal(counted.input_tokens, usage.input_tokens + cached);
  },
  async models() {
    const [first] = (await client.models.list()).data;
    equal((await client.models.retrieve(first.id)).id, first.id);
  },
  async prompt_too_long() {
    await rejects(create(TOO_LONG), (error) => error.status === 400 && /prompt is too long/.test(error.message));
  },
  async closed_session() {
    const closed = new Anthropic({ baseURL: CLOSED_URL, apiKey: "any" });
    const asked = closed.messages.create({ model: "policy", max_tokens: 9, messages: user("[hello]") });
    await rejects(asked, (error) => error instanceof Anthropic.BadRequestError && /session/.test(error.message));
  },
  async overloaded_without_retry() {
    await rejects(create("[down]", {}, { maxRetries: 0 }), (error) => error.status === 529);
  },
  async retried_after_529() {
    equal((await create("[down once]")).content[0].text, "It is up.");
  },
  async stop_sequences() {
    const answer = await create("[stop]", { stop_sequences: ["HALT", "END"] });
    deepEqual([answer.content[0].text, answer.stop_reason, answer.stop_sequence], ["before ", "stop_sequence", "END"]);
  },
  async max_tokens() {
    equal((await create("[hello]", { max_tokens: 1 })).stop_reason, "max_tokens");
  },
  async aborted_stream_ends_the_turn() {
    (await create("[hang]", { stream: true })).controller.abort();
  },
});
