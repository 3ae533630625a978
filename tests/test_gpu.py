"""
test_gpu.py: what only GPUs do: packed attention, fused kernels, memory that leaves and returns, the loop over several.

Run:   pytest tests/test_gpu.py          skipped where there are not enough GPUs; -m "not multi_gpu" for one
"""
import contextlib
import json
import pathlib
import subprocess
import sys
import types

import psutil
import pytest
import torch
import torch.nn.functional as F

import algos
import bench
import buffer
import logprobs
from engines import free_port
from helpers import RUN_FILE, make_cfg, output_of, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [1, 5, 300, 17, 2048, 64]


@pytest.fixture(scope="module")
def model():
    import model
    return model


@pytest.fixture(scope="module")
def layers(model):
    import layers
    return layers


@pytest.fixture(scope="module")
def grid(model):
    cfg = make_cfg(device="cuda", dtype="bfloat16")
    yield model.init_distributed(cfg, 0, 1, "127.0.0.1", free_port("127.0.0.1"))
    torch.distributed.destroy_process_group()


def packed(layers, lengths, inv_freq, device):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    packing, _ = layers.pack_for(cu, max(lengths), 0, 1)
    position = torch.cat([torch.arange(n) for n in lengths]).to(device)
    angle = position[:, None, None] * inv_freq.to(device)
    packing.cos, packing.sin = angle.cos(), angle.sin()
    return packing


def reference_attention(q, k, v, lengths, inv_freq):
    """fp32, one sequence at a time, rotation written out as transformers does."""
    out = []
    for q, k, v in zip(*(x.float().split(lengths) for x in (q, k, v))):
        angle = torch.arange(len(q), device=q.device)[:, None] * inv_freq.to(q.device)
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

        def turn(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin
        q, k, v = (x.transpose(0, 1)[None] for x in (turn(q), turn(k), v))
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out).flatten(1)


@pytest.mark.parametrize("kernel", [pytest.param("FlashAttention-4", marks=needs_gpu),
                                    pytest.param("torch's own", marks=needs_gpu), "on a CPU"])
@pytest.mark.parametrize("heads, groups, dim, value", [(8, 2, 128, 128), (9, 3, 64, 64), (16, 16, 192, 128)],
                         ids=["Qwen3", "SmolLM2", "DeepSeek"])
def test_packed_attention(layers, monkeypatch, heads, groups, dim, value, kernel):
    device = "cpu" if kernel == "on a CPU" else "cuda"
    if kernel == "FlashAttention-4" and not layers.has_flash4():
        pytest.skip("not installed, or not a Hopper or Blackwell GPU")
    monkeypatch.setattr(layers, "has_flash4", lambda: kernel == "FlashAttention-4")
    torch.manual_seed(0)
    total, inv_freq = sum(LENGTHS), 1e4 ** -(torch.arange(0, dim, 2) / dim)
    leaves = [torch.randn(total, n, width, device=device, dtype=torch.bfloat16, requires_grad=True)
              for n, width in ((heads, dim), (groups, dim), (groups, value))]
    groups_of = types.SimpleNamespace(cp=None)
    attention = layers.PackedAttention(types.SimpleNamespace(rotary_interleaved=False), 1, None, None, pg_collection=groups_of)
    out = attention(*leaves, None, packed_seq_params=packed(layers, LENGTHS, inv_freq, device))
    want = reference_attention(*leaves, LENGTHS, inv_freq)
    assert (out - want).abs().max() < 0.03
    with torch.no_grad():                    # another kernel, which keeps nothing for a backward pass
        assert torch.equal(attention(*leaves, None, packed_seq_params=packed(layers, LENGTHS, inv_freq, device)), out)
    weight = torch.randn_like(want)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves)):
        assert F.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0) > 0.9995


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu), "cpu"])
def test_grouped_experts(device):
    """Against each expert by itself in fp32, where some of them, the first and the last too, get no token."""
    import moe
    counts, hidden, ffn = [0, 5, 0, 130, 1, 64, 0], 128, 192
    one = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = types.SimpleNamespace(moe_ffn_hidden_size=ffn, hidden_size=hidden, params_dtype=torch.bfloat16,
                                   use_cpu_initialization=device == "cpu")
    experts = moe.GroupedExperts(len(counts), config, pg_collection=types.SimpleNamespace(ep=one, expt_tp=one, expt_dp=one))
    torch.manual_seed(0)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    tokens = torch.randn(sum(counts), hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(sum(counts), device=device, requires_grad=True)
    out, _ = experts(tokens, torch.tensor(counts), weights)
    up, down = (p.detach().float().requires_grad_() for p in (experts.fc1, experts.fc2))
    x, w = (leaf.detach().float().requires_grad_() for leaf in (tokens, weights))
    want = torch.cat([(F.silu(part @ up[e, 0].T) * (part @ up[e, 1].T) * scale[:, None]) @ down[e].T
                      for e, (part, scale) in enumerate(zip(x.split(counts), w.split(counts)))])
    assert (out - want).abs().max() < 0.03 * want.abs().max()
    aim = torch.randn_like(want)
    got = torch.autograd.grad((out.float() * aim).sum(), [tokens, weights, experts.fc1, experts.fc2])
    for a, b in zip(got, torch.autograd.grad((want * aim).sum(), [x, w, up, down])):
        assert F.cosine_similarity(a.float().flatten(), b.flatten(), dim=0) > 0.9995
    assert not got[2][0].any() and not got[3][-1].any(), "an expert with no token has no gradient"


@needs_gpu
def test_fused_kernels_are_what_they_were(layers):
    x = torch.randn(77, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    want = F.rms_norm(x.float(), (64,), weight.float(), 1e-6)
    assert (layers.rms_norm(x, weight, 1e-6) - want).abs().max() < 0.05
    total = torch.randn(8, 64, device="cuda")
    want = total + x[:8].T.float()[:8] @ x[:8].float()
    logprobs.add_product(total, x[:8].T[:8], x[:8])
    assert (total - want).abs().max() < 1e-3


@needs_gpu
def test_log_probs():
    """bf16 on the GPU against fp32 on the CPU: values, entropies and both gradients, with padded rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), 0.3 * torch.randn(1024, 64)
    hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()
    targets, results = torch.randint(0, 1000, (300,)), []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        h, w = (x.clone().to(device, dtype).requires_grad_() for x in (hidden, weight))
        logp, entropy = logprobs.log_probs_and_entropy(h, w, targets.to(device), temperature=0.7, vocab_size=1000, chunk=128)
        (logp.sum() + 0.1 * entropy.sum()).backward()
        results.append([x.float().cpu() for x in (logp, entropy, h.grad, w.grad)])
    for want, got in zip(*results):
        assert F.cosine_similarity(want.flatten(), got.flatten(), dim=0) > 0.9999
    assert (results[0][0] - results[1][0]).abs().max() < 0.05 and results[1][3][1000:].abs().max() == 0


@needs_gpu
def test_memory_leaves_and_returns(model, grid, tiny_model):
    cfg = make_cfg(device="cuda", dtype="bfloat16", lr=1e-3)
    m = model.MegatronModel(cfg, grid, tiny_model, 10)
    for _, p in m.named_weights():
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


OFFLOADED = dict(optimizer_cpu_offload=True)
KINDS = {"Transformer Engine": dict(transformer_impl="transformer_engine"), "optimizer on the CPU": OFFLOADED,
         "half of it": OFFLOADED | dict(optimizer_offload_fraction=0.5)}


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_and_optimizers(model, grid, run_file, tmp_path, kind):
    """The same log-probs, losses and gradient norms as ours over three optimizer steps; and a fresh model of the
    other kind reads the checkpoint, with Adam's state, and goes on with the same fourth step."""
    if kind == "Transformer Engine":
        pytest.importorskip("transformer_engine")
    folder, results, megatron = str(run_file.parent / "model"), {}, {"ours": {}, kind: KINDS[kind]}
    ids = torch.randint(0, 1000, (12, 200), generator=torch.Generator().manual_seed(0)).tolist()

    def start(name):
        cfg = make_cfg(device="cuda", dtype="bfloat16", lr=1e-3, loss_type="sft", max_tokens_per_gpu=800, global_batch_size=12,
                       num_steps_per_rollout=1, megatron=megatron[name])
        m = model.MegatronModel(cfg, grid, folder, 10)
        data = bench.made_up_data(cfg, [row[:80 + 10 * i] for i, row in enumerate(ids)])
        batches = [m.pack(data, one) for one in buffer.plan(cfg, data, 1)[0][0]]
        return m, batches, lambda: m.train_step(batches, lambda x: algos.sft_loss(cfg, x))

    def adam_steps(m):
        return {float(state["step"]) for adam in model.adams(m.optimizer) for state in adam.state.values()}

    for name in megatron:
        m, batches, step = start(name)
        before, steps = torch.cat(m.forward_only(batches)), [step() for _ in range(3)]
        m.save(tmp_path / name, {"step": 3})
        results[name] = before, steps + [step()]
    (before, steps), (other_before, other_steps) = results.values()
    assert (before - other_before).abs().mean() < 0.02
    for ours, theirs in zip(steps, other_steps):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=0.01)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.03)
    assert steps[2]["loss"] < 0.95 * steps[0]["loss"], "three steps must have changed something"
    for name, saved, fourth in ((kind, "ours", steps[3]), ("ours", kind, other_steps[3])):
        m, _, step = start(name)
        m.load(tmp_path / saved)
        assert adam_steps(m) == {3.0}
        assert step()["loss"] == pytest.approx(fourth["loss"], rel=0.01), f"{name} from {saved}"


# ---- The loop ------------------------------------------------------------------------------------------------------------
def several(count):
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= count
    return [pytest.mark.multi_gpu, pytest.mark.skipif(not enough, reason=f"needs {count} GPUs")]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """4 steps of a random model, small enough that checkpoints are written in seconds."""
    from configs.shapes import random_model
    folder = tmp_path_factory.mktemp("loop")
    random_model("Qwen/Qwen3-0.6B", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                 num_key_value_heads=4)(str(folder / "model"))
    path = folder / "loop.py"
    path.write_text(RUN_FILE.format(model=str(folder / "model")) + "device = 'cuda'\ncheck_weight_update_interval = 1\n"
                    "sglang = dict(attention_backend='triton', sampling_backend='pytorch', mem_fraction_static=0.25)\n")
    return path


@contextlib.contextmanager
def running(run_file: pathlib.Path, *args):
    """A whole run, in which every weight sync is checked by checksums -> its process, its folder. It ends with the block."""
    name = f"run{len(list(run_file.parent.iterdir()))}"
    command = [sys.executable, "train.py", str(run_file), f"--output_dir={run_file.parent}", f"--run_name={name}", *args]
    with open(run_file.parent / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, cwd=pathlib.Path(algos.__file__).parent, stdout=log, stderr=log)
    try:
        yield process, run_file.parent / name
    finally:
        process.kill()                       # its engines and trainers notice
        print((run_file.parent / f"{name}.log").read_text()[-5000:])


def test_the_run_file_is_valid(run_file):
    from configs import base
    assert base.load(str(run_file), []).device == "cuda"


def steps_of(process: subprocess.Popen, run_dir: pathlib.Path) -> list[dict]:
    """-> the metrics of its steps, when it is done"""
    assert process.wait(400) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def differences(steps: list[dict]) -> list[float]:
    return [step["train/train_rollout_logprob_abs_diff"] for step in steps]


@needs_gpu
@pytest.mark.parametrize("offload", [False, True])
def test_an_engine_killed_while_it_generates(run_file, offload):
    with running(run_file, "--num_rollout=5", "--rollout_max_response_len=3000", f"--offload_train={offload}",
                 f"--offload_rollout={offload}") as (process, run_dir):
        metrics, log = run_dir / "metrics.jsonl", run_dir / "logs" / "engine_0.log"
        wait_for(lambda: metrics.exists() and metrics.read_text(), 300, process)
        before = log.read_text().count("Decode batch")
        wait_for(lambda: log.read_text().count("Decode batch") > before, 300, process)   # a line each 40 of up to 3000 tokens
        schedulers = [p for p in psutil.process_iter() if output_of(p) == str(log) and "schedul" in p.name()]
        assert schedulers, "no engine is running"
        schedulers[0].kill()
        steps = steps_of(process, run_dir)
    assert len(steps) == 5 and steps[-1]["rollout/engine_restarts"] == 1
    assert sum(step["rollout/request_retries"] for step in steps), "requests were under way when it was killed"
    assert max(differences(steps)) < 0.03, "also the new engine has the trainers' weights"


@pytest.mark.parametrize("args", [
    pytest.param(["--colocate=False", "--actor_num_gpus=1", "--rollout_num_gpus=1", "--async_mode"], marks=several(2)),
    pytest.param(["--actor_num_gpus=4", "--tensor_model_parallel_size=2", "--sequence_parallel",
                  "--rollout_num_gpus_per_engine=2"], marks=several(4)),
    pytest.param(["--colocate=False", "--actor_num_gpus=2", "--tensor_model_parallel_size=2", "--rollout_num_gpus=2",
                  "--rollout_num_gpus_per_engine=2"], marks=several(4))], ids=["1+1 async", "tp2 x dp2", "2+2"])
def test_layouts(run_file, args):
    with running(run_file, *args) as run:
        steps = steps_of(*run)
    assert len(steps) == 4 and max(differences(steps)) < 0.03


@pytest.mark.multi_gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_an_engine_that_spans_two_nodes(run_file):
    """Two Ray nodes on this machine, one GPU each: the engine's two halves meet over the network, weights come by CUDA IPC."""
    from ray.cluster_utils import Cluster
    cluster = Cluster()
    for gpu in range(2):
        cluster.add_node(num_cpus=16, num_gpus=1, include_dashboard=False, env_vars={"CUDA_VISIBLE_DEVICES": str(gpu)})
    try:
        with running(run_file, f"--ray_address={cluster.address}", "--actor_num_gpus=2", "--tensor_model_parallel_size=2",
                     "--rollout_num_gpus_per_engine=2") as run:
            steps = steps_of(*run)
        assert len(steps) == 4 and max(differences(steps)) < 0.03
    finally:
        cluster.shutdown()
