"""
logprobs.py: how likely was each token? Log-prob and entropy from hidden states, without ever holding all logits.

    hidden states [R, H], output matrix [V/tp, H] --chunk by chunk--> logp, entropy [R], and gradients back

Test:  pytest tests/test_logprobs.py
Knows nothing about: Ray, SGLang, Megatron, rewards. A process group is an argument; with None it runs on one process.
Shapes: R response tokens, V vocabulary, H hidden, c chunk, tp tensor-parallel ranks.

4,096 tokens of a 152k vocabulary are 2.5 GB of fp32 logits, several times that with softmax and gradients: so logits exist for
one chunk of tokens at a time, forward and backward.
"""
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


# ---- One kernel instead of many --------------------------------------------------------------------------------------
def fused(function: Callable) -> Callable:
    """`function` as one kernel on a GPU (torch.compile), which reads and writes the whole tensor once, not at each operation.
    On a CPU as it is: there it would need a C++ compiler, and save little."""
    @functools.cache
    def compiled():                                      # at its first use: the compiler alone takes seconds to import
        torch._dynamo.config.recompile_limit = 64        # one for each width, with and without gradient, view or not
        return torch.compile(function, dynamic=True)

    def call(x, *args):
        if not x.is_cuda:
            return function(x, *args)
        run = compiled()
        torch._dynamo.mark_static(x, x.dim() - 1)        # rows vary from batch to batch, the width is the model's
        return run(x, *args)
    return call


# ---- Log-probs -------------------------------------------------------------------------------------------------------
@fused
def _largest(z, temperature, columns):
    return _scaled(z, temperature, columns).amax(-1)


@fused
def _softmax_sums(z, top, column, inside, temperature, columns):
    """-> [3, c]: sum of exp(z - top); the target's z - top, on the rank that has it; sum of exp(z - top) (z - top)."""
    z = _scaled(z, temperature, columns) - top[:, None]
    p = z.exp()
    target = z.gather(-1, column[:, None])[:, 0].where(inside, 0)
    return torch.stack([p.sum(-1), target, (p * z.clamp(min=-1e30)).sum(-1)])             # clamp: 0 * -inf would be NaN


@fused
def _logits_grad(z, column, inside, lse, entropy, d_logp, d_entropy, temperature, columns, dtype):
    """d logp / dz = onehot - p;  dH / dz = -p (log p + H). -> dz [c, V/tp]"""
    log_p = (_scaled(z, temperature, columns) - lse[:, None]).clamp(min=-1e30)
    dz = -log_p.exp() * (d_logp[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    here = (torch.arange(z.shape[1], device=z.device) == column[:, None]) & inside[:, None]
    return ((dz + d_logp[:, None].where(here, 0)) / temperature).to(dtype)


def _scaled(z, temperature, columns):
    """Logits over the temperature, in fp32. Columns beyond the true vocabulary are padding that lets TP ranks share evenly:
    they get no probability."""
    z = z.to(_wide(z)) / temperature
    return z if columns >= z.shape[1] else z.masked_fill(torch.arange(z.shape[1], device=z.device) >= columns, -torch.inf)


class _LogProbsAndEntropy(torch.autograd.Function):
    """Output matrix, softmax, log-prob of the target and entropy in one: logits exist for one chunk at a time.

    Vocabulary-parallel (Megatron-LM 1909.08053, sec. 3): each TP rank holds V/tp rows of the matrix and sees part of each
    logit row; max, sum of exponentials and the target's logit are all-reduced. The backward pass recomputes the chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_start, vocab_size, chunk, group, wide):
        logp, entropy, lse = (torch.empty(len(targets), dtype=_wide(hidden), device=hidden.device) for _ in range(3))
        for s in range(0, len(targets), chunk):
            part = slice(s, s + chunk)
            z = _logits(hidden[part], weight, wide)                                       # [c, V/tp]
            column, inside = _column(targets[part], vocab_start, weight)                  # [c]
            top = all_reduce(_largest(z, temperature, vocab_size - vocab_start), dist.ReduceOp.MAX, group)
            sums = _softmax_sums(z, top, column, inside, temperature, vocab_size - vocab_start)
            total, target, pz = all_reduce(sums, dist.ReduceOp.SUM, group)
            logp[part] = target - total.log()
            entropy[part] = total.log() - pz / total                                      # H = log Z - sum p z
            lse[part] = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.args = temperature, vocab_start, vocab_size, chunk, wide
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        temperature, vocab_start, vocab_size, chunk, wide = ctx.args
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=_wide(weight))  # fp32: a bf16 sum over chunks would lose small terms
        for s in range(0, len(targets), chunk):
            part = slice(s, s + chunk)
            z = _logits(hidden[part], weight, wide)
            column, inside = _column(targets[part], vocab_start, weight)
            dz = _logits_grad(z, column, inside, lse[part], entropy[part], d_logp[part], d_entropy[part], temperature,
                              vocab_size - vocab_start, weight.dtype)
            d_hidden[part] = dz @ weight        # this rank's share: summed over TP ranks by whoever made `hidden`
            add_product(d_weight, dz.T, hidden[part])
        return d_hidden, d_weight.to(weight.dtype), *[None] * 7


def _logits(hidden: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """[c, H], [V/tp, H] -> [c, V/tp] in their dtype, or with `wide` in fp32: a logit of 20 in bf16 is rounded to 0.06."""
    if wide and hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden @ weight.T if not wide else hidden.to(_wide(hidden)) @ weight.to(_wide(weight)).T


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _column(targets, vocab_start, weight):
    """The target's column on this rank [c], and whether it lies here [c]."""
    column = targets - vocab_start
    return column.clamp(0, weight.shape[0] - 1), (column >= 0) & (column < weight.shape[0])


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with a wide total and narrow factors. On a GPU in one kernel: the product is never written by itself."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def all_reduce(x: Tensor, op, group) -> Tensor:
    """Forward only. Every rank of `group` must call it; on one process it costs nothing."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op, group=group)
    return x


def log_probs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_size: int,
                          chunk: int = 1024, vocab_start: int = 0, group=None,
                          fp32_logits: bool = False) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in nats.

    hidden [R, H]: state that predicts each target; weight [V/tp, H]: this rank's rows of the output matrix, the first of
    which is row `vocab_start`; targets [R]: global token ids. Divides logits by the rollout temperature, because the policy
    that sampled was softmax(z / temperature). Returns logp [R], entropy [R] in fp32, differentiable. fp32_logits: bf16 logits
    would be rounded before the softmax; twice the memory of a chunk.
    """
    return _LogProbsAndEntropy.apply(hidden, weight, targets, temperature, vocab_start, vocab_size, chunk, group, fp32_logits)
