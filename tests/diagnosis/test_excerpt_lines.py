"""Who printed a line of an excerpt decides whether its words are a failure."""

from __future__ import annotations

import pytest

from autotune.diagnosis import diagnose
from tests.every import for_each

MISSING = "some_part requires a newer package: please install it"
REFUSED = "batch_size must be at most 4"


@for_each([MISSING, REFUSED])
def test_a_message_counts_by_the_level_that_its_logger_wrote(message: str) -> None:
    assert diagnose(message).known
    assert diagnose(f"ERROR 06-01 12:00:00 [x.py:8] {message}").known
    for prefix in (
        "WARNING 06-01 12:00:00 [x.py:8] ",
        "INFO 06-01 12:00:00 [x.py:8] ",
        "06/01/2025 12:00:00 - INFO - some.module - ",
        "2025-06-01 12:00:00,123 - __main__ - WARNING - ",
        "2025-06-01 12:00:00,123\tINFO worker.py:8 -- ",
        "[2025-06-01 12:00:00,123] [INFO] [x.y:8] [PID:1] [RANK:0] ",
        "^[[93m[WARNING]^[[0m ",
    ):
        assert not diagnose(f"{prefix}{message}").known, prefix


def test_a_lost_peer_counts_in_a_warning_and_not_in_an_info() -> None:
    message = "the node has missed too many heartbeats"
    assert diagnose(f"WARNING 06-01 12:00:00 [x.py:8] {message}").cause == "hang_or_nccl"
    assert not diagnose(f"INFO 06-01 12:00:00 [x.py:8] {message}").known


def test_an_info_before_the_process_ends_is_its_failure() -> None:
    line = "[2025-06-01 12:00:00,123] [INFO] [RANK 0] Unable to load the checkpoint x{}"
    assert diagnose(line.format(", exiting.")).cause == "illegal_config"
    assert not diagnose(line.format("; starting anew.")).known


WARNED = """/venv/lib/python3.11/site-packages/some/part.py:8: {category}: {message}
{more}  warnings.warn(
"""


def test_what_pythons_warnings_print_is_no_failure() -> None:
    for category in ("UserWarning", "RuntimeWarning", "some.part.OddWarning"):
        text = WARNED.format(category=category, message=MISSING, more="")
        assert not diagnose(text).known
        # The message goes on until the statement, which is indented.
        longer = WARNED.format(
            category=category, message="no commit:", more="No module named 'a.b'\n"
        )
        assert not diagnose(longer).known
        assert diagnose(f"{longer}No module named 'a.b'").cause == "version"


def test_a_warning_that_the_device_is_of_no_use_is_a_failure() -> None:
    for message in (
        "CUDA initialization: The NVIDIA driver on your system is too old",
        "it was compiled without GPU support",
    ):
        text = WARNED.format(category="UserWarning", message=message, more="")
        assert diagnose(text).cause == "version"
    unbound = "Failed to import from a._C with ImportError('a.so: undefined symbol: _ZN2at')"
    assert diagnose(f"WARNING 06-01 12:00:00 [x.py:8] {unbound}").cause == "version"


@pytest.mark.parametrize(
    ("scale", "cause"), [("32768", None), ("16.0", None), ("1", "numeric"), ("0", "numeric")]
)
def test_a_falling_scale_is_a_failure_at_its_end_alone(scale: str, cause: str | None) -> None:
    line = "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to {}"
    for prefix in ("", "[2025-06-01 12:00:00,123] [INFO] [loss_scaler.py:1:update] "):
        assert diagnose(prefix + line.format(scale)).cause == cause


def test_the_label_of_a_title_does_not_hide_its_message() -> None:
    message = "vllm serve: error: the following arguments are required: model_tag"
    for label in ("[Bug]: ", "[BUG] ", "[Usage]: ", "> "):
        assert diagnose(f"{label}{message}").cause == "illegal_config"


def test_a_message_begins_on_the_line_behind_its_class() -> None:
    text = "RuntimeError: \n    Some tensors of the state_dict are views"
    assert diagnose(text).cause == "illegal_config"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("mode_of_x must be either 'a' or 'b', got 'c'.", "illegal_config"),
        ("`chat_template` is null", "illegal_config"),
        ("assert config.size >= config.other.size", "illegal_config"),
        ("RuntimeError: tensor does not have a device", "illegal_config"),
        ("optimizer.load(checkpoint[\"optimizer\"])\nKeyError: 'optimizer'", "illegal_config"),
        ("f() got an unexpected keyword argument 'x'", "version"),
        ("'trainer-cli' is not recognized as an internal or external command", "version"),
        ("RuntimeError: PassManager::run failed", "version"),
        ("no attribute 'load_lora'", "version"),
        ('INTERNAL ASSERT FAILED at "../aten/src/ATen/cuda/CUDAContext.cpp":49', "cuda_fault"),
        ('INTERNAL ASSERT FAILED at "../torch/csrc/autograd/x.cpp":49', "version"),
    ],
)
def test_a_message_without_its_usual_class_is_named_by_its_form(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


@for_each(
    [
        "the run must be fast",
        "NOTE: Ops not installed will be compiled at\n      runtime if needed.",
        "WARNING: sizes of a_part should be equal",
        "Attempt 13: Please wait for the server to become ready...",
    ]
)
def test_a_sentence_without_a_setting_or_of_a_remark_is_none(text: str) -> None:
    assert not diagnose(text).known


CACHE = """  File "/v/lib/python3.11/site-packages/vllm/v1/worker.py", line 7, in {function}
    self.{function}(config)
{error}
"""


def test_remedies_of_an_engines_cache_do_not_lower_what_is_generated() -> None:
    """The engine allocates its cache once, by its share and one sequence of the longest length."""
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    small = "ValueError: To"
    for function, error in (
        ("initialize_kv_cache", full),
        ("_check_enough_kv_cache_memory", small),
    ):
        diagnosis = diagnose(CACHE.format(function=function, error=error))
        assert diagnosis.cause == "kv_cache"
        settings = [setting for advice in diagnosis.remedies for setting in advice.change]
        assert "num_generations" not in settings and "max_completion_length" not in settings


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("INFO - trl.extras.vllm_client - Server is not up yet. Retrying in 2.0 s", "server"),
        ("size mismatch for a.lora_A.weight: copying a param with shape [32, 8]", "adapter"),
    ],
)
def test_the_first_remedy_is_of_what_the_line_names(text: str, setting: str) -> None:
    first = diagnose(text).remedies[0]
    assert setting in next(iter(first.change))
