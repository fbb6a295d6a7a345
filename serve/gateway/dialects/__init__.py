"""Dialects of the gateway: translations between a model API's JSON and the conversation model."""
