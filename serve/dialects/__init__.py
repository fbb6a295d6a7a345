"""Wire dialects of the gateway: thin translations between a provider's JSON and our conversation model."""
