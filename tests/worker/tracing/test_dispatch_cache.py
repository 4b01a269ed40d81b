"""Dispatch cache: cached results, and results by rule, have the form and memory of the fake
mode's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from autotune.worker.tracing import dispatch_cache, integer_values  # noqa: E402
from autotune.worker.tracing.ledger import Ledger  # noqa: E402
from autotune.worker.tracing.operands import tensors_in  # noqa: E402
from autotune.worker.tracing.tracker import Tracker  # noqa: E402

aten = torch.ops.aten

MISS = object()


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch_cache, "_results", {})
    yield


def fake_mode() -> Any:
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def form(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        return type(value), [form(element) for element in value]
    return dispatch_cache._form(value)


def run_and_note(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the fake mode's result and the cached one."""
    key = dispatch_cache.key_of(func, args, kwargs)
    out = func(*args, **kwargs)
    if key is None:
        return out, MISS
    dispatch_cache.note(key, func, args, kwargs, mode_of(out), out)
    return out, cached_of(func, *args, **kwargs)


def cached_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    entry = dispatch_cache.find(dispatch_cache.key_of(func, args, kwargs))
    return MISS if entry is None else entry.again(args, kwargs, mode_of(torch.empty(0)))


def mode_of(out: Any) -> Any:
    return next(tensor.fake_mode for tensor in tensors_in((out,)))


def ordered(events: list[int]) -> list[int]:
    """Return the events with simultaneous frees sorted."""
    runs = [list(run) for _, run in itertools.groupby(events, lambda event: event > 0)]
    return [event for run in runs for event in (run if run[0] > 0 else sorted(run))]


def rows() -> Any:
    return torch.empty(4, 6, dtype=torch.bfloat16)


CACHED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a product": lambda: run_and_note(aten.mm.default, rows(), rows().t()),
    "a view": lambda: run_and_note(aten.transpose.int, rows(), 0, 1),
    "a view not declared as such": lambda: run_and_note(aten._unsafe_view.default, rows(), [2, 12]),
    "rows at places": lambda: run_and_note(
        aten.index.Tensor, rows(), [torch.zeros(2, dtype=torch.long)]
    ),
    "part of a row": lambda: run_and_note(aten.slice.Tensor, rows(), 1, 2, 5),
    "a view with steps": lambda: run_and_note(aten.as_strided.default, rows(), [2, 2], [12, 3], 3),
    "another dtype": lambda: run_and_note(aten._to_copy.default, rows(), dtype=torch.float32),
    "in place": lambda: run_and_note(aten.add_.Tensor, rows(), rows()),
    "into an out argument": lambda: run_and_note(
        aten.mm.out, rows(), rows().t(), out=torch.empty(4, 4, dtype=torch.bfloat16)
    ),
    "several": lambda: run_and_note(aten.native_layer_norm.default, rows(), [6], None, None, 1e-5),
    "several views": lambda: run_and_note(aten.unbind.int, rows(), 1),
    "a list of tensors": lambda: run_and_note(aten.cat.default, [rows(), rows()], 1),
    "without operands": lambda: run_and_note(
        aten.zeros.default, [2, 2], dtype=torch.int64, device=torch.device("cpu")
    ),
    "a scalar": lambda: run_and_note(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), 2.0),
}
NOT_CACHED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "metadata changed in place": lambda: run_and_note(aten.t_.default, rows()),
    "a constant known to torch": lambda: run_and_note(aten.add.Tensor, torch.tensor(3), 1),
    "an out argument too small": lambda: run_and_note(
        aten.mm.out, rows(), rows().t(), out=torch.empty(0, dtype=torch.bfloat16)
    ),
    "a tensor that is not fake": lambda: run_and_note(aten.add.Tensor, rows(), REAL),
}
REAL = torch.ones(4, 6)


@pytest.mark.parametrize("case", CACHED)
def test_the_cached_result_has_the_same_form(case: str) -> None:
    with fake_mode():
        out, again = CACHED[case]()
        assert again is not MISS
        assert form(again) == form(out)


@pytest.mark.parametrize("case", NOT_CACHED)
def test_results_not_determined_by_the_form_are_not_cached(case: str) -> None:
    with fake_mode():
        assert NOT_CACHED[case]()[1] is MISS


def test_results_that_depend_on_data_are_not_cached() -> None:
    with fake_mode():
        mask = torch.empty(4, dtype=torch.bool)
        places = torch.empty(2, dtype=torch.int64)
        assert not dispatch_cache._is_cacheable(aten.nonzero.default, (rows(),))
        assert not dispatch_cache._is_cacheable(aten.index.Tensor, (rows(), [mask]))
        assert dispatch_cache._is_cacheable(aten.index.Tensor, (rows(), [None, places]))


@pytest.mark.parametrize(
    ("func", "how"),
    [
        (aten.transpose.int, (0, 1)),
        (aten._unsafe_view.default, ([2, 12],)),
    ],
)
def test_a_cached_view_shares_its_operands_memory(func: Any, how: tuple[Any, ...]) -> None:
    with fake_mode():
        first, second = rows(), rows()
        run_and_note(func, first, *how)
        view = cached_of(func, second, *how)
        assert (
            view.untyped_storage()._cdata
            == second.untyped_storage()._cdata
            != first.untyped_storage()._cdata
        )
        _, sum_of = run_and_note(aten.add.Tensor, first, second)
        assert sum_of.untyped_storage()._cdata not in (
            first.untyped_storage()._cdata,
            second.untyped_storage()._cdata,
        )


@pytest.mark.parametrize("lenient", [True, False])
def test_a_fake_tensor_equals_that_of_its_class(
    lenient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_cache, "_attributes", {})
    device = torch.device("cpu")
    modes = [fake_mode(), fake_mode()]
    for mode in modes:
        mode._allow_unsafe_data_ptr_access = lenient
        plain = [torch.empty(3, 4, device="meta") for _ in range(2)]
        with torch._C._DisableTorchDispatch():
            fast = dispatch_cache._fake(mode, plain[0], device)
            its = torch._subclasses.FakeTensor(mode, plain[1], device)
        assert vars(fast) == vars(its)
        assert torch._C._dispatch_keys(fast) == torch._C._dispatch_keys(its)
        assert fast.fake_mode is mode
        if not lenient:
            with pytest.raises(RuntimeError, match="data pointer"):
                fast.data_ptr()


def test_a_view_of_freed_memory_does_not_allocate_it() -> None:
    mode = fake_mode()
    mode.cache_enabled = False  # torch's own cache does allocate it
    with mode:
        base = rows()
        run_and_note(aten.transpose.int, base, 0, 1)
        base.untyped_storage().resize_(0)
        assert run_and_note(aten.transpose.int, base, 0, 1)[1] is MISS
        assert base.untyped_storage().nbytes() == 0


def test_an_in_place_operation_returns_its_operand() -> None:
    with fake_mode():
        first, second = rows(), rows()
        run_and_note(aten.add_.Tensor, first, 1)
        assert cached_of(aten.add_.Tensor, second, 1) is second


def test_an_out_argument_is_returned() -> None:
    with fake_mode():
        matrix = rows()
        buffer = torch.empty(16, 16, dtype=torch.bfloat16)
        out = {"out": torch.empty(4, 4, dtype=torch.bfloat16)}
        run_and_note(aten.mm.out, matrix, matrix.t(), **out)
        part = {"out": buffer.view(-1)[:16].view(4, 4)}
        assert cached_of(aten.mm.out, matrix, matrix.t(), **out) is out["out"]
        assert cached_of(aten.mm.out, matrix, matrix.t(), **part) is MISS


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (1, torch.int64),
        (1.0, torch.float32),
        (True, torch.int64),
    ],
)
def test_equal_numbers_of_other_types_are_distinguished(number: object, dtype: Any) -> None:
    with fake_mode():
        for kind in (True, 1.0, 1):
            run_and_note(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), kind)
        assert (
            run_and_note(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), number)[1].dtype
            is dtype
        )


def test_the_default_dtype_is_part_of_the_key() -> None:
    with fake_mode():
        integers = torch.empty(3, dtype=torch.int64)
        run_and_note(aten.div.Tensor, integers, integers)
        torch.set_default_dtype(torch.float64)
        try:
            assert cached_of(aten.div.Tensor, integers, integers) is MISS
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_cache, "MAX_RESULTS", 2)
    with fake_mode():
        for columns in range(1, 6):
            run_and_note(aten.add.Tensor, torch.empty(columns), 1)
    assert len(dispatch_cache._results) <= 2


def test_a_step_records_the_same_with_and_without_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cover layers, checkpoints, gradient accumulation, a mask with known values, and an
    optimizer.
    """

    def step() -> tuple[list[int], list[int]]:
        ledger = Ledger()
        with fake_mode(), Tracker(ledger):
            model = torch.nn.Sequential(
                *(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.LayerNorm(8)
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                hidden = checkpoint(
                    model, torch.empty(5, 8, requires_grad=True), use_reentrant=False
                )
                mask = torch.tensor([True, False, True, True, False])
                (hidden[mask].exp() + hidden[mask]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert integer_values.count(mask) == 3
        ledger.close()
        return ledger.sizes, ordered(ledger.events)

    first, second = step(), step()
    assert dispatch_cache._results
    with monkeypatch.context() as patch:
        patch.setattr(dispatch_cache, "key_of", lambda *_: None)
        without = step()
    assert first == second == without


# Rules for rows.

LEARNS = torch.nn.Parameter(REAL)
ONE_NUMBER = torch.tensor([3])


def conjugated() -> Any:
    return torch.empty(4, 6, dtype=torch.complex64).conj()


def freed() -> Any:
    tensor = torch.empty(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("real", [REAL, REAL.long(), torch.ones(2, 1, dtype=torch.bool)])
def test_lifting_a_new_tensor(real: Any) -> None:
    with fake_mode() as mode:
        fast = dispatch_cache.by_rule(aten.lift_fresh.default, (real,), {}, mode)
        its = aten.lift_fresh.default(real)
        assert dispatch_cache._form(fast) == dispatch_cache._form(its)
        assert fast.fake_mode is mode
        assert fast.constant is its.constant is None


@pytest.mark.parametrize(
    ("dim", "index"),
    [
        (0, 0),
        (0, 3),
        (1, 5),
    ],
)
def test_selecting_a_row(dim: int, index: int) -> None:
    with fake_mode() as mode:
        for base in (torch.empty(4, 6), torch.empty(3, 4, 6)[1]):
            fast = dispatch_cache.by_rule(aten.select.int, (base, dim, index), {}, mode)
            its = base.select(dim, index)
            assert dispatch_cache._form(fast) == dispatch_cache._form(its)
            assert fast.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_the_target_of_a_copy_is_returned() -> None:
    with fake_mode() as mode:
        target = torch.empty(4, 6)
        source = torch.empty(4, 6, dtype=torch.int64)
        assert dispatch_cache.by_rule(aten.copy_.default, (target, source), {}, mode) is target


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.lift_fresh.default, lambda: (LEARNS,)),
        (aten.lift_fresh.default, lambda: (ONE_NUMBER,)),
        (aten.lift_fresh.default, lambda: (REAL[1:],)),
        (aten.lift_fresh.default, lambda: (REAL.t(),)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, -1)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, 4)),
        (aten.select.int, lambda: (freed(), 0, 1)),
        (aten.select.int, lambda: (conjugated(), 0, 1)),
        (aten.copy_.default, lambda: (torch.empty(4, 6), torch.empty(6))),
        (aten.copy_.default, lambda: (torch.tensor(3), torch.tensor(4))),
        (aten.copy_.default, lambda: (torch.empty(4, 6), REAL)),
        (aten.add.Tensor, lambda: (torch.empty(4, 6), 1)),
    ],
)
def test_other_cases_have_no_rule(func: Any, arguments: Any) -> None:
    with fake_mode() as mode:
        assert dispatch_cache.by_rule(func, arguments(), {}, mode) is None
