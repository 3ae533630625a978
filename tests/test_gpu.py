"""
test_gpu.py: what only a GPU does: packed attention, fused kernels, memory that leaves and returns.

Run:   pytest tests/test_gpu.py          skipped where there is no GPU
"""
import types

import pytest
import torch
import torch.nn.functional as F

import algos
from helpers import free_port, make_cfg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [1, 5, 300, 17, 64]


@pytest.fixture(scope="module")
def model():
    import model
    return model


def packed(lengths, inv_freq):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    position = torch.cat([torch.arange(n) for n in lengths]).cuda()
    angle = position[:, None, None] * inv_freq.cuda()
    return types.SimpleNamespace(cu_seqlens_q=cu, max_seqlen_q=max(lengths), angles=(angle.cos(), angle.sin()))


def reference_attention(q, k, v, lengths, inv_freq):
    """fp32, one sequence at a time, rotation written out as transformers does."""
    out = []
    for q, k, v in zip(*(x.float().split(lengths) for x in (q, k, v))):
        angle = torch.arange(len(q), device="cuda")[:, None] * inv_freq.cuda()
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

        def turn(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin
        q, k, v = (x.transpose(0, 1)[None] for x in (turn(q), turn(k), v))
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out).flatten(1)


def test_packed_attention(model):
    torch.manual_seed(0)
    total, inv_freq = sum(LENGTHS), 1e4 ** -(torch.arange(0, 128, 2) / 128)
    leaves = [torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
    attention = model.PackedAttention(None, 1, None, None)
    out = attention(*leaves, None, packed_seq_params=packed(LENGTHS, inv_freq))
    want = reference_attention(*leaves, LENGTHS, inv_freq)
    assert (out - want).abs().max() < 0.03
    weight = torch.randn_like(want)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves)):
        assert F.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0) > 0.9995


def test_fused_kernels_are_what_they_were(model):
    x = torch.randn(77, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    want = F.rms_norm(x.float(), (64,), weight.float(), 1e-6)
    assert (model.rms_norm(x, weight, 1e-6) - want).abs().max() < 0.05
    total = torch.randn(8, 64, device="cuda")
    want = total + x[:8].T.float()[:8] @ x[:8].float()
    algos.add_product(total, x[:8].T[:8], x[:8])
    assert (total - want).abs().max() < 1e-3


def test_log_probs():
    """bf16 on the GPU against fp32 on the CPU: values, entropies and both gradients, with padded rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), 0.3 * torch.randn(1024, 64)
    hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()
    targets, results = torch.randint(0, 1000, (300,)), []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        h, w = (x.clone().to(device, dtype).requires_grad_() for x in (hidden, weight))
        logp, entropy = algos.log_probs_and_entropy(h, w, targets.to(device), temperature=0.7, vocab_size=1000, chunk=128)
        (logp.sum() + 0.1 * entropy.sum()).backward()
        results.append([x.float().cpu() for x in (logp, entropy, h.grad, w.grad)])
    for want, got in zip(*results):
        assert F.cosine_similarity(want.flatten(), got.flatten(), dim=0) > 0.9999
    assert (results[0][0] - results[1][0]).abs().max() < 0.05 and results[1][3][1000:].abs().max() == 0


def test_memory_leaves_and_returns(model, tiny_model):
    cfg = make_cfg(device="cuda", dtype="bfloat16", lr=1e-3)
    grid = model.init_distributed(cfg, 0, 1, "127.0.0.1", free_port())
    m = model.MegatronModel(cfg, grid, tiny_model, 10)
    for p in m.module.parameters():
        p.main_grad.normal_()
    m.optimizer.step()                       # so that there is optimizer state
    held = torch.cuda.memory_allocated()
    before = [(s, kind, model.as_bytes(s).clone().cpu()) for s, kind in m.storages()]
    m.sleep()
    assert torch.cuda.memory_allocated() < 0.05 * held
    m.wake()
    m.finish_loading()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() >= sum(s.nbytes() for s, _ in m.storages())
    for storage, kind, content in before:
        assert kind == "gradients" or torch.equal(model.as_bytes(storage).cpu(), content), kind
    assert {kind for _, kind, _ in before} == {"weights", "state", "gradients"}
    torch.distributed.destroy_process_group()
