"""The gateway: what agents ask the policy, and the tokens that answered them."""
