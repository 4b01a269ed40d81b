"""Domain types and the helpers that every other package uses. Imports nothing else of autotune."""
