"""Toy framework for tests on emulated cards: each rank takes its card as a trainer does and
allocates on it.
"""

import os
import signal


def warm(load_hint):
    import torch

    return {"torch": torch.__version__}


def load(request, stage):
    import torch

    torch.cuda.set_device(stage.local_rank)
    with stage.inside("load"):
        return {"held": [_take(request.get("load_mib", 1))]}


def measure(
    loaded,
    request,
    stage,
):
    import torch

    with stage.inside(request.get("phase", "backward")):
        loaded["held"].append(_take(request.get("mib", 1)))
        _meet(request, stage)
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return {
        "worst": {
            "completion_tokens": 8,
            "cycle_seconds": [0.1, 0.1],
            "cycle_loss_tokens": [8, 8],
            "prompt_tokens": 8,
            "phase_seconds": {},
            "user_reward_seconds": 0.0,
            "cut_short": False,
        },
        "typical": None,
        "optimizer_steps": 2,
        "effective": {
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "count": torch.cuda.device_count(),
            "rank": stage.rank,
        },
        "setup_seconds": 0.01,
        "loop_seconds": 0.2,
        "world_size": stage.world_size,
        "memory": {"device_uuid": f"GPU-{uuid}"},
    }


def release(loaded):
    return False


def _take(mib):
    import torch

    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


def _meet(request, stage):
    """Synchronise all ranks but `absent`; `killed` ends by a signal instead."""
    import torch

    if stage.rank == request.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "killed" in request or "absent" in request:
        torch.distributed.init_process_group("nccl")
        if stage.rank != request.get("absent"):
            torch.distributed.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
        else:
            signal.pause()
