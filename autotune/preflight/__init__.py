"""Preflight: proof that a configuration fits on this machine, and a search if it does not."""
