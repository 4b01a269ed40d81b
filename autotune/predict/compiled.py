"""Functions that numba compiles, where it is installed, and keeps on disk.

A compiled function that hands an array on counts who holds it, which is an atomic write each time, and a quarter of a walk
through the allocator. Arrays whose caller holds them all the while need no counting: `uncounted` are the same without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    import numba
    from numba.extending import intrinsic
except ImportError:  # then the readable code does it all
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])
Integers = NDArray[np.int64]


def is_there() -> bool:
    return numba is not None


def compiled(function: Function) -> Function:
    """Without a check at each access, which takes twice as long as all the rest: whoever calls it looks before."""
    return function if numba is None else numba.njit(cache=True, nogil=True)(function)


if numba is not None:

    @intrinsic  # type: ignore[untyped-decorator]
    def _at(context: Any, address: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

        return numba.types.CPointer(numba.types.int64)(address), generate


@compiled
def uncounted(array: Integers) -> Integers:
    """The same memory. Its caller must hold the array as long as this is used."""
    same: Integers = numba.carray(_at(array.ctypes.data), array.shape)
    return same
