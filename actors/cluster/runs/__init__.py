"""The runs of a cluster: their table, quotas and the contract of the actor that supervises them."""
