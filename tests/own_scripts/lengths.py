def length_reward(completions, **kwargs):
    return [float(len(c[0]["content"]) if isinstance(c, list) else len(c)) for c in completions]
