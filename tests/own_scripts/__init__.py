"""Typical user scripts, run by the tests."""
