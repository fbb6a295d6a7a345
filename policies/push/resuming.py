"""Resuming of a paused engine.

Invariants:
- A resume changes nothing in an engine that is not paused. So it is repeated after a 5xx reply and a lost connection,
  which an engine may give while it wakes up: a few times, after waits that grow exponentially.
- An engine that refuses, does not answer in time or no longer listens is not asked again.
- Nobody may send requests to an engine before it says that it is no longer paused. It is asked for this alone: other
  questions wait for the engine's next step, which after a `retract` is the prefill of all that it retracted, and gates
  would stay closed meanwhile.
"""

from __future__ import annotations

from typing import Final

from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from headrace.policies.errors import EngineDown, EngineUnavailable
from headrace.policies.sglang.client import SGLangEngine

ATTEMPTS: Final = 6
"""Number of resumes after which the engine has failed."""
FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0

_retrying: Final = AsyncRetrying(
    retry=retry_if_exception_type(EngineUnavailable) & retry_if_not_exception_type(EngineDown),
    stop=stop_after_attempt(ATTEMPTS),
    wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S) + wait_random(0.0, FIRST_WAIT_S),
    reraise=True,
)


async def resume(engine: SGLangEngine) -> None:
    """Resume an engine. Raises EngineError if it fails to, or remains paused."""
    await _retrying.copy()(_resume_once, engine)


async def _resume_once(engine: SGLangEngine) -> None:
    await engine.resume()
    if await engine.is_paused():
        raise EngineUnavailable(f"{engine.engine_id}: it answered that it resumes, but it is still paused")
