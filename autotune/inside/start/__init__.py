"""The folder that comes first on the path of a run whose models are looked at: see `autotune.inside.watched`."""
