"""Effects: specs as bytes, names, stores, checkpoints and metrics. Knows core's data, never a backend."""
