"""From a trace, a composition and hardware to memory and speed: pure functions, no framework, no device."""
