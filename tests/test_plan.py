"""
test_plan.py: are the counts transformers' own, the bytes what was measured, and does every run file of a real size fit?

Run:   pytest tests/test_plan.py       CPU only, no weights, no network
       pytest tests/test_plan.py -s -k measured        prints the table of benchmarks/h200.md
"""
import dataclasses
import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import families
import fp8
import memory
import plan
import sizes
import train
from configs import base, validate
from configs.shapes import PUBLISHED, qwen3_4b
from helpers import make_cfg

CONFIGS = pathlib.Path(base.__file__).parent
H200 = plan.GPU_MIB["H200"] * 2**20
REAL = ["qwen3_4b", "qwen3_8b", "qwen3_30b_a3b", "glm4_9b", "glm4p5_355b_a32b", "llama3_8b", "llama3_70b", "deepseek_v3", "kimi_k2",
        "moonlight_16b"]


def config(values: dict):
    kind = values["model_type"].replace("kimi_k2", "deepseek_v3")
    return AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key != "model_type"})


def published(name: str):
    return config(PUBLISHED[name])


def cuda_cfg(**changes):
    return make_cfg(**dict(device="cuda", dtype="bfloat16", rollout_num_gpus=1, sequence_parallel=False) | changes)


def real_count(c) -> int:
    with torch.device("meta"):
        c.pad_token_id = None                # GLM-4's own lies outside a smaller vocabulary
        model = AutoModelForCausalLM.from_config(c)
    return sum(p.numel() for p in model.parameters())


# ---- Parameters --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    assert sizes.parameters(published(name)).total == real_count(published(name))


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
             tie_word_embeddings=False)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
MLA = dict(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, num_key_value_heads=4, n_routed_experts=8,
           n_shared_experts=2, first_k_dense_replace=2, n_group=1, topk_group=1)
FAMILIES = dict(
    qwen2=dict(model_type="qwen2"), qwen2_tied=dict(model_type="qwen2", tie_word_embeddings=True),
    qwen3=dict(model_type="qwen3", head_dim=16), llama=dict(model_type="llama"),
    qwen3_moe=MOE | dict(model_type="qwen3_moe", num_experts=8, head_dim=16),
    qwen3_moe_mixed=MOE | dict(model_type="qwen3_moe", num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3]),
    glm4=dict(model_type="glm4", attention_bias=True, head_dim=16, pad_token_id=0),
    glm4_moe=MOE | dict(model_type="glm4_moe", attention_bias=True, use_qk_norm=True, head_dim=16, n_routed_experts=8, n_shared_experts=1,
                        first_k_dense_replace=1),
    glm4_moe_plain=MOE | dict(model_type="glm4_moe", n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=3, head_dim=8),
    deepseek_v3=MOE | MLA | dict(model_type="deepseek_v3", q_lora_rank=12),
    moonlight=MOE | MLA | dict(model_type="deepseek_v3", q_lora_rank=None))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_every_family(name):
    c = config(SMALL | FAMILIES[name])
    assert sizes.parameters(c).total == real_count(c)


@pytest.mark.parametrize("name, total_size", [    # metadata.total_size of the published model.safetensors.index.json, bf16
    ("Qwen/Qwen3-4B", 8044936192), ("Qwen/Qwen3-8B", 16381470720), ("Qwen/Qwen3-30B-A3B", 61064245248),
    ("meta-llama/Llama-3.1-8B-Instruct", 16060522496), ("meta-llama/Llama-3.1-70B-Instruct", 141107412992)])
def test_published_bytes(name, total_size):
    assert 2 * sizes.parameters(published(name)).total == total_size


def test_deepseek_v3_is_671_b():
    """The count that is published for its main model has the router's correction bias in it, 256 numbers in each of 58 layers."""
    assert sizes.parameters(published("deepseek-ai/DeepSeek-V3")).total + 58 * 256 == 671_026_419_200


# ---- One rank ----------------------------------------------------------------------------------------------------------
def layout(tp=1, pp=1, cp=1, ep=1, etp=1, gpus=None, **more):
    return cuda_cfg(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, actor_num_gpus=gpus or tp * pp * cp,
                    expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, **dict(sequence_parallel=tp > 1) | more)


def test_all_ranks_together_have_all_parameters():
    c = published("moonshotai/Moonlight-16B-A3B-Instruct")
    ours, hidden = sizes.parameters(c), c.hidden_size
    rank = plan.trainer(layout(tp=4, ep=8, gpus=8), c)
    assert rank.parameters == ours.cut / 4 + ours.whole + ours.experts / 8
    # dense weights on dp 2, experts on one rank only; 2 + 4 bytes each, 12 over the copies
    assert rank.weights == 2 * rank.parameters and rank.gradients == 4 * rank.parameters
    assert rank.optimizer == 12 * ((ours.cut / 4 + ours.whole) / 2 + ours.experts / 8)
    assert plan.trainer(layout(tp=4, ep=2, etp=2, gpus=8), c).optimizer == 12 * ((ours.cut / 4 + ours.whole) / 2 + ours.experts / 8)
    # a stage with the embedding and 14 of 27 layers, one of them dense
    first = plan.trainer(layout(pp=2, megatron=dict(num_layers_in_last_pipeline_stage=13)), c)
    assert (first.stage, first.layers) == (0, 14)
    assert first.parameters == sizes.of_layers(c, [False] + [True] * 13).total + c.vocab_size * hidden


def test_tied_embeddings_are_copied_to_the_last_stage():
    c = published("Qwen/Qwen3-4B")
    one, last = (plan.trainer(layout(pp=pp, max_tokens_per_gpu=1, rollout_max_response_len=1, megatron=plan.RECOMPUTE), c) for pp in (1, 2))
    assert one.parameters == sizes.parameters(c).total
    assert last.stage == 1 and 2 * last.parameters == sizes.parameters(c).total + 151936 * 2560 + 2560


def test_optimizer_on_the_cpu():
    c = published("Qwen/Qwen3-4B")
    gpu, half = plan.trainer(layout(offload_train=False), c), plan.trainer(layout(offload_train=False, megatron=dict(
        optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)), c)
    assert half.optimizer == gpu.optimizer / 2 and gpu.host == 0
    assert half.host == plan.OFFLOADED / 2 * sizes.parameters(c).total


def test_activations_of_a_layout():
    """A token of one layer of Qwen3-4B: 4 H outside the matrices, 3 * (32 + 8) heads of 128 and 3 ffn inside; bf16."""
    c = published("Qwen/Qwen3-4B")
    outside, inside = 2 * 4 * 2560, 2 * (3 * 40 * 128 + 3 * 9728)

    def per_token(**more):
        cfg = layout(**dict(max_tokens_per_gpu=1, rollout_max_response_len=1) | more)
        return max(plan.activations(cfg, c, stage) for stage in range(cfg.pipeline_model_parallel_size))
    assert per_token() == per_token(pp=4) == 36 * (outside + inside)           # the first stage holds four micro-batches
    assert per_token(tp=2, sequence_parallel=False) == 36 * (outside + inside / 2)
    assert per_token(tp=2) == 36 * (outside + inside) / 2
    assert per_token(cp=2, rollout_max_response_len=8) == 4 * per_token()      # a longer sample gets its own micro-batch
    block = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=9)
    assert per_token(pp=2, megatron=block) == 2 * (9 * (outside + inside) + 9 * 2 * 2560) + outside + inside
    assert per_token(megatron=plan.RECOMPUTE) == 36 * 2 * 2560 + outside + inside
    # 36 layers in 2 stages of 3 runs of 6; the first has begun 2 * 1 + 2 * 2 + 1 = 7 runs before its first backward pass
    assert per_token(pp=2, virtual_pipeline_model_parallel_size=3) == 7 / 3 * 18 * (outside + inside)


def test_stages():
    c = published("deepseek-ai/DeepSeek-V3")
    last = dict(num_layers_in_last_pipeline_stage=13)
    assert [len(x) for x in plan.stages(layout(pp=4, megatron=last), c)] == [16, 16, 16, 13]
    assert plan.stages(layout(pp=4, megatron=last), c)[0] == [False] * 3 + [True] * 13
    with pytest.raises(ValueError, match=r"61 layers cannot be dealt to pp 4 .*; set megatron=dict\(num_layers_in_last_pipeline_stage=13\)"):
        plan.stages(layout(pp=4), c)
    glm = published("zai-org/GLM-4.5")           # 92 layers in runs of 23: the three dense ones are in the first run
    assert [x.count(False) for x in plan.stages(layout(pp=2, virtual_pipeline_model_parallel_size=2), glm)] == [3, 0]
    for pp in range(2, 17):
        for layers in range(pp, 100):            # all ways to have equally many layers in all stages but the last one
            ways = [(max(each, last), last) for each in range(1, layers) if (last := layers - each * (pp - 1)) > 0]
            assert families.last_stage(layers, pp) == min(ways)[1]


# ---- Engines and syncs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, width, token_bytes", [
    ("deepseek-ai/DeepSeek-V3", 1, 70_272),      # DeepSeek's own figure (2505.09343, table 1), on every GPU of the engine
    ("deepseek-ai/DeepSeek-V3", 8, 70_272),
    ("Qwen/Qwen3-4B", 1, 147_456), ("Qwen/Qwen3-4B", 2, 73_728), ("Qwen/Qwen3-30B-A3B", 8, 24_576)])     # 4 kv heads on 8 GPUs
def test_bytes_of_a_token(name, width, token_bytes):
    assert plan.engine(cuda_cfg(rollout_num_gpus_per_engine=width), published(name), H200).token_bytes == token_bytes


def test_groups_of_dp_attention():
    """16 GPUs as 8 groups of 2: attention is cut in two only, experts over all 16; each group has tokens of its own."""
    c, together = published("deepseek-ai/DeepSeek-V3"), cuda_cfg(rollout_num_gpus_per_engine=16, rollout_quantization="fp8")
    groups = plan.engine(dataclasses.replace(together, sglang=dict(enable_dp_attention=True, dp_size=8)), c, H200)
    one, ours = plan.engine(together, c, H200), sizes.parameters(c)
    vocab = 2 * 2 * 129280 * 7168
    assert groups.weights - one.weights == pytest.approx((vocab + (ours.cut - vocab / 2) * (1 + 4 / 128**2)) * (1 / 2 - 1 / 16))
    assert groups.tokens == pytest.approx(8 * groups.cache / 70_272, abs=1)


def test_engines_in_fp32():
    c, bf16 = published("Qwen/Qwen3-4B"), plan.engine(cuda_cfg(), published("Qwen/Qwen3-4B"), H200)
    fp32 = plan.engine(cuda_cfg(dtype="float32"), c, H200)
    assert (fp32.weights, fp32.token_bytes) == (2 * bf16.weights, 2 * bf16.token_bytes)
    assert plan.engine(cuda_cfg(dtype="float32", sglang=dict(kv_cache_dtype="bf16")), c, H200).token_bytes == bf16.token_bytes


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_a_sync(name, quantization, tmp_path):
    """Exactly those of a saved model's tensors, through quantize_stream; but for the router's correction bias."""
    c = config(SMALL | FAMILIES[name] | dict(intermediate_size=128))           # whole blocks: GLM-4 has gate and up in one
    AutoModelForCausalLM.from_config(c).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = [(key, x) for key, x in load_file(tmp_path / "model.safetensors").items() if "e_score_correction_bias" not in key]
    sent = fp8.quantize_stream(tensors) if quantization else tensors
    assert plan.model_bytes(cuda_cfg(rollout_quantization=quantization), c) == sum(x.numel() * x.element_size() for _, x in sent)


# ---- Against what was measured -------------------------------------------------------------------------------------------
BENCH = dict(log_probs_chunk_size=2048, colocate=True, hf_checkpoint=qwen3_4b)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=26)
MEASURED = [  # what, the plan's figure (cfg, config), measured (benchmarks/h200.md), how far apart at most
    ("trainer, 8,192 tokens, GB", lambda c: plan.trainer(cuda_cfg(**BENCH, max_tokens_per_gpu=8192), c).total / 1e9, 111.1, 0.06),
    ("trainer, 16,384 tokens, 26 layers computed again, GB",
     lambda c: plan.trainer(cuda_cfg(**BENCH, max_tokens_per_gpu=16384, megatron=BLOCK), c).total / 1e9, 97.9, 0.06),
    ("engine awake, the trainer away, GB", lambda c: H200 / 1e9 * (plan.SLACK + memory.share_memory(cuda_cfg(
        **BENCH, max_tokens_per_gpu=8192, offload_train=True, offload_rollout=True), c, H200).sglang["mem_fraction_static"]), 132, 0.06),
    ("bytes of a sync, MB", lambda c: plan.model_bytes(cuda_cfg(), c) / 1e6, 8045, 0.0005)]


@pytest.mark.parametrize("what, planned, measured, apart", MEASURED, ids=[row[0] for row in MEASURED])
def test_what_was_measured_on_h200(what, planned, measured, apart):
    value = planned(published("Qwen/Qwen3-4B"))
    print(f"\n| {what} | {value:,.1f} | {measured:,} | {value / measured:.2f} |")
    assert value == pytest.approx(measured, rel=apart)


# ---- Run files, and what does not fit ------------------------------------------------------------------------------------
@pytest.fixture
def offline(monkeypatch):
    """No network, and no import of Megatron and SGLang to check their arguments (test_base.py does that)."""
    def refuse(*_, **__):
        raise OSError("no network")
    monkeypatch.setattr(sizes.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(validate, "validate_passthrough", lambda cfg: None)


@pytest.mark.parametrize("name", REAL)
def test_run_files_of_real_sizes_fit(offline, name):
    cfg = base.load(str(CONFIGS / f"{name}_grpo.py"))
    train.check(cfg)
    text = plan.dry_run(cfg, memory.share_memory)
    assert "it fits H200" in text and "configs/shapes.py (hub not reached)" in text


@pytest.mark.parametrize("name, gpu, lines", [
    ("llama3_70b", "H100", ["pipeline_model_parallel_size = 2"]), ("deepseek_v3", "H100", ["actor_num_gpus = 256"])])
def test_the_nearest_layout(offline, name, gpu, lines):
    path = str(CONFIGS / f"{name}_grpo.py")
    text = plan.dry_run(base.load(path, [f"--gpu_type={gpu}"]), memory.share_memory)
    assert f"DOES NOT FIT {gpu}" in text
    assert text.split("the nearest layout that fits:\n")[1].split("\n") == ["    " + line for line in lines]
    again = base.load(path, [f"--gpu_type={gpu}"] + ["--" + line.replace(" = ", "=") for line in lines])
    assert f"it fits {gpu}" in plan.dry_run(again, memory.share_memory)


@pytest.mark.parametrize("settings, problem", [
    (["--tensor_model_parallel_size=8", "--rollout_num_gpus_per_engine=4"], "4 kv heads (num_query_groups) cannot be cut over tp 8"),
    (["--sequence_parallel=false", "--expert_model_parallel_size=1"], "need sequence_parallel; set it to True"),
    (["--pipeline_model_parallel_size=2", "--expert_model_parallel_size=3", "--tensor_model_parallel_size=1", "--sequence_parallel=false",
      "--actor_num_gpus=6", "--rollout_num_gpus_per_engine=2"], "128 experts cannot be dealt to ep 3"),
    (["--rollout_max_response_len=20000000"], "no cache for a sample of 20,000,000 tokens"),
    (["--offload_train=false", "--offload_rollout=false"], "beside the engine's 0.70")])
def test_layouts_that_cannot_be(offline, settings, problem):
    cfg = base.load(str(CONFIGS / "qwen3_30b_a3b_grpo.py"), settings)
    assert f"DOES NOT FIT H200: " in (text := plan.dry_run(cfg, memory.share_memory)) and problem in text


@pytest.mark.parametrize("name, changes, problem", [
    ("Qwen/Qwen3-4B", dict(rollout_num_gpus_per_engine=3), "cannot cut 32 heads .* over 3 .*; set another rollout_num_gpus_per_eng"),
    ("Qwen/Qwen3-4B", dict(rollout_num_gpus_per_engine=3, loss_type="sft"), None),
    ("zai-org/GLM-4.5", dict(rollout_num_gpus_per_engine=64), "cannot cut 96 heads .* over 64"),
    ("zai-org/GLM-4.5", dict(rollout_num_gpus_per_engine=64, sglang=dict(enable_dp_attention=True, dp_size=2)), None),
    ("zai-org/GLM-4.5", dict(rollout_num_gpus_per_engine=8, sglang=dict(enable_dp_attention=True, dp_size=3)), "dp_size 3 .* divisors"),
    ("zai-org/GLM-4.5", dict(rollout_num_gpus_per_engine=8, sglang=dict(ep_size=3)), "ep_size 3; set both to divisors"),
    ("Qwen/Qwen3-30B-A3B", dict(rollout_num_gpus_per_engine=8, rollout_quantization="fp8"), "moe_intermediate_size / tp . ep = 96"),
    ("Qwen/Qwen3-30B-A3B", dict(rollout_num_gpus_per_engine=8, rollout_quantization="fp8", sglang=dict(ep_size=8)), None),
    ("Qwen/Qwen3-30B-A3B", dict(expert_tensor_parallel_size=512), "ffn size 768 is no multiple of etp 512"),
    ("Qwen/Qwen3-30B-A3B", dict(pipeline_model_parallel_size=5), r"set megatron=dict\(num_layers_in_last_pipeline_stage=8\)"),
    ("Qwen/Qwen3-30B-A3B", dict(pipeline_model_parallel_size=49), "set pipeline_model_parallel_size to at most 48"),
    ("Qwen/Qwen3-4B", dict(use_routing_replay=True), "qwen3 has none; remove it"),
    ("Qwen/Qwen3-30B-A3B", dict(megatron=dict(moe_router_topk=4)), r"megatron\['moe_router_topk'\] follows from config.json"),
    ("Qwen/Qwen3-30B-A3B", dict(megatron=dict(moe_router_bias_update_rate=1e-3)), "qwen3_moe has none; remove it"),
    ("zai-org/GLM-4.5", dict(megatron=dict(moe_router_bias_update_rate=1e-3)), None),
    ("meta-llama/Llama-3.1-8B-Instruct", dict(rollout_quantization="fp8"), "set rollout_quantization=None")])
def test_what_a_model_refuses(name, changes, problem):
    """problems() says what train.start would raise; both ask check_model."""
    cfg, c = cuda_cfg(**changes), published(name)
    if problem is None:
        return plan.check_model(cfg, c)
    with pytest.raises(ValueError, match=problem):
        plan.check_model(cfg, c)
    assert len(plan.problems(cfg, c, H200)) == 1


def test_fp8_on_an_a100():
    c = published("Qwen/Qwen3-8B")
    cfg = cuda_cfg(rollout_quantization="fp8", gpu_type="A100")
    assert any("needs Hopper or newer" in one for one in plan.problems(cfg, c, H200))


def test_an_fp8_model_needs_fp8_engines():
    c = published("Qwen/Qwen3-4B")
    c.quantization_config = fp8.QUANTIZATION_CONFIG
    plan.check_model(cuda_cfg(rollout_quantization="fp8"), c)
    plan.check_model(cuda_cfg(loss_type="sft"), c)
    with pytest.raises(ValueError, match="set rollout_quantization='fp8', or write plain weights"):
        plan.check_model(cuda_cfg(), c)


def suggestion(settings, name="qwen3_4b"):
    """(the Config, what nearest() says, the Config with that), the last as a run file would give it: validated."""
    path = str(CONFIGS / f"{name}_grpo.py")
    cfg = base.load(path, settings)
    c, _ = sizes.read_config(cfg)
    new = plan.nearest(cfg, c, H200, memory.share_memory)
    again = base.load(path, settings + [f"--{key}={value}" for key, value in new.items()])
    assert "it fits" in plan.dry_run(again, memory.share_memory)
    return cfg, new, again


APART = ["--colocate=false", "--sglang={}", "--tensor_model_parallel_size=1", "--sequence_parallel=false"]


def test_suggestions_for_engines_of_their_own(offline):
    _, new, _ = suggestion([*APART, "--actor_num_gpus=4", "--rollout_num_gpus_per_engine=1", "--rollout_num_gpus=1",
                            "--rollout_max_response_len=1500000", "--max_tokens_per_gpu=2000", "--context_parallel_size=4",
                            "--rollout_max_context_len=1500000", "--megatron=" + repr(plan.RECOMPUTE)])
    assert new["rollout_num_gpus_per_engine"] == new["rollout_num_gpus"] == 2


def test_suggestions_for_a_critic_of_its_own(offline):
    """Both are too large for one GPU; 64 rows of an optimizer step are not enough for more than 64 replicas."""
    _, new, again = suggestion([*APART, "--actor_num_gpus=1", "--rollout_num_gpus=2", "--critic={'lr': 1e-5}",
                                "--advantage_estimator=ppo", "--critic_num_gpus=1", "--rollout_num_gpus_per_engine=1"], "qwen3_8b")
    replica = again.actor_num_gpus // base.dp_size(again)
    assert new and again.critic_num_gpus % replica == 0 and "sequence_parallel" not in new
    # the critic alone does not fit
    cfg = dataclasses.replace(again, actor_num_gpus=8 * replica, critic_num_gpus=1, tensor_model_parallel_size=1,
                              pipeline_model_parallel_size=1, context_parallel_size=1)
    assert "training may need" in plan.problems(cfg, published("Qwen/Qwen3-8B"), H200)[0]
    assert plan.problems(dataclasses.replace(cfg, critic_num_gpus=8), published("Qwen/Qwen3-8B"), H200) == []


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_sequence_parallel_stays_as_it_is(offline, sequence_parallel):
    _, new, again = suggestion([f"--sequence_parallel={sequence_parallel}", "--max_tokens_per_gpu=100000", "--megatron={}"])
    assert new and again.tensor_model_parallel_size > 1 and "sequence_parallel" not in new


@pytest.mark.parametrize("text, message", [
    ('{"hidden_size": 8}', "names no model_type; copy or download"), ('{"model_type": "gpt2"}', "'gpt2' has no rule table"),
    ('{"model_type": "gemma3"}', "'gemma3' has no rule table"), ("[]", "names no model_type"),
    ('{"model_type": "qwen3", "hidd', "from its folder .*Unterminated string.*; give a folder with a whole one"),
    ('{"model_type": "qwen3", "use_sliding_window": true, "sliding_window": 8}', "config.json has layer_types .*; use a model whose layers all have it"),
    ('{"model_type": "qwen3", "hidden_size": "8"}', "'hidden_size' .*expected int.*; mend it")])
def test_a_config_that_cannot_be_used(offline, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        sizes.read_config(cuda_cfg(hf_checkpoint=str(tmp_path)))


def test_a_hub_name_with_a_space():
    """The hub is asked, and says no, or is not reached: urlopen would refuse the name with an exception of its own."""
    with pytest.raises(ValueError, match="config.json of some body/x could not be read from the hub"):
        sizes.read_config(cuda_cfg(hf_checkpoint="some body/x"))


def test_where_the_config_comes_from(offline, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["moonshotai/Kimi-K2-Instruct"]))
    assert sizes.read_config(cuda_cfg(hf_checkpoint=str(tmp_path)))[1] == "its folder"
    assert sizes.read_config(cuda_cfg(hf_checkpoint=qwen3_4b))[0].num_hidden_layers == 36
    for made_later in ("configs/demo_sft.py", lambda folder: None):
        assert sizes.read_config(cuda_cfg(hf_checkpoint=made_later)) == (None, "the model is made when the run starts")
    with pytest.raises(ValueError, match="config.json of nobody/nothing could not be read from the hub .no network.*; give a folder"):
        sizes.read_config(cuda_cfg(hf_checkpoint="nobody/nothing"))
    with pytest.raises(ValueError, match="gpu_type='H300' is not known; use one of A100, "):
        plan.gpu_bytes_of(cuda_cfg(gpu_type="H300"))
