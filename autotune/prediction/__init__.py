"""Predictions of candidates: tracing workers, trace cache, and the service that combines them."""
