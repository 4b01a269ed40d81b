"""Memory and speed from a trace, a composition and hardware: pure functions, no device."""
