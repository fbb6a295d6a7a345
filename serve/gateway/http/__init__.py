"""HTTP of the gateway: a session-aware model API for agents, with its routes, clients and deadlines."""
