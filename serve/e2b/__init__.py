"""An E2B-compatible server over any sandbox provider: control plane and envd on one base URL."""
