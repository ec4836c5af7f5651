"""Decorators that compile the engine model, and the directory of the cached machine code."""

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

FOLDERS = ("predictor", "simulator", "services/emulator")  # with kernels, in a checkout and where Block is installed
HOLDS_KERNELS = re.compile(rb"predictor\.compiled import [^\n]*kernel")
IMPORT = re.compile(
    rb"^from (?:\w+\.)*?((?:predictor|simulator|services)[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE
)
CONSTANT = re.compile(rb"\b[A-Z][A-Z0-9_]+\b")


def kernel_sources(root: Path) -> list[Path]:
    """Return the files that contain kernels, and those that define the constants which these files import."""
    found = {root / "predictor" / "compiled.py"}
    for folder in FOLDERS:
        for source in (root / folder).rglob("*.py"):
            text = source.read_bytes()
            if HOLDS_KERNELS.search(text):
                found.add(source)
                modules = {module.decode() for module, names in IMPORT.findall(text) if CONSTANT.search(names)}
                found |= {root.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    return sorted(source for source in found if source.is_file())  # a package with constants contains kernels itself


def cache_name(root: Path) -> str:
    """Name the cache after a digest of the sources of kernels.

    Numba checks only the file of a compiled function, not the files of the functions that it calls; with a digest of
    all of them, an edit of any of them starts a new cache.
    """
    digest = hashlib.sha256()
    for source in kernel_sources(root):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}"


if "NUMBA_CACHE_DIR" not in os.environ:
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    numba_config.CACHE_DIR = str(home / "block" / cache_name(Path(__file__).parents[1]))  # type: ignore[attr-defined]  # numba defines it at run time


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def kernel(function: F) -> F:
    """Compile a function that runs without the interpreter lock, and cache the machine code.

    Kernels allocate no arrays, so they need no reference counts, which made the loop eight times slower.
    """
    return cast("F", numba.njit(cache=True, **OPTIONS)(function))


def small_kernel(function: F) -> F:
    """Compile a function into each kernel that calls it: a short one, or one that the loop calls at each event.

    A call costs about 30 ns, because all arrays of the state are arguments of their own.
    """
    return cast("F", numba.njit(cache=True, forceinline=True, **OPTIONS)(function))


def inner_kernel(function: F) -> F:
    """Compile a function that only kernels call, such as a closure; its code is cached as a part of theirs."""
    return cast("F", numba.njit(**OPTIONS)(function))


def direct(function: F) -> F:
    """Return a function that calls a kernel's machine code directly, without numba's costly look-up of types.

    The first call compiles the kernel for the types of its arguments; every later call must have the same types.
    """
    if not is_jitted(function):
        return function
    entry: Any = None

    def call(*arguments: Any) -> Any:
        nonlocal entry
        if entry is not None:
            return entry(*arguments)
        result = function(*arguments)
        # the kernel may also be compiled for the types of other callers
        types = tuple(function.typeof_pyval(argument) for argument in arguments)
        entry = function.overloads[types].entry_point  # type: ignore[attr-defined]  # numba defines it at run time
        return result

    return cast("F", call)


def interpreted(function: F) -> F:
    """Return the Python function of a kernel, for callers in Python: kernels cannot return arrays."""
    return cast("F", getattr(function, "py_func", function))
