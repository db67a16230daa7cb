"""Instructions that the DSL has no word for, or not the same one in all its versions; and what is made of them at once.

Registers are handled as 32-bit words that hold two numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = [
    "arrive", "either", "exp2", "load_words", "log2", "pack", "quad_sum", "store_matrices",
    "store_shared_words", "store_words", "transpose_quad", "wait",
]  # fmt: skip


def _asm(results: int, operands: Sequence[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    """Inline assembly with side effects and as many 32-bit `results`: None, a value, or a list."""
    kind = None if results == 0 else T.i32() if results == 1 else llvm.StructType.get_literal([T.i32()] * results)
    # Nothing in memory is what it was before: without that, what a barrier guards may be read before it is waited for.
    given = llvm.inline_asm(
        kind, list(operands), text, constraints + ",~{memory}", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if results < 2:
        return given
    return [Int32(llvm.extractvalue(T.i32(), given, [i], loc=loc, ip=ip)) for i in range(results)]


def _at_barrier(barrier: cute.Pointer, number: Int32, text: str, loc: Any, ip: Any) -> None:
    """What `text` does at a barrier's shared address ($0) with a number ($1)."""
    operands = [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(number).ir_value(loc=loc, ip=ip)]
    _asm(0, operands, text, "r,r", loc, ip)


def _with_words(address: Any, words: Sequence[Int32], text: str, loc: Any, ip: Any) -> None:
    """What `text` does at a shared address ($0) with four words ($1 to $4)."""
    operands = [address.ir_value(loc=loc, ip=ip), *[word.ir_value(loc=loc, ip=ip) for word in words]]
    _asm(0, operands, text, "r,r,r,r,r", loc, ip)


@dsl_user_op
def arrive(barrier: cute.Pointer, rank: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive once at the barrier at this address in the shared memory of the cluster's thread block `rank`."""
    _at_barrier(
        barrier, rank,
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        loc, ip,
    )  # fmt: skip


@dsl_user_op
def wait(barrier: cute.Pointer, phase: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Until the barrier's phase of this parity is over. The DSL's own wait goes to sleep after the first look."""
    _at_barrier(
        barrier, phase,
        "{ .reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; @!over bra again; }",
        loc, ip,
    )  # fmt: skip


@dsl_user_op
def load_words(address: Int64, valid: Boolean, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """Four words at an aligned global address that no one writes meanwhile; zeros, and no access, unless `valid`."""
    return _asm(  # type: ignore[no-any-return]
        4, [address.ir_value(loc=loc, ip=ip), Boolean(valid).ir_value(loc=loc, ip=ip)],
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; @$5 ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,b", loc, ip,
    )  # fmt: skip


@dsl_user_op
def store_words(address: Int64, words: Sequence[Int32], valid: Boolean, *, loc: Any = None, ip: Any = None) -> None:
    """Write four words to an aligned global address if `valid`."""
    operands = [address.ir_value(loc=loc, ip=ip), *[word.ir_value(loc=loc, ip=ip) for word in words]]
    _asm(
        0, [*operands, Boolean(valid).ir_value(loc=loc, ip=ip)], "@$5 st.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r,b", loc, ip,
    )  # fmt: skip


@dsl_user_op
def store_shared_words(address: Int32, words: Sequence[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """Write four words to an aligned address in shared memory."""
    _with_words(address, words, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", loc, ip)


@dsl_user_op
def store_matrices(address: Int32, words: Sequence[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """`stmatrix.x4`: lane i gives the shared address of row i % 8 of matrix i / 8, word m is its part of matrix m."""
    _with_words(address, words, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", loc, ip)


@dsl_user_op
def pack(low: Float32, high: Float32, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two numbers, rounded to nearest, in one word."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(T.i32(), operands, f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False,
                        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
    )  # fmt: skip


@dsl_user_op
def _unary(name: str, x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(
        llvm.inline_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], f"{name} $0, $1;", "=f,f",
                        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
                        loc=loc, ip=ip)
    )  # fmt: skip


def exp2(x: Float32) -> Float32:
    """2^x to two units in the last place; results below 2^-126 are 0."""
    return _unary("ex2.approx.ftz.f32", x)


def log2(x: Float32) -> Float32:
    return _unary("lg2.approx.f32", x)


def quad_sum(x: Float32) -> Float32:
    """Over the four lanes that hold a row of an accumulator."""
    for distance in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, distance)
    return x


def either(condition: Boolean, if_true: Any, if_false: Any) -> Any:
    """One of two numbers of a type, without a branch."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))


def transpose_quad(words: Sequence[Int32], lane: Int32) -> list[Int32]:
    """Word m of lane q of each quad becomes word q of its lane m: four lanes with every fourth word of a row of 64
    bytes have 16 whole bytes each, or the reverse."""
    result = list(words)
    for distance in (1, 2):
        upper = (lane & distance) != 0
        for low in (0, 1) if distance == 2 else (0, 2):
            high = low + distance
            given = cute.arch.shuffle_sync_bfly(either(upper, result[low], result[high]), distance)
            result[low] = either(upper, given, result[low])
            result[high] = either(upper, result[high], given)
    return result
