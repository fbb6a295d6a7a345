"""The versions of agents that `scripts/install agents` installs and the tests run with.

The Python packages are pinned as a set that was tested together. The set omits requirements of mini-swe-agent and
litellm that the default agent never imports (data sets, AWS, terminal interfaces) and that make up most of half a
gigabyte.
"""

from __future__ import annotations

from typing import Final

CLAUDE_CODE: Final = "2.1.197"
CODEX: Final = "0.169.0"
QWEN_CODE: Final = "0.15.10"
OPENCODE: Final = "1.18.33"
NODE: Final = "20.20.2"
"""Version of Node for qwen-code, which needs 20 or later."""
MINI_SWE_AGENT: Final = "2.4.6"
LITELLM: Final = "1.106.2"
MCP: Final = "2.3.0"
"""Version of mcp, which litellm imports for tool calls but does not declare as a requirement."""
MINI_SWE_AGENT_REQUIREMENTS: Final = (
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "annotated-doc==0.0.7",
    "annotated-types==0.8.0",
    "anyio==4.16.0",
    "attrs==26.1.0",
    "certifi==2026.10.18",
    "cffi==2.1.1",
    "charset-normalizer==3.5.2",
    "click==8.5.1",
    "cryptography==50.0.2",
    "distro==1.9.0",
    "fastuuid==0.14.0",
    "filelock==3.32.7",
    "frozenlist==1.8.0",
    "fsspec==2026.9.0",
    "h11==0.16.0",
    "h2==4.4.1",
    "hf-xet==1.8.0",
    "hpack==4.2.0",
    "httpcore2==2.16.2",
    "httpcore==1.0.9",
    "httpx2==2.16.2",
    "httpx==0.28.1",
    "huggingface-hub==1.33.0",
    "hyperframe==6.1.0",
    "idna==3.20",
    "importlib-metadata==8.9.0",
    "jinja2==3.1.6",
    "jiter==0.19.0",
    "jsonschema-specifications==2025.9.1",
    "jsonschema==4.26.0",
    f"litellm=={LITELLM}",
    "markdown-it-py==4.3.0",
    "markupsafe==3.0.4",
    "mcp-types==2.3.0",
    f"mcp=={MCP}",
    "mdurl==0.1.2",
    f"mini-swe-agent=={MINI_SWE_AGENT}",
    "multidict==7.2.1",
    "openai==2.54.0",
    "opentelemetry-api==1.45.2",
    "packaging==26.3",
    "platformdirs==4.14.5",
    "propcache==0.5.4",
    "pycparser==3.12",
    "pydantic-core==2.50.4",
    "pydantic-settings==2.16.3",
    "pydantic==2.14.3",
    "pygments==2.21.0",
    "pyjwt==2.15.1",
    "python-dotenv==1.2.4",
    "python-multipart==0.0.34",
    "pyyaml==6.0.3",
    "referencing==0.37.0",
    "regex==2026.11.15",
    "requests==2.34.2",
    "rich==15.0.0",
    "rpds-py==2026.9.1",
    "shellingham==1.5.4",
    "sniffio==1.3.1",
    "sse-starlette==3.7.0",
    "starlette==1.10.0",
    "tenacity==9.2.1",
    "tiktoken==0.14.0",
    "tokenizers==0.23.3",
    "tqdm==4.70.1",
    "truststore==0.10.5",
    "typer==0.29.2",
    "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
    "urllib3==2.8.0",
    "uvicorn==0.54.0",
    "yarl==1.25.1",
    "zipp==4.1.2",
)
