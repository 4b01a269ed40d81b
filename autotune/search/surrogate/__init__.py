"""Surrogate model of the search: estimates of memory and speed for every candidate."""
