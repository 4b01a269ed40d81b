"""Flags, configuration files and scripts -> Job."""
