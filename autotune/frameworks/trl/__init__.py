"""TRL: settings, legality, files, topology and the users' own scripts."""
