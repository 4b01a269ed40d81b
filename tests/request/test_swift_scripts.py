"""Python scripts that call ms-swift's main functions, read as the command of the same training."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.request.sources.swift_script import swift_command

SFT = """
import os
from swift.llm import sft_main, TrainArguments
os.environ["NPROC_PER_NODE"] = "4"
NAME = "Qwen/Qwen2.5-0.5B-Instruct"
arguments = TrainArguments(
    model=NAME, train_type="full", dataset=["a", "b c"], max_length=512, packing=True,
    learning_rate=1e-4, deepspeed="zero3", resume_from_checkpoint=None,
)
if __name__ == "__main__":
    sft_main(arguments)
"""


SFT_COMMAND = (
    "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-0.5B-Instruct --train_type full"
    " --dataset a 'b c' --max_length 512 --packing true --learning_rate 0.0001"
    " --deepspeed zero3"
)
OF_2 = "from swift.llm import *\nsft_main(SftArguments(model_type=ModelType.qwen2_7b_instruct))\n"
MERGED = "from swift.llm import *\nbase = {'lora_rank': 4}\nsft_main(T(model=a.model, **base))\n"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            SFT,
            SFT_COMMAND,
        ),
        (
            "from swift.llm import *\nrlhf_main(RLHFArguments(rlhf_type='grpo', use_vllm=False))\n",
            "swift rlhf --rlhf_type grpo --use_vllm false",
        ),
        (
            "from swift import sft_main\nsft_main(['--model', 'a/b', '--max_length', '64'])\n",
            "swift sft --model a/b --max_length 64",
        ),
        (
            OF_2,
            "swift sft --model_type qwen2-7b-instruct",
        ),
        (
            MERGED,
            "swift sft --model $model --lora_rank 4",
        ),
        ("from other import sft_main\nsft_main(TrainArguments(model='swift'))\n", None),
        ("from swift.llm import infer_main\ninfer_main(X(model='a'))\n", None),
        ("from swift.llm import sft_main\nsft_main(\n", None),
    ],
)
def test_the_command_of_a_script(text: str, command: str | None) -> None:
    assert swift_command(text) == command


def test_a_script_is_predicted_as_its_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SFT)
    request: ParsedRequest = parse_request(
        Flags(script=str(script), gpus="8xA100-80G", mode="predict")
    )
    settings = candidate_of_job(request).settings
    assert (request.job.task.workload.framework, settings["deepspeed"]) == ("swift", "zero3")
    assert (settings["max_length"], settings["packing"]) == (512, True)
    assert any("although the script has 4 (NPROC_PER_NODE=4" in line for line in request.assumed)
    assert any("train.py as the command of ms-swift" in line for line in request.assumed)
