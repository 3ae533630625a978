"""
test_families.py: every model family under every layout, against transformers and against one process.

    tiny HF models --transformers--> log-probs, loss, gradients of each weight      == ?
                   --model.py, cut over 1, 2 or 4 processes--> the same; and written back, bit for bit; and resumed

Run:   make families   (pytest -q -s tests/test_families.py)    CPU only, about 8 minutes; prints the table whose largest values README names

Each layout is started once and goes through all families. Gradients travel by the same way as weights (families.to_hf is
linear), so what is compared is each tensor of the checkpoint, wherever its parts were.
"""
import types

import pytest
import torch

import algos
import convert
from engines import free_port
from helpers import run_workers
from test_model import CLIP, COMMON, Rank, ask_transformers, make_samples, write_random

pytestmark = pytest.mark.timeout(1500)       # all layouts run in one fixture
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=1)
SIGMOID = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_shared_experts=1,
               routed_scaling_factor=2.5)
LATENT = SIGMOID | dict(num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8,
            original_max_position_embeddings=16)
FAMILIES = {                                 # name -> config class, what differs from SIZES
    "qwen2": ("Qwen2Config", dict()),
    "qwen3": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
    "llama3": ("LlamaConfig", dict(head_dim=8, rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0,
        original_max_position_embeddings=16))),
    "mimo": ("Qwen2Config", dict()),         # published under a name of its own, see write()
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
                                         norm_topk_prob=True)),
    "glm4": ("Glm4Config", dict(head_dim=16, attention_bias=True)),
    "glm4_moe": ("Glm4MoeConfig", SIGMOID | dict(head_dim=16, attention_bias=True, use_qk_norm=True)),
    "deepseek_v3": ("DeepseekV3Config", LATENT | dict(q_lora_rank=20, n_group=4, topk_group=1, rope_parameters=YARN)),
    "moonlight": ("DeepseekV3Config", LATENT | dict(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2)),
    "kimi_k2": ("DeepseekV3Config", LATENT | dict(q_lora_rank=20, n_group=1, topk_group=1, rope_parameters=YARN)),
}
PUBLISHED = {"kimi_k2": dict(model_type="kimi_k2"), "mimo": dict(model_type="mimo", architectures=["MiMoForCausalLM"])}
EXPERTS = {"qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight", "kimi_k2"}


def layout(tp=1, pp=1, cp=1, ep=1, etp=1, vpp=None, dp=1, **more):
    """-> processes, settings"""
    return tp * pp * cp * dp, dict(
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, **more)


UNEVEN = dict(num_layers_in_first_pipeline_stage=1)
LAYOUTS = {
    "tp 2 x pp 2": layout(tp=2, pp=2), "1 process": layout(), "tp 2": layout(tp=2), "pp 2": layout(pp=2), "pp 2, uneven": layout(pp=2, megatron=UNEVEN),
    "vpp": layout(pp=2, vpp=2), "cp 2": layout(cp=2), "ep 2": layout(ep=2, dp=2), "etp 2": layout(tp=2, etp=2), "etp 2 over dp": layout(dp=2, etp=2),
    "tp 2 x ep 2": layout(tp=2, ep=2, dp=2), "cp 2 x ep 2": layout(cp=2, ep=2),
    "cp 4": layout(cp=4), "tp 2 x cp 2": layout(tp=2, cp=2), "ep 4": layout(ep=4, dp=2, tp=2),
    "ep 2 x etp 2": layout(ep=2, etp=2, tp=2, dp=2), "vpp x ep 2": layout(pp=2, vpp=2, ep=2, dp=2),
    "cp 2 x pp 2 x ep 2": layout(cp=2, pp=2, ep=2)}
WITH_EXPERTS = {name for name, (_, settings) in LAYOUTS.items()
                if settings["expert_model_parallel_size"] * settings["expert_tensor_parallel_size"] > 1}
EVERY = {"1 process", "tp 2", "pp 2", "ep 2", "tp 2 x pp 2"}     # of these layouts each family goes through; the others differ in
FEW = {"qwen3", "glm4", "qwen3_moe", "deepseek_v3"}              # what these four differ in
STEPS = 2


def write(family, folder) -> str:
    cls, extra = FAMILIES[family]
    return write_random(cls, SIZES | extra, folder, PUBLISHED.get(family, {}), seed=len(cls))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root, samples = tmp_path_factory.mktemp("families"), make_samples()
    families = {f: ask_transformers(f, write(f, root / f), samples) for f in FAMILIES}
    return {"samples": samples, "families": families, "root": root}


def work(rank, world, port, layouts, job):
    """-> layout -> family -> what came out. One layout after the other in the same processes: Megatron takes 8 s to import."""
    out = {}
    for name, settings in layouts.items():
        out[name], port = one_layout(rank, world, port, settings, name, job)
    return out


def one_layout(rank, world, port, settings, name, job):
    import megatron.core.parallel_state as parallel_state
    r = Rank(rank, world, port, settings, job)
    out, box = {}, [free_port("127.0.0.1")]
    for family in FAMILIES:
        if (name in WITH_EXPERTS and family not in EXPERTS) or (name not in EVERY and family not in FEW):
            continue
        out[family] = one_family(r, family, name, job)
    torch.distributed.broadcast_object_list(box)         # where to meet next
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return out, box[0]


def one_family(r, family, name, job) -> dict:
    import weights_sync
    out, folder, weights_sync.PIECE = {}, job["root"] / family, 2**28
    m = r.model(family, trainable=False)
    out["logp"] = r.log_probs(m, r.batches(m, family))
    reader = convert.HFReader(folder)
    back = {n: t for bucket in weights_sync.buckets(m, 1 << 30) for n, t in bucket.tensors()} if weights_sync.takes_part(m) else {}
    out["round trip"] = sorted(back.keys() ^ set(reader.names())) if back else []
    out["round trip"] += [n for n, t in back.items() if not torch.equal(t, reader(n))]

    m = r.model(family, use_distributed_optimizer=False, clip_grad=1e6)
    out["first"] = r.step(m, r.batches(m, family))
    view = types.SimpleNamespace(grid=m.grid, hf_config=m.hf_config, device=m.device, named_weights=lambda: (
        (n, p.main_grad if hasattr(p, "main_grad") else torch.zeros_like(p)) for n, p in m.named_weights()))
    weights_sync.PIECE = 1                   # experts one by one; above, all at once
    if weights_sync.takes_part(m):
        got = {n: t.clone() for bucket in weights_sync.buckets(view, 1 << 30) for n, t in bucket.tensors()}
        want = job["families"][family]["gradients"]
        out["gradients"] = max(float((got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-3)) for n in want)
        assert got.keys() >= want.keys()

    m = r.model(family, clip_grad=CLIP)
    out["steps"] = [r.step(m, r.batches(m, family)) for _ in range(STEPS)]
    m.save(job["root"] / f"{family} {name}", {"step": STEPS})
    out["next"] = r.step(m, r.batches(m, family))
    m = r.model(family, clip_grad=CLIP)
    m.load(job["root"] / f"{family} tp 2 x pp 2")        # which was run first
    out["loaded"] = r.step(m, r.batches(m, family))
    return out


# ---- Starting the layouts ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def results(job):
    """layout -> family -> what came out, of each rank"""
    out = {}
    for world in (4, 2, 1):                  # 4 first: all of them load the checkpoint of tp 2 x pp 2
        layouts = {name: settings for name, (processes, settings) in LAYOUTS.items() if processes == world}
        ranks = run_workers(work, world, layouts, job, limit_s=900)
        out |= {name: [rank[name] for rank in ranks] for name in layouts}
    return out


def difference(got: list[dict], want: list[dict]) -> float:
    """Largest relative difference in loss and grad norm."""
    return max(abs(a[key] / b[key] - 1) for a, b in zip(got, want, strict=True) for key in ("loss", "grad_norm"))


def table(results, cell) -> float:
    """Prints family x layout; -> the worst cell."""
    print("\n\n| | " + " | ".join(LAYOUTS) + " |\n" + "|---" * (len(LAYOUTS) + 1) + "|")
    worst = 0.0
    for family in FAMILIES:
        row = [max(cell(rank[family], family) for rank in results[name]) if family in results[name][0] else None for name in LAYOUTS]
        print(f"| {family} | " + " | ".join("" if x is None else f"{x:.0e}" for x in row) + " |")
        worst = max([worst] + [x for x in row if x is not None])
    return worst


def test_log_probs_equal_transformers(job, results):
    def cell(out, family):
        want = job["families"][family]["logp"]
        return max((float((logp - want[i]).abs().max()) for i, logp in out["logp"].items()), default=0.0)
    assert table(results, cell) < 1e-4
    for name, ranks in results.items():      # every sample came out somewhere
        for family in ranks[0]:
            assert set().union(*(rank[family]["logp"] for rank in ranks)) == set(range(12)), (name, family)


def test_gradients_equal_transformers(job, results):
    def cell(out, family):
        metrics, want = out["first"], job["families"][family]["metrics"]
        worst = max(abs(metrics[key] - want[key]) / (abs(want[key]) + 1e-2) for key in want)
        return max(worst, out.get("gradients", 0.0))
    assert table(results, cell) < 1e-4


def test_every_layout_trains_alike(results):
    def cell(out, family):
        want = results["1 process"][0][family]
        return difference(out["steps"], want["steps"])
    assert table(results, cell) < 1e-5


def test_a_checkpoint_resumes_under_another_layout(results):
    def cell(out, family):
        return difference([out["loaded"]], [out["next"]])
    assert table(results, cell) < 1e-5


def test_weights_are_written_back_bit_for_bit(results):
    for name, ranks in results.items():
        for family, out in ranks[0].items():
            assert out["round trip"] == [], (name, family)
