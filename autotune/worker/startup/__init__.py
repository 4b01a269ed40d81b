"""First folder on the path of a run whose models are measured: see `model_watch`."""
