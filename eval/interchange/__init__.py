"""Interchange with transformers: runs out as its checkpoints, its checkpoints in as runs (docs/interchange.md)."""
