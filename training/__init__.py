"""How training is driven: configuration, optimizer, steps, checkpoints, run folders, telemetry."""
