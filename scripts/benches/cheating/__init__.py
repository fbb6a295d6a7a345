"""Parts of the cheats bench, `scripts/bench cheats`."""
