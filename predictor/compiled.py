"""How the engine model is compiled: one decorator, and one cache that no edit can leave stale."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config as numba_config
from numba.extending import is_jitted

F = TypeVar("F", bound=Callable[..., Any])

HOLDS_KERNELS = re.compile(rb"from predictor\.compiled import [^\n]*kernel")


def _cache_directory() -> Path:
    """Name a cache after the sources themselves.

    Numba looks only at the file that holds a compiled function, not at those it calls; a digest of all of them
    makes an edit anywhere in the package start a fresh cache.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        text = source.read_bytes()
        if HOLDS_KERNELS.search(text) or source == Path(__file__):
            digest.update(text)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return home / "block" / f"kernels-{digest.hexdigest()[:16]}"


if "NUMBA_CACHE_DIR" not in os.environ:
    numba_config.CACHE_DIR = str(_cache_directory())  # type: ignore[attr-defined]  # it sets its names at import


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def kernel(function: F) -> F:
    """Compile a function, cache the machine code, and let it run without the interpreter lock.

    Kernels borrow the arrays they work on and make none, so that they need no reference counts: counting made the
    loop eight times slower.
    """
    return cast("F", numba.njit(cache=True, **OPTIONS)(function))


def small_kernel(function: F) -> F:
    """Compile a function of a few lines into each kernel that calls it: passing it the state would cost more."""
    return cast("F", numba.njit(cache=True, forceinline=True, **OPTIONS)(function))


def inner_kernel(function: F) -> F:
    """Compile a function that only other kernels call, such as a closure, whose code is cached as part of theirs."""
    return cast("F", numba.njit(**OPTIONS)(function))


def direct(function: F) -> F:
    """Call a kernel's machine code straight away: finding out the types of a state takes longer than many a kernel.

    The first call compiles it for the types it gets; every later one must bring the same.
    """
    if not is_jitted(function):
        return function
    entry: Any = None

    def call(*arguments: Any) -> Any:
        nonlocal entry
        if entry is not None:
            return entry(*arguments)
        result = function(*arguments)
        # other kernels may have had it compiled for theirs
        types = tuple(function.typeof_pyval(argument) for argument in arguments)
        entry = function.overloads[types].entry_point  # type: ignore[attr-defined]  # numba makes it at run time
        return result

    return cast("F", call)


def interpreted(function: F) -> F:
    """Get the plain Python behind a kernel, for callers in Python: kernels cannot hand arrays out."""
    return cast("F", getattr(function, "py_func", function))
