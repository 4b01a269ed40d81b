"""An actor under Ray that meets a mistake of the user's."""

from __future__ import annotations

import ray

ray.init(num_cpus=2, include_dashboard=False)


@ray.remote
def reward(answers):
    return [float(answer["score"]) for answer in answers]


ray.get(reward.remote([{"text": "4"}]))
