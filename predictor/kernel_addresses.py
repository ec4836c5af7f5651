"""Calls of kernels by their addresses, so that their machine code is not a part of each kernel that calls them.

Numba compiles a kernel again as a part of every kernel that calls it. With the engine's loop and all local schedulers
in eleven kernels, each had 20 MB of machine code. A kernel that is called by its address is compiled once, and loaded
when it is called first.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import intrinsic, is_jitted

from predictor.compiled import inner_kernel

CallByNumber = Callable[..., Any]
TypesOfArguments = Callable[[], tuple[types.Type, ...]]

_kept: list[Any] = []  # compiled code refers to them by address


def by_address(name: str, kernels: Sequence[Any], result: types.Type, arguments: TypesOfArguments) -> CallByNumber:
    """Return a function for kernels that calls the kernel with the number that is its first argument.

    All of them have these types of arguments, and this type of the result. Addresses are in a table, which compiled
    code finds by the name, and by this module's: another copy of the engine model in the process, such as that of the
    plug-in for vLLM, has tables of its own. Where an address is missing, a callback compiles that kernel, or loads it
    from the cache.
    """
    if not any(is_jitted(kernel) for kernel in kernels):
        return lambda number, *given: kernels[number](*given)
    table = (ctypes.c_void_p * len(kernels))()
    symbol = f"{__name__}.{name}"

    def add(number: int) -> None:
        kernel = kernels[number]
        kernel.compile(arguments())
        compiled = kernel.overloads[arguments()]
        table[number] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int64)(add)
    _kept.extend((table, callback))
    binding.add_symbol(symbol, ctypes.addressof(table))
    binding.add_symbol(f"add_to_{symbol}", ctypes.cast(callback, ctypes.c_void_p).value)

    @intrinsic
    def call(_typing: Any, _number: Any, given: Any) -> Any:
        wanted = arguments()
        for one, other in zip(given, wanted, strict=True):
            if one != other and not (isinstance(one, types.Number | types.Boolean) and isinstance(other, types.Number)):
                raise TypingError(f"kernels of {name} take {other}, not {one}")

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            index, packed = values
            address_of = _reader(builder, symbol, context.call_conv.get_function_type(result, wanted), index)
            with builder.if_then(cgutils.is_null(builder, address_of()), likely=False):
                adding = ir.FunctionType(ir.VoidType(), [index.type])
                builder.call(cgutils.get_or_insert_function(builder.module, adding, f"add_to_{symbol}"), [index])
                with builder.if_then(cgutils.is_null(builder, address_of()), likely=False):
                    context.call_conv.return_user_exc(builder, RuntimeError, (f"no kernel in {symbol}",))
            status, value = context.call_conv.call_function(
                builder, address_of(), result, wanted, cgutils.unpack_tuple(builder, packed, len(wanted))
            )
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
            return value

        return result(types.int64, types.Tuple(wanted)), generate

    def call_by_number(number: int, *given: Any) -> Any:
        return call(number, given)  # type: ignore[call-arg]  # numba adds the first one

    return inner_kernel(call_by_number)


def _reader(builder: Any, symbol: str, function_type: Any, index: Any) -> Callable[[], Any]:
    """Return what adds code that reads an address of a table."""
    address_type = function_type.as_pointer()
    known = builder.module.globals.get(symbol)
    table = known or ir.GlobalVariable(builder.module, ir.ArrayType(address_type, 0), symbol)
    return lambda: builder.load(builder.gep(table, [ir.Constant(index.type, 0), index]))
