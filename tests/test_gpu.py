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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
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


@pytest.mark.parametrize("flash4", [True, False], ids=["FlashAttention-4", "torch's own"])
@pytest.mark.parametrize("heads, groups, dim", [(8, 2, 128), (9, 3, 64)], ids=["Qwen3", "SmolLM2"])
def test_packed_attention(layers, monkeypatch, heads, groups, dim, flash4):
    if flash4 and not layers.has_flash4():
        pytest.skip("not installed, or not a Hopper or Blackwell GPU")
    monkeypatch.setattr(layers, "has_flash4", lambda: flash4)
    torch.manual_seed(0)
    total, inv_freq = sum(LENGTHS), 1e4 ** -(torch.arange(0, dim, 2) / dim)
    leaves = [torch.randn(total, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for n in (heads, groups, groups)]
    attention = layers.PackedAttention(None, 1, None, None)
    out = attention(*leaves, None, packed_seq_params=packed(LENGTHS, inv_freq))
    want = reference_attention(*leaves, LENGTHS, inv_freq)
    assert (out - want).abs().max() < 0.03
    with torch.no_grad():                    # another kernel, which keeps nothing for a backward pass
        assert torch.equal(attention(*leaves, None, packed_seq_params=packed(LENGTHS, inv_freq)), out)
    weight = torch.randn_like(want)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves)):
        assert F.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0) > 0.9995


def test_fused_kernels_are_what_they_were(layers):
    x = torch.randn(77, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    want = F.rms_norm(x.float(), (64,), weight.float(), 1e-6)
    assert (layers.rms_norm(x, weight, 1e-6) - want).abs().max() < 0.05
    total = torch.randn(8, 64, device="cuda")
    want = total + x[:8].T.float()[:8] @ x[:8].float()
    logprobs.add_product(total, x[:8].T[:8], x[:8])
    assert (total - want).abs().max() < 1e-3


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


def test_memory_leaves_and_returns(model, grid, tiny_model):
    cfg = make_cfg(device="cuda", dtype="bfloat16", lr=1e-3)
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


def test_transformer_engine(model, grid, run_file, tmp_path):
    """Its layers: the same log-probs, losses and gradient norms as ours over three optimizer steps; and a fresh model of the
    other kind reads the checkpoint, with Adam's state, and goes on with the same fourth step."""
    pytest.importorskip("transformer_engine")
    folder, results = str(run_file.parent / "model"), {}
    ids = torch.randint(0, 1000, (12, 200), generator=torch.Generator().manual_seed(0)).tolist()

    def start(name):
        cfg = make_cfg(device="cuda", dtype="bfloat16", lr=1e-3, loss_type="sft", max_tokens_per_gpu=800, global_batch_size=12,
                       num_steps_per_rollout=1, megatron=dict(transformer_impl=name))
        m = model.MegatronModel(cfg, grid, folder, 10)
        data = bench.made_up_data(cfg, [row[:80 + 10 * i] for i, row in enumerate(ids)])
        batches = [m.pack(data, one) for one in buffer.plan(cfg, data, 1)[0][0]]
        return m, batches, lambda: m.train_step(batches, lambda x: algos.sft_loss(cfg, x))

    def adam_steps(m):
        return {float(state["step"]) for adam in model.adams(m.optimizer) for state in adam.state.values()}

    for name in ("local", "transformer_engine"):
        m, batches, step = start(name)
        before, steps = torch.cat(m.forward_only(batches)), [step() for _ in range(3)]
        m.save(tmp_path / name, {"step": 3})
        results[name] = before, steps + [step()]
    (before, steps), (te_before, te_steps) = results.values()
    assert (before - te_before).abs().mean() < 0.02
    for ours, theirs in zip(steps, te_steps):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=0.01)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.03)
    assert steps[2]["loss"] < 0.95 * steps[0]["loss"], "three steps must have changed something"
    for name, saved, fourth in (("transformer_engine", "local", steps[3]), ("local", "transformer_engine", te_steps[3])):
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
    from configs.shapes import QWEN3, write_random_qwen3
    folder = tmp_path_factory.mktemp("loop")
    QWEN3["test"] = (512, 1536, 8, 8, 4, True)
    write_random_qwen3(str(folder / "model"), "test")
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


def steps_of(process: subprocess.Popen, run_dir: pathlib.Path) -> list[dict]:
    """-> the metrics of its steps, when it is done"""
    assert process.wait(400) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def differences(steps: list[dict]) -> list[float]:
    return [step["train/train_rollout_logprob_abs_diff"] for step in steps]


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
