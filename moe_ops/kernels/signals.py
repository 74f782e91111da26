"""How ranks tell each other, inside a launch, how many rows come and which have come.

A signal is a number of 8 bytes in the memory of the rank that waits for it, and only grows. Those that write never
wait, and stand first in a launch; those that wait do so for what such a part of another rank's launch writes. So ranks
get on in any order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_ops.kernels.common import INTERPRETED

SIGNAL_BYTES = tl.constexpr(8)


@triton.jit
def tell(address, signal, turns_ptr):
    """Writes a signal, behind everything that this CTA has written so far."""
    tl.debug_barrier()  # all threads have written
    tl.atomic_xchg(address.to(turns_ptr.dtype, bitcast=True), signal, sem="release", scope="sys")


@triton.jit
def wait_for(address, signal, turns_ptr):
    """Until a signal is at least this one: returns it. What its sender wrote before may be read."""
    signal_ptr = address.to(turns_ptr.dtype, bitcast=True)
    told = _told(signal_ptr)
    if INTERPRETED:  # has no clock
        while told < signal:
            told = _told(signal_ptr)
    elif told < signal:
        end = globaltimer() + tl.load(turns_ptr + 2)
        while told < signal:
            if globaltimer() > end:
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
            told = _told(signal_ptr)
    tl.debug_barrier()  # for all threads
    return told


@triton.jit
def _told(signal_ptr):
    """What has been told, read by one thread for all: Triton makes a load that acquires of it."""
    return tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def tell_count(address, number, count, turns_ptr, ROWS: tl.constexpr):
    """Exchange `number` is under way here, and brings so many rows, at most ROWS."""
    tell(address, (number + 1) * (ROWS + 1) + count, turns_ptr)


@triton.jit
def wait_for_count(address, number, turns_ptr, ROWS: tl.constexpr):
    """How many rows come in exchange `number`."""
    told = wait_for(address, (number + 1) * (ROWS + 1), turns_ptr)
    return (told - (number + 1) * (ROWS + 1)).to(tl.int32)


@triton.jit
def told_count(address, number, turns_ptr, ROWS: tl.constexpr):
    """The same, once this CTA has waited for it."""
    told = tl.load(address.to(turns_ptr.dtype, bitcast=True))
    return (told - (number + 1) * (ROWS + 1)).to(tl.int32)


@triton.jit
def leave(turns_ptr, number, CTAS: tl.constexpr):
    """The last of so many CTAs to come here ends exchange `number`: all have read by then which one it was."""
    if tl.atomic_add(turns_ptr + 1, 1) == CTAS - 1:
        tl.store(turns_ptr + 1, 0)
        tl.store(turns_ptr, number + 1)
