"""How one fused collective is launched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Fabric = Literal["auto", "multimem", "peer", "loopback"]

# Collectives launch in clusters of 2 CTAs, so that they pack beside GEMMs that do the same: hence even counts.
CLUSTER = 2

# Every CTA of a collective waits for its peers on the other ranks, so all of them have to be resident at once: at
# most one per SM. 132 is the SM count of H100 and H200, the smallest of the GPUs served (B200 has 148); the
# collectives are saturated long before (8 to 16 CTAs), so a larger bound would gain nothing.
MAX_CTAS = 132

# A sanity bound, not a promise: no GPU served has more SMs.
MAX_GEMM_SMS = 256

WARP = 32
MAX_THREADS = 1024


class LaunchConfig(BaseModel):
    """Launch configuration of one kind of fused collective.

    Attributes:
        fabric: "multimem" (NVSwitch multicast), "peer" (peer pointers), "loopback" (virtual ranks on one GPU) or
            "auto": what the ranks find they have.
        ctas: Thread blocks, even, 2 to 132.
        threads: Threads of a block, a multiple of 32, 32 to 1024.
        gemm_sms: SMs that GEMMs of ours are asked to keep to while this collective runs; 0: those it leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Beside GEMMs few CTAs win though the collective takes longer: it is hidden, and the SMs are missed. With two ranks
    # 8 are within 3.2 % of the best of 4 to 16 at every size (docs/results/stack_tp2.json), but more ranks need more.
    fabric: Fabric = "auto"
    ctas: Annotated[int, Field(ge=CLUSTER, le=MAX_CTAS)] = 8
    threads: Annotated[int, Field(ge=WARP, le=MAX_THREADS)] = MAX_THREADS
    gemm_sms: Annotated[int, Field(ge=0, le=MAX_GEMM_SMS)] = 0

    @field_validator("ctas", "gemm_sms")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % CLUSTER:
            raise ValueError(f"{value} is odd; collectives and GEMMs launch in clusters of {CLUSTER}")
        return value

    @field_validator("threads")
    @classmethod
    def _whole_warps(cls, value: int) -> int:
        if value % WARP:
            raise ValueError(f"{value} is not a multiple of {WARP}")
        return value
