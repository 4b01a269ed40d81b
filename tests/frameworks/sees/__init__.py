"""Programs that make a framework's real holders of models, as far as they can be made without a
GPU, in its own environment.
"""
