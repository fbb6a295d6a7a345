"""The embedded CPU engine: a small Qwen3 model behind SGLang's HTTP contract."""
