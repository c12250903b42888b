"""The weave: passes over the network that is about to be built, in the order of :data:`PASSES`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_tokenweave.errors import TokenWeaveError, check_kind
from trtllm_tokenweave.passes.fuse import fuse
from trtllm_tokenweave.passes.gemm import gemm
from trtllm_tokenweave.passes.join import join
from trtllm_tokenweave.passes.plan import Region, WeaveOptions, WeavePlan, make_plan
from trtllm_tokenweave.passes.split import split
from trtllm_tokenweave.passes.verify import Baseline, chain_signature, verify, verify_ranks

#: Each leaves the network valid; ``verify`` runs after every one.
PASSES: tuple[Callable[[Any, WeavePlan], None], ...] = (fuse, gemm, split, join)

WeaveMode = Literal["weave", "fuse", "stock"]


@dataclass(frozen=True)
class WeaveResult:
    """What :func:`weave` did, and how long it and its checker took (wall clock, seconds)."""

    plan: WeavePlan
    weave_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def mode(self) -> WeaveMode:
        """What the network became: "weave" (split and fused), "fuse", or "stock" (nothing was done)."""
        if not self.plan.sites:
            return "stock"
        return "fuse" if self.plan.region is None else "weave"


def weave(network: Any, options: WeaveOptions) -> WeaveResult:
    """Fuse, split and join a network in place.

    Args:
        network: A network definition, real or recorded.
        options: See :class:`WeaveOptions`.

    Raises:
        UserError: ``options`` are none, the table was made for another tp_size or hidden_size, or the network is woven
            already; the network is then as it was.
        TokenWeaveError: when the checker finds a fault in the pass's own work; refusals are no errors, they are
            listed in the plan, and the network is then as it was.
    """
    check_kind(options, ("WeaveOptions", WeaveOptions), where="options")
    started = time.perf_counter()
    plan = make_plan(network, options)
    if not plan.sites:
        return WeaveResult(plan, time.perf_counter() - started)
    baseline = Baseline.of(network, [site.all_reduce for site in plan.sites])
    # What was wrong before is none of the pass's business.
    known = set(verify(network))
    checking = 0.0
    for step in PASSES:
        step(network, plan)
        before = time.perf_counter()
        problems = [problem for problem in verify(network, baseline) if problem not in known]
        checking += time.perf_counter() - before
        if problems:
            raise TokenWeaveError(f"after {step.__name__}: {problems[0]} ({len(problems)} problems)")
    return WeaveResult(plan, time.perf_counter() - started - checking, checking)


__all__ = [
    "PASSES",
    "Baseline",
    "Region",
    "WeaveMode",
    "WeaveOptions",
    "WeavePlan",
    "WeaveResult",
    "chain_signature",
    "fuse",
    "gemm",
    "join",
    "make_plan",
    "split",
    "verify",
    "verify_ranks",
    "weave",
]
