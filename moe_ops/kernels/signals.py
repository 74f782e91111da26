"""How ranks wait for each other inside the launches of an exchange, without a launch of its own for it.

The CTAs that write to other ranks count themselves, and the last one tells every rank; CTAs of the next launch wait for
what the others tell. Those that write never wait. So ranks get on in any order of their CTAs, and a launch that waits
does so for launches of the others that come before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_ops.kernels.common import INTERPRETED

SIGNAL_BYTES = tl.constexpr(8)


@triton.jit
def exchange_number(turns_ptr, step, LAST: tl.constexpr):
    """How many exchanges came before this one: what the first launch finds. The last one counts.

    No launch writes what another of its CTAs reads.
    """
    number = tl.load(turns_ptr + tl.minimum(step, 1))
    if tl.program_id(0) == 0:
        if step == 0:
            tl.store(turns_ptr + 1, number)
        if step == LAST:
            tl.store(turns_ptr, number + 1)
    return number


@triton.jit
def tell_all(
    signal, addresses_ptr, turns_ptr, rank, RANKS: tl.constexpr, AT: tl.constexpr, CTAS: tl.constexpr
):
    """When so many CTAs have come here, what they have written may be read: tells the other ranks `signal`."""
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(turns_ptr + 2, 1, sem="acq_rel", scope="sys") == CTAS - 1:
        tl.store(turns_ptr + 2, 0)
        for turn in range(RANKS - 1):
            peer = tl.load(addresses_ptr + (rank + 1 + turn) % RANKS)
            signal_ptr = (peer + AT + rank * SIGNAL_BYTES).to(turns_ptr.dtype, bitcast=True)
            tl.atomic_xchg(signal_ptr, signal, sem="release", scope="sys")


@triton.jit
def wait_for_all(signal, addresses_ptr, turns_ptr, rank, RANKS: tl.constexpr, AT: tl.constexpr):
    """Until the other ranks have told `signal`, or a later one; what they wrote before may be read."""
    mine = tl.load(addresses_ptr + rank) + AT
    for turn in range(RANKS - 1):
        signal_ptr = (mine + (rank + 1 + turn) % RANKS * SIGNAL_BYTES).to(turns_ptr.dtype, bitcast=True)
        _wait_for(signal_ptr, signal, turns_ptr)
    tl.debug_barrier()  # for all threads


@triton.jit
def _wait_for(signal_ptr, signal, turns_ptr):
    if INTERPRETED:  # has no clock
        while _told(signal_ptr) < signal:
            pass
    else:
        end = globaltimer() + tl.load(turns_ptr + 3)
        while _told(signal_ptr) < signal:
            if globaltimer() > end:
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def _told(signal_ptr):
    """What a rank has told, read by one thread for all: Triton makes a load that acquires of it."""
    return tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
