"""What AllReduceRmsNorm must compute, in fp64, and inputs whose answer is known without rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_tokenweave.native import Call

MANTISSA_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
SMALLEST_EXPONENT = {torch.float32: -126, torch.float16: -14, torch.bfloat16: -126}


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours of `dtype` at |x| (fp64)."""
    exponent = torch.frexp(x.abs()).exponent.to(torch.float64) - 1
    exponent = exponent.clamp(min=float(SMALLEST_EXPONENT[dtype]))
    return torch.exp2(exponent - MANTISSA_BITS[dtype])


@dataclass
class Problem:
    """Inputs of all ranks: `inputs` [ranks, tokens, hidden], `residual` [tokens, hidden], whole on every rank."""

    inputs: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.inputs.shape[0])

    def shard(self, rank: int) -> slice:
        """The tokens that a rank owns."""
        tokens = self.inputs.shape[1]
        rows = -(-tokens // self.size)
        return slice(min(rank * rows, tokens), min((rank + 1) * rows, tokens))

    def call(self, *, residual_sharded: bool, gather_residual: bool) -> Call:
        """The operation on these inputs."""
        return Call(self.weight, self.bias, self.eps, residual_sharded, gather_residual)


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem."""

    size: int
    tokens: int
    hidden: int
    dtype: torch.dtype


def random_problem(shape: Shape, device: torch.device, seed: int, *, with_bias: bool) -> Problem:
    """Normal deviates; a few rows are large, small or zero."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, generator=random).to(shape.dtype)

    inputs = normal(shape.size, shape.tokens, shape.hidden)
    residual = normal(shape.tokens, shape.hidden)
    for row, factor in ((0, 32.0), (1, 1 / 64), (2, 0.0)):
        if row < shape.tokens:
            inputs[:, row] *= factor
            residual[row] *= factor
    weight = (1 + 0.1 * torch.randn(shape.hidden, device=device, generator=random)).to(shape.dtype)
    return Problem(inputs, residual, weight, normal(shape.hidden) if with_bias else None, 1e-5)


def exact_problem(shape: Shape, device: torch.device, seed: int, *, with_bias: bool) -> Problem:
    """Integers whose sum is +c or -c over a row, c a power of two: the norm is a sign, whatever the rounding."""
    random = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(low, high, sizes, device=device, generator=random)

    inputs = integers(-6, 7, shape.size, shape.tokens, shape.hidden)
    bias = integers(-4, 5, shape.hidden)
    magnitude = torch.exp2(integers(0, 5, shape.tokens, 1).float()).long()
    total = magnitude * (2 * integers(0, 2, shape.tokens, shape.hidden) - 1)
    residual = total - inputs.sum(0) - (bias if with_bias else 0)
    weight = integers(-8, 9, shape.hidden)
    cast = [x.to(shape.dtype) for x in (inputs, residual, weight, bias)]
    return Problem(cast[0], cast[1], cast[2], cast[3] if with_bias else None, 0.0)


def rank_sum(problem: Problem, *, rounded: bool) -> torch.Tensor:
    """The sum over ranks in fp64; `rounded` as NVSwitch does, to the dtype."""
    total = problem.inputs.double().sum(0)
    return total.to(problem.inputs.dtype).double() if rounded else total


def check_residual(problem: Problem, got: torch.Tensor, tokens: slice, *, rounded: bool) -> None:
    """`got` holds the rows `tokens`: within 1 ulp at the largest addend of the fp64 sum, and what fp32 adds cost."""
    addends = [*problem.inputs[:, tokens].double(), problem.residual[tokens].double()]
    if problem.bias is not None:
        addends.append(problem.bias.double().expand_as(addends[0]))
    want = rank_sum(problem, rounded=rounded)[tokens] + sum(addends[problem.size :])
    magnitudes = torch.stack(addends).abs()
    largest = torch.maximum(magnitudes.amax(0), want.abs())
    # Where the switch rounds, its rounding counts once more.
    allowed = ulp(largest, got.dtype) * (2 if rounded else 1) + len(addends) * 2.0**-24 * magnitudes.sum(0)
    assert_close(got, want, allowed, "residual_out")


def check_normed(problem: Problem, got: torch.Tensor, residual_out: torch.Tensor) -> None:
    """`got` within 2 ulp of the fp64 norm of the stored residual, [tokens, hidden] each, and what fp32 sums cost."""
    x = residual_out.double()
    want = x / torch.sqrt(x.square().mean(-1, keepdim=True) + problem.eps) * problem.weight.double()
    assert_close(got, want, 2 * ulp(want, got.dtype) + 4 * 2.0**-24 * want.abs(), "normed")


def assert_close(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, name: str) -> None:
    """Fails with the first bad coordinate; NaN is bad."""
    bad = ~((got.double() - want).abs() <= allowed)
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{name}{list(where)} is {got[where].item()}, want {want[where].item()} within {allowed[where].item()}; "
            f"{int(bad.sum())} of {bad.numel()} are wrong"
        )
