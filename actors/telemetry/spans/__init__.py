"""The spans of a run after they were written: reading, limits, the choice for a collector, and exports."""
