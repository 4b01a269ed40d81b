"""From what was typed, on a command line or in Python, to a Question."""
