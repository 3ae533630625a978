"""
test_logprobs.py: log-probs and entropy against torch, and against themselves cut in two over ranks.

    torch.distributions | finite differences  ==  logprobs.py, in chunks, on one process and on two

Run:   pytest tests/test_logprobs.py    CPU only, about 15 s. Everything in fp64, so that a wrong formula cannot hide in rounding.
"""
import datetime

import pytest
import torch

import logprobs
from helpers import run_workers


def same(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


R, H, V, PADDED = 7, 5, 11, 14               # 3 rows of padding; with tp 2 the second rank holds columns 7..13


def logits_case(dtype=torch.float64, rows=PADDED, vocab=V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(R, H, dtype=torch.float64, generator=g).to(dtype)
    weight = torch.randn(rows, H, dtype=torch.float64, generator=g).to(dtype)
    weight[vocab:] *= 50                     # padding rows that would win every softmax, if they were seen
    targets = torch.randint(0, vocab, (R,), generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def by_torch(hidden, weight, targets, temperature, vocab=V):
    d = torch.distributions.Categorical(logits=hidden @ weight[:vocab].T / temperature)
    return d.log_prob(targets), d.entropy()


def gradients(logp, entropy, *inputs):
    """Of a sum in which every entry of both outputs has a coefficient of its own."""
    a = torch.arange(1, len(logp) + 1, dtype=logp.dtype)
    return torch.autograd.grad((a * logp).sum() + (a.flip(0) * entropy).sum() / 3, inputs, retain_graph=True)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_torch(chunk, temperature):
    hidden, weight, targets = logits_case()
    got = logprobs.log_probs_and_entropy(hidden, weight, targets, temperature=temperature, vocab_size=V, chunk=chunk)
    want = by_torch(hidden, weight, targets, temperature)
    for x, y in zip(got + gradients(*got, hidden, weight), want + gradients(*want, hidden, weight), strict=True):
        same(x, y)
    assert gradients(*got, weight)[0][V:].abs().max() == 0   # padding learns nothing


def test_log_probs_gradcheck():
    hidden, weight, targets = logits_case()

    def f(h, w):
        return logprobs.log_probs_and_entropy(h, w, targets, temperature=0.8, vocab_size=V, chunk=2)
    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_log_probs_of_bf16_come_in_fp32():
    hidden, weight, targets = logits_case(torch.bfloat16)
    got = logprobs.log_probs_and_entropy(hidden, weight, targets, vocab_size=V, chunk=2)
    want = by_torch(hidden.double(), weight.double(), targets, 1.0)
    assert got[0].dtype == got[1].dtype == torch.float32
    for x, y in zip(got, want):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)
    d_hidden, d_weight = gradients(*got, hidden, weight)
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    # With fp32 logits nothing is rounded on the way: what is left is fp32's own 1e-7 of a logit.
    wide = logprobs.log_probs_and_entropy(hidden, weight, targets, vocab_size=V, chunk=2, fp32_logits=True)
    for x, y in zip(wide, want):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    for x, y in zip(gradients(*wide, hidden, weight), gradients(*want, hidden, weight)):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-2, atol=2e-2)


def test_log_probs_extremes():
    hidden, weight, _ = logits_case()
    logp, entropy = logprobs.log_probs_and_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), vocab_size=V)
    assert logp.shape == entropy.shape == (0,)
    big = (torch.eye(4, dtype=torch.float64) * 1e4).requires_grad_()   # softmax is a one-hot: log-probs 0 and -1e4
    logp, entropy = logprobs.log_probs_and_entropy(big, torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 2, 0]), vocab_size=4)
    assert logp.tolist() == [0, 0, 0, -1e4] and entropy.abs().max() == 0
    assert torch.isfinite(torch.autograd.grad(logp.sum() + entropy.sum(), big)[0]).all()


def tp_worker(rank, world, port):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}",
                                         timeout=datetime.timedelta(seconds=120))
    out = []
    for vocab in (V, 6):                     # 6: the second rank holds padding only
        hidden, weight, targets = logits_case(vocab=vocab)
        rows = PADDED // world
        mine = weight[rows * rank:rows * (rank + 1)].detach().requires_grad_()
        got = logprobs.log_probs_and_entropy(hidden, mine, targets, temperature=0.7, vocab_size=vocab, chunk=3,
                                          vocab_start=rows * rank, group=torch.distributed.group.WORLD)
        out.append([x.detach() for x in got + gradients(*got, hidden, mine)])
    torch.distributed.destroy_process_group()
    return out


def test_vocabulary_parallel_equals_one_process():
    ranks = run_workers(tp_worker, 2)
    for case, vocab in enumerate((V, 6)):
        hidden, weight, targets = logits_case(vocab=vocab)
        want = by_torch(hidden, weight, targets, 0.7, vocab)
        d_hidden, d_weight = gradients(*want, hidden, weight)
        a, b = (rank[case] for rank in ranks)
        for one in (a, b):
            same(one[0], want[0])
            same(one[1], want[1])
        same(a[2] + b[2], d_hidden)          # each rank has its share; model.py's copy-to-region sums them
        same(torch.cat([a[3], b[3]]), d_weight)


def test_logits_exist_for_one_chunk_at_a_time():
    """No tensor of any operation, forward or backward, is larger than a chunk's logits."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if torch.is_tensor(x))])
            return out
    tokens, vocab, chunk = 4096, 15193, 64
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    with Sizes() as sizes:
        logp, entropy = logprobs.log_probs_and_entropy(hidden, weight, torch.randint(vocab, (tokens,)), vocab_size=vocab, chunk=chunk)
        (logp + entropy).sum().backward()
    assert sizes.largest == chunk * vocab and weight.grad.abs().sum() > 0
