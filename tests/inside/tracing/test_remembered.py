"""What operations gave, remembered: a second time it is what the fake mode gives, in form and in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from autotune.inside.tracing import made, remembered, values  # noqa: E402
from autotune.inside.tracing.ledger import Ledger  # noqa: E402
from autotune.inside.tracing.operands import tensors_in  # noqa: E402
from autotune.inside.tracing.tracker import Tracker  # noqa: E402

aten = torch.ops.aten

UNKNOWN = object()


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remembered, "_results", {})
    yield


def fake_mode() -> Any:
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def form(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        return type(value), [form(one) for one in value]
    return remembered._form(value)


def once_more(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the fake mode gives, and what is remembered of it."""
    key = remembered.key_of(func, args, kwargs)
    out = func(*args, **kwargs)
    if key is None:
        return out, UNKNOWN
    remembered.note(key, func, args, kwargs, mode_of(out), out)
    return out, again_of(func, *args, **kwargs)


def again_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    known = remembered.find(remembered.key_of(func, args, kwargs))
    return UNKNOWN if known is None else known.again(args, kwargs, mode_of(torch.empty(0)))


def mode_of(out: Any) -> Any:
    return next(one.fake_mode for one in tensors_in((out,)))


def settled(events: list[int]) -> list[int]:
    """What is given back at one moment in one order: otherwise chance decides."""
    runs = [list(run) for _, run in itertools.groupby(events, lambda event: event > 0)]
    return [event for run in runs for event in (run if run[0] > 0 else sorted(run))]


def rows() -> Any:
    return torch.empty(4, 6, dtype=torch.bfloat16)


REMEMBERED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a product": lambda: once_more(aten.mm.default, rows(), rows().t()),
    "a view": lambda: once_more(aten.transpose.int, rows(), 0, 1),
    "a view that autograd takes for none": lambda: once_more(aten._unsafe_view.default, rows(), [2, 12]),
    "rows at places": lambda: once_more(aten.index.Tensor, rows(), [torch.zeros(2, dtype=torch.long)]),
    "part of a row": lambda: once_more(aten.slice.Tensor, rows(), 1, 2, 5),
    "a view with steps": lambda: once_more(aten.as_strided.default, rows(), [2, 2], [12, 3], 3),
    "another dtype": lambda: once_more(aten._to_copy.default, rows(), dtype=torch.float32),
    "in place": lambda: once_more(aten.add_.Tensor, rows(), rows()),
    "into what is given for it": lambda: once_more(aten.mm.out, rows(), rows().t(), out=torch.empty(4, 4, dtype=torch.bfloat16)),
    "several": lambda: once_more(aten.native_layer_norm.default, rows(), [6], None, None, 1e-5),
    "several views": lambda: once_more(aten.unbind.int, rows(), 1),
    "a list of tensors": lambda: once_more(aten.cat.default, [rows(), rows()], 1),
    "nothing is given to it": lambda: once_more(aten.zeros.default, [2, 2], dtype=torch.int64, device=torch.device("cpu")),
    "a scalar": lambda: once_more(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), 2.0),
}
NOT_REMEMBERED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "it becomes another": lambda: once_more(aten.t_.default, rows()),
    "a number that torch knows": lambda: once_more(aten.add.Tensor, torch.tensor(3), 1),
    "what is given for it is too small": lambda: once_more(
        aten.mm.out, rows(), rows().t(), out=torch.empty(0, dtype=torch.bfloat16)
    ),
    "a tensor that is not fake": lambda: once_more(aten.add.Tensor, rows(), REAL),
}
REAL = torch.ones(4, 6)


@pytest.mark.parametrize("what", REMEMBERED)
def test_a_second_time_it_is_the_same(what: str) -> None:
    with fake_mode():
        out, again = REMEMBERED[what]()
        assert again is not UNKNOWN
        assert form(again) == form(out)


@pytest.mark.parametrize("what", NOT_REMEMBERED)
def test_what_its_form_does_not_tell_is_not_remembered(what: str) -> None:
    with fake_mode():
        assert NOT_REMEMBERED[what]()[1] is UNKNOWN


def test_what_hangs_on_data_is_not_remembered() -> None:
    with fake_mode():
        mask, places = torch.empty(4, dtype=torch.bool), torch.empty(2, dtype=torch.int64)
        assert not remembered._is_plain(aten.nonzero.default, (rows(),))
        assert not remembered._is_plain(aten.index.Tensor, (rows(), [mask]))
        assert remembered._is_plain(aten.index.Tensor, (rows(), [None, places]))


@pytest.mark.parametrize(("func", "how"), [(aten.transpose.int, (0, 1)), (aten._unsafe_view.default, ([2, 12],))])
def test_a_view_shares_its_operands_memory_and_a_result_has_its_own(func: Any, how: tuple[Any, ...]) -> None:
    with fake_mode():
        whole, other = rows(), rows()
        once_more(func, whole, *how)
        view = again_of(func, other, *how)
        assert view.untyped_storage()._cdata == other.untyped_storage()._cdata != whole.untyped_storage()._cdata
        _, sum_of = once_more(aten.add.Tensor, whole, other)
        assert sum_of.untyped_storage()._cdata not in (whole.untyped_storage()._cdata, other.untyped_storage()._cdata)


@pytest.mark.parametrize("lenient", [True, False])
def test_a_fake_tensor_is_what_its_class_makes(lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_noted", {})
    device, modes = torch.device("cpu"), [fake_mode(), fake_mode()]
    for mode in modes:
        mode._allow_unsafe_data_ptr_access = lenient
        plain = [torch.empty(3, 4, device="meta") for _ in range(2)]
        with torch._C._DisableTorchDispatch():
            ours, its = made._fake(mode, plain[0], device), torch._subclasses.FakeTensor(mode, plain[1], device)
        assert vars(ours) == vars(its)
        assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(its)
        assert ours.fake_mode is mode
        if not lenient:
            with pytest.raises(RuntimeError, match="data pointer"):
                ours.data_ptr()


def test_memory_that_was_given_back_is_not_asked_for_by_a_view_of_it() -> None:
    mode = fake_mode()
    mode.cache_enabled = False  # torch's own memory does ask for it
    with mode:
        whole = rows()
        once_more(aten.transpose.int, whole, 0, 1)
        whole.untyped_storage().resize_(0)
        assert once_more(aten.transpose.int, whole, 0, 1)[1] is UNKNOWN
        assert whole.untyped_storage().nbytes() == 0


def test_what_is_changed_in_place_stays_itself() -> None:
    with fake_mode():
        first, second = rows(), rows()
        once_more(aten.add_.Tensor, first, 1)
        assert again_of(aten.add_.Tensor, second, 1) is second


def test_what_is_written_into_stays_itself() -> None:
    with fake_mode():
        one, buffer, out = rows(), torch.empty(16, 16, dtype=torch.bfloat16), {"out": torch.empty(4, 4, dtype=torch.bfloat16)}
        once_more(aten.mm.out, one, one.t(), **out)
        part = {"out": buffer.view(-1)[:16].view(4, 4)}
        assert again_of(aten.mm.out, one, one.t(), **out) is out["out"]
        assert again_of(aten.mm.out, one, one.t(), **part) is UNKNOWN


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.int64), (1.0, torch.float32), (True, torch.int64)])
def test_equal_numbers_of_another_kind_are_told_apart(number: object, dtype: Any) -> None:
    with fake_mode():
        for kind in (True, 1.0, 1):
            once_more(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), kind)
        assert once_more(aten.mul.Tensor, torch.empty(3, dtype=torch.int64), number)[1].dtype is dtype


def test_the_default_dtype_is_looked_at() -> None:
    with fake_mode():
        whole = torch.empty(3, dtype=torch.int64)
        once_more(aten.div.Tensor, whole, whole)
        torch.set_default_dtype(torch.float64)
        try:
            assert again_of(aten.div.Tensor, whole, whole) is UNKNOWN
        finally:
            torch.set_default_dtype(torch.float32)


def test_it_is_forgotten_before_it_takes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 2)
    with fake_mode():
        for columns in range(1, 6):
            once_more(aten.add.Tensor, torch.empty(columns), 1)
    assert len(remembered._results) <= 2


def test_a_step_books_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, checkpoints, gradients that add up, a mask whose values decide, and an optimizer."""

    def step() -> tuple[list[int], list[int]]:
        ledger = Ledger()
        with fake_mode(), Tracker(ledger):
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.LayerNorm(8))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                hidden = checkpoint(model, torch.empty(5, 8, requires_grad=True), use_reentrant=False)
                mask = torch.tensor([True, False, True, True, False])
                (hidden[mask].exp() + hidden[mask]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert values.count(mask) == 3
        ledger.close()
        return ledger.sizes, settled(ledger.events)

    first, second = step(), step()
    assert remembered._results
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "key_of", lambda *_: None)
        without = step()
    assert first == second == without
