"""Predictions turned round: the largest value of a setting that fits, the cheapest hardware that fits."""
