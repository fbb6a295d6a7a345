"""Where rollouts run: the sandbox pool, leases, the gateway's actor."""
