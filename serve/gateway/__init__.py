"""The gateway: session-aware model API for agents, its routes, clients and deadlines."""
