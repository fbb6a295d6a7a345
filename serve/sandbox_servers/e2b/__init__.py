"""E2B-compatible server over any sandbox provider, with control plane and envd on one base URL."""
