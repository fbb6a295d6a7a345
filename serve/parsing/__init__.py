"""What the policy meant: reasoning, text and tool calls read out of sampled text."""
