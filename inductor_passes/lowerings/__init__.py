"""How what the passes left becomes code: each tier takes what it can and leaves the rest to the next.

0. `MultiplyHalves`: on CUDA, float32 logits of half-precision tensors are multiplied without casts.
1. `MultiplyFewTokens`: on CUDA, products of routers and shared experts for few tokens get a kernel for them.
2. `ExpandFewSlots`: routers and layers of few slots on a CPU become ATen, which Inductor makes into C++ loops.
3. `ExpandOnCpu`: on a CPU everything else but products becomes ATen as well, for any number of tokens.
4. `ExpandPointwise`: gathers, gates and sums become ATen, which Inductor melts into their neighbours.
5. `TimeProducts`: under max-autotune, on CUDA with static sizes, products are timed.
6. `RouteInside`: on CUDA, few tokens' routers become part of their experts' launches.
7. `LaunchPrograms`: on CUDA with static sizes a fused operator becomes its Triton launches.
8. `PackageProducts`: in what AOTInductor packs on a CPU, products of experts become torch's own.
9. Everything else stays one operator call, which picks its kernels at run time.

They rewrite the graph of our compile. Nothing is registered globally, so a plain `torch.compile` in the same
process never sees them.
"""

from inductor_passes.lowerings.cpu_stages import ExpandOnCpu
from inductor_passes.lowerings.few_slots import ExpandFewSlots
from inductor_passes.lowerings.few_tokens import MultiplyFewTokens
from inductor_passes.lowerings.logits import MultiplyHalves
from inductor_passes.lowerings.packaged import PackageProducts
from inductor_passes.lowerings.pointwise import ExpandPointwise
from inductor_passes.lowerings.programs import LaunchPrograms
from inductor_passes.lowerings.route_inside import RouteInside
from inductor_passes.lowerings.timed import TimeProducts

__all__ = [
    "ExpandFewSlots",
    "ExpandOnCpu",
    "ExpandPointwise",
    "LaunchPrograms",
    "MultiplyFewTokens",
    "MultiplyHalves",
    "PackageProducts",
    "RouteInside",
    "TimeProducts",
]
