"""The names of spans and their attributes.

The tree: rollout > sandbox.boot > invoke_agent > chat (engine) > execute_tool > evaluate > buffer.offer. Names and
attributes are those of the OpenTelemetry conventions for generative AI (`chat`, `gen_ai.*`) where these have one, read
in November 2026; other attributes are named `headrace.*`.
"""

from __future__ import annotations

from typing import Final

from headrace.sandboxes.pool import boot_spans

MAX_TEXT_CHARACTERS: Final = 2048
"""Length at which the end of an attribute is cut off."""

ROLLOUT: Final = "rollout"
SANDBOX_BOOT: Final = "sandbox.boot"
POOL_QUEUE: Final = boot_spans.POOL_QUEUE
POOL_BOOT: Final = boot_spans.POOL_BOOT
PREPARE: Final = "prepare"
AGENT: Final = "invoke_agent"
"""Followed by the name of the agent."""
FINISH: Final = "session.finish"
TURN: Final = "chat"
ENGINE: Final = "engine"
TOOL: Final = "execute_tool"
"""Followed by the name of the tool."""
EVALUATE: Final = "evaluate"
CHECK: Final = "evaluate.check"
BUFFER_OFFER: Final = "buffer.offer"
STEP: Final = "step"
EVALUATION: Final = "evaluation"
PUSH: Final = "push"
PUSH_PHASE: Final = "push.phase"

OPERATION: Final = "gen_ai.operation.name"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
PROVIDER: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"

ERROR_TYPE: Final = boot_spans.ERROR_TYPE

RUN_ID: Final = "headrace.run.id"
RECIPE: Final = "headrace.recipe"
ROLLOUT_ID: Final = "headrace.rollout.id"
ATTEMPT: Final = "headrace.rollout.attempt"
PURPOSE: Final = "headrace.rollout.purpose"
GROUP_ID: Final = "headrace.group.id"
GROUP_BATCH: Final = "headrace.group.batch"
TASK_ID: Final = "headrace.task.id"
CAUSE: Final = "headrace.outcome.cause"
REWARD: Final = "headrace.outcome.reward"
AGENT_STOP: Final = "headrace.agent.stop"
AGENT_EXIT_CODE: Final = "headrace.agent.exit_code"
AGENT_RESULT: Final = "headrace.agent.result"
AGENT_LOG_TAIL: Final = "headrace.agent.log_tail"
TURN_NUMBER: Final = "headrace.turn.number"
RENDER_S: Final = "headrace.render_s"
ENGINE_ID: Final = "headrace.engine.id"
ENGINE_QUEUE_S: Final = "headrace.engine.queue_s"
ENGINE_PREFILL_S: Final = "headrace.engine.prefill_s"
ENGINE_TOTAL_S: Final = "headrace.engine.total_s"
HELD_S: Final = "headrace.engine.held_s"
VERSIONS: Final = "headrace.versions"
CACHED_TOKENS: Final = "headrace.engine.cached_tokens"
RETRACTIONS: Final = "headrace.engine.retractions"
RERENDERED: Final = "headrace.turn.rerendered"
SAMPLED_TOKENS: Final = "headrace.session.sampled_tokens"
TRAINED_TOKENS: Final = "headrace.session.trained_tokens"
MASKED_TOKENS: Final = "headrace.session.masked_tokens"
DRIFT: Final = "headrace.session.drift"
UNHONOURED: Final = "headrace.session.unhonoured"
ROWS: Final = "headrace.session.rows"
LOST_CALLS: Final = "headrace.session.lost_calls"
SANDBOX_HOST: Final = boot_spans.SANDBOX_HOST
SANDBOX_IMAGE: Final = boot_spans.SANDBOX_IMAGE
SANDBOX_ID: Final = "headrace.sandbox.id"
SANDBOX_WARM: Final = boot_spans.SANDBOX_WARM
SANDBOX_TRY: Final = boot_spans.SANDBOX_TRY
SANDBOX_TRIES: Final = "headrace.sandbox.tries"
QUEUE_S: Final = "headrace.sandbox.queue_s"
EVALUATOR_KIND: Final = "headrace.evaluator.kind"
CHECK_S: Final = "headrace.evaluator.check_s"
TOOL_NAME: Final = "gen_ai.tool.name"
STEP_NUMBER: Final = "headrace.step.number"
STEP_VERSION: Final = "headrace.step.version"
STEP_BATCH: Final = "headrace.step.batch"
STEP_ROLLOUTS: Final = "headrace.step.rollouts"
STALENESS: Final = "headrace.step.staleness"
EVALUATION_TAG: Final = "headrace.evaluation.tag"
EVALUATION_TASKS: Final = "headrace.evaluation.tasks"
EVALUATION_ANSWERS: Final = "headrace.evaluation.answers"
EVALUATION_INFRA: Final = "headrace.evaluation.infra"
EVALUATION_SUCCESS: Final = "headrace.evaluation.success"
PUSH_ID: Final = "headrace.push.id"
PUSH_VERSION: Final = "headrace.push.version"
PUSH_TRANSPORT: Final = "headrace.push.transport"
PUSH_ENGINES: Final = "headrace.push.engines"
PUSH_OUTCOMES: Final = "headrace.push.outcomes"
PUSH_BYTES: Final = "headrace.push.sent_bytes"
PHASE: Final = "headrace.push.phase"
SENDER: Final = "headrace.sender"
"""On spans that another program sent: `agent` or `engine`."""
PROJECT: Final = "openinference.project.name"
"""By this attribute of the resource arize-phoenix keeps traces apart: each run is a project."""
WAVE: Final = "headrace.push.wave"
