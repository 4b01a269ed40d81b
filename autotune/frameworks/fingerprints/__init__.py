"""Fingerprints of a framework's source files: which release a copy of it is nearest to, and which
of its files are no release's.
"""
