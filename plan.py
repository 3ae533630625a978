"""
plan.py: what will it need? Parameters, bytes on the fullest GPU, the engines' cache, the bytes of a weight sync: arithmetic on
config.json and the layout, before anything starts and without weights.

    Config, config.json --trainer--> bytes of the fullest rank ----+
                        --engine---> weights, cache, concurrency --+--problems--> [] (it fits), or what does not
                        --nearest--> the nearest layout that fits, as lines of a run file
                        --report---> the text that --dry-run prints

Run:   python train.py configs/qwen3_30b_a3b_grpo.py --dry-run [--gpu_type=H100]
Test:  pytest tests/test_plan.py       (counts against transformers' models, bytes against benchmarks/h200.md)
Knows nothing about: who leaves a shared GPU when (memory.py, which asks here), weights, process groups.
Left out on purpose: MTP layers (not trained), experts that get more tokens than others, selective recomputation (counted as
       kept), vocabulary padding. Everywhere: c is the model's config, GB are 10^9 bytes, a plan is within about 10%,
       but for a sync's seconds, which are a floor.
"""
import contextlib
import dataclasses
import itertools
from dataclasses import dataclass

import fp8
from configs.base import Config, critic_config, dp_size, has_engines, need
from configs.validate import validate_batch, validate_critic, validate_layout
from families import (check_policy, check_stages, check_tp, head_dim_of, last_stage, layers_with_experts, num_experts,
                      megatron_config, shared_ffn)
from sizes import Parameters, is_mla, of_layers, parameters, read_config

GPU_MIB = {"A100": 81920, "H100": 81559, "H20": 97871, "H200": 143771, "B200": 183359}    # nvidia-smi's memory.total
CUDA = 0.05                                  # share of a GPU: contexts and kernels of both sides
SLACK = 0.1                                  # that an engine leaves free of its own: CUDA graphs, activations, fragmentation
ENGINE_SHARE = 0.88                          # about what SGLang takes for weights and cache where nothing is set
# Bytes a second of a sync: 8,045 MB in 0.043 and 0.047 s within a node (benchmarks/h200.md). Between nodes: slower.
SYNC_RATE = {"tensor": 187e9, "distributed": 171e9}
# Bytes a parameter of an optimizer on the CPU: weights, moments and gradients in fp32 are 16; page-locked memory comes in
# powers of two, and what once held the bf16 weights is kept. From one run: benchmarks/h200.md, "Qwen3-30B-A3B, four GPUs".
OFFLOADED = 23
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


# ---- Trainers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rank:
    """Bytes of the fullest rank while it trains, of actor and critic together where they share it."""
    stage: int
    layers: int
    parameters: float                        # of this rank, of one model
    weights: float
    gradients: float                         # fp32
    optimizer: float                         # on the GPU: fp32 main weights and Adam's two moments
    activations: float
    logits: float                            # of one chunk, on the last stage
    host: float                              # CPU memory: what leaves while engines work, other models, offloaded optimizer

    @property
    def kept(self):
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self):
        return self.kept + self.activations + self.logits


def stages(cfg, c) -> list[list[bool]]:
    """The layers of each pipeline stage, as layers_with_experts gives them; with virtual stages each takes several runs."""
    check_stages(c, cfg)
    pp, runs, layers = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size or 1, layers_with_experts(c)
    given = {0: "num_layers_in_first_pipeline_stage", pp - 1: "num_layers_in_last_pipeline_stage"}
    ends = {stage: cfg.megatron[key] for stage, key in given.items() if cfg.megatron.get(key)}
    each = (len(layers) - sum(ends.values())) // max(pp - len(ends), 1)        # of the other stages
    sizes = [ends.get(stage, each) for stage in range(pp)]
    found, waiting = [[] for _ in sizes], iter(layers)
    for _, stage in itertools.product(range(runs), range(pp)):
        found[stage] += itertools.islice(waiting, sizes[stage] // runs)
    return found


def micro_batch_tokens(cfg) -> int:
    """Tokens of one micro-batch on one rank; a longer sample still gets its own."""
    return max(cfg.max_tokens_per_gpu, -(-sample_tokens(cfg) // cfg.context_parallel_size))


def sample_tokens(cfg) -> int:
    """The longest sample: prompt, where its length is limited, and response."""
    tokens = (cfg.rollout_max_prompt_len or 0) + cfg.rollout_max_response_len
    return min(tokens, cfg.rollout_max_context_len or tokens)


def layer_activations(cfg, c, moe: bool) -> float:
    """Bytes of one token that one layer keeps for the backward pass: each matrix's input, each norm's and SwiGLU's, what the
    attention needs; bf16. (After 2205.05198, sec. 4, without attention scores, and with this model's own widths.)"""
    hidden, heads, tp = c.hidden_size, c.num_attention_heads, cfg.tensor_model_parallel_size
    stream = (6 if c.model_type == "glm4" else 4) * hidden       # norms' inputs and outputs, which tp alone does not split
    if is_mla(c):
        wide = c.qk_nope_head_dim + c.qk_rope_head_dim
        stream += 2 * (c.kv_lora_rank + (c.q_lora_rank or 0)) + c.qk_rope_head_dim
        inside = heads * (3 * wide + c.qk_nope_head_dim + 2 * c.v_head_dim)    # q, rotated q, k; k and v as projected; output
    else:
        inside = 3 * (heads + c.num_key_value_heads) * head_dim_of(c)          # q, k, v; rotated q, k; output
    if moe:                                  # each of k copies: input, gate and up, their product
        inside += c.num_experts_per_tok * (hidden + 3 * c.moe_intermediate_size) + 3 * shared_ffn(c)
    else:
        inside += 3 * c.intermediate_size
    return 2 * (stream / (tp if cfg.sequence_parallel else 1) + inside / tp)


def activations(cfg, c, stage: int = 0) -> float:
    """Bytes on a rank of this stage. 1F1B holds pp - stage micro-batches, virtual stages some more (2104.04473, sec. 2.2)."""
    pp, runs, layers = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size or 1, stages(cfg, c)[stage]
    waiting = pp - stage if runs == 1 else min((2 * (pp - stage - 1) + (runs - 1) * pp + 1) / runs, pp * 2)
    each, again, at_once, kept = {moe: layer_activations(cfg, c, moe) for moe in set(layers)}, 0, 1, 1
    if cfg.megatron.get("recompute_granularity") == "full":
        count = cfg.megatron.get("recompute_num_layers") or 1
        if cfg.megatron.get("recompute_method") == "block":      # the first so many of each run of layers
            again = min(count * runs, len(layers))
        else:
            again, at_once, kept = len(layers), count, 1 / count
    inputs = 2 * c.hidden_size / (cfg.tensor_model_parallel_size if cfg.sequence_parallel else 1)
    per_token = sum(each[moe] for moe in layers[again:]) + again * kept * inputs
    return micro_batch_tokens(cfg) * (waiting * per_token + (at_once * max(each.values()) if again else 0))


def trainer(cfg, c) -> Rank:
    """The rank that needs most; all ranks of a pipeline stage need the same."""
    tp, pp, ep = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.expert_model_parallel_size
    cp, etp, split = cfg.context_parallel_size, cfg.expert_tensor_parallel_size, cfg.use_distributed_optimizer
    copies = cp * dp_size(cfg) if split else 1                   # ranks that share one optimizer state
    expert_copies = tp * cp * dp_size(cfg) / (ep * etp) if split else 1
    weight, state = (2, 12) if cfg.dtype == "bfloat16" else (4, 8)             # in fp32 the weights are the main weights
    models = 2 if cfg.critic and not cfg.critic_num_gpus else 1  # actor and critic
    others = bool(cfg.use_kl_loss or cfg.kl_coef) + bool(cfg.opd_teacher_load)
    fraction = cfg.megatron.get("optimizer_offload_fraction", 1.0) if cfg.megatron.get("optimizer_cpu_offload") else 0
    found = []
    for stage, layers in enumerate(stages(cfg, c)):
        ours = of_layers(c, layers)
        # With tied embeddings a last stage that is not the first has a copy.
        matrices = (stage == 0) + (stage == pp - 1 and not (pp == 1 and c.tie_word_embeddings))
        ours += Parameters(matrices * c.vocab_size * c.hidden_size, c.hidden_size * (stage == pp - 1))
        dense, experts = ours.cut / tp + ours.whole, ours.experts / (ep * etp)
        states = models * state * (dense / copies + experts / expert_copies)
        weights = models * weight * (dense + experts)
        chunk = min(cfg.log_probs_chunk_size, micro_batch_tokens(cfg)) if stage == pp - 1 else 0
        host = (weights + states * (1 - fraction)) * (cfg.offload_train is not False) + others * weights / models
        found.append(Rank(
            stage, len(layers), dense + experts, weights, models * 4 * (dense + experts), states * (1 - fraction),
            activations(cfg, c, stage), chunk * 8 * c.vocab_size / tp,         # in bf16 and fp32, and their gradient
            host + fraction * states / state * OFFLOADED))
    return max(found, key=lambda rank: rank.total)


# ---- Engines -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Engine:
    weights: float                           # bytes on one GPU
    cache: float                             # bytes on one GPU
    token_bytes: float                       # of the cache, on one GPU
    tokens: int                              # that the caches of one engine hold
    samples: float                           # of full length at a time


def engine(cfg, c, gpu_bytes: float) -> Engine:
    """One SGLang engine. With enable_dp_attention its GPUs are dp_size groups with tokens of their own, and all but the
    experts is cut inside a group only."""
    width, tp = cfg.rollout_num_gpus_per_engine, check_engine(cfg, c)
    # of a number in the cache: fp8_e4m3, bf16, or as the weights
    wide = {"f": 1, "b": 2}.get(str(cfg.sglang.get("kv_cache_dtype"))[:1], 4 if cfg.dtype == "float32" else 2)
    # MLA: the latent, on each GPU; else k and v of at least one head.
    each = c.kv_lora_rank + c.qk_rope_head_dim if is_mla(c) else 2 * max(c.num_key_value_heads / tp, 1) * head_dim_of(c)
    token_bytes = c.num_hidden_layers * each * wide
    weights = model_bytes(cfg, c, tp, width)
    cache = max(cfg.sglang.get("mem_fraction_static", ENGINE_SHARE) * gpu_bytes - weights, 0)
    tokens = int(width // tp * cache / token_bytes)
    return Engine(weights, cache, token_bytes, tokens, tokens / sample_tokens(cfg))


def model_bytes(cfg, c, tp: int = 1, width: int = 1) -> float:
    """Of an engine's weights on one of its GPUs; with tp 1 and width 1 of a whole weight sync."""
    if cfg.rollout_quantization:
        ours = parameters(c, lambda name, *shape: fp8.bytes_sent(f"model.layers.0.{name}.weight", shape))
    else:
        ours = parameters(c) * (4 if cfg.dtype == "float32" else 2)
    return ours.cut / tp + ours.whole + ours.experts / width


# ---- Does it fit? ------------------------------------------------------------------------------------------------------
def gpu_bytes_of(cfg) -> int:
    need(cfg.gpu_type in GPU_MIB, f"gpu_type={cfg.gpu_type!r} is not known; use one of {', '.join(GPU_MIB)}")
    return GPU_MIB[cfg.gpu_type] * 2**20


def problems(cfg, c, gpu_bytes: float) -> list[str]:
    """What cannot be or does not fit, each with a remedy. offload_train and offload_rollout: None counts as yes."""
    try:
        check_model(cfg, c)
        sides = [cfg, critic_config(cfg)] if cfg.critic_num_gpus else [cfg]
        rank = max((trainer(side, c) for side in sides), key=lambda rank: rank.total)
    except ValueError as error:
        return [str(error)]
    found, share = [], cfg.sglang.get("mem_fraction_static", ENGINE_SHARE)
    if cfg.rollout_quantization and cfg.gpu_type == "A100":
        found.append("rollout_quantization='fp8' needs Hopper or newer; set rollout_quantization=None")
    engines = has_engines(cfg)
    beside = share if engines and cfg.colocate and cfg.offload_rollout is False else 0
    if rank.total / gpu_bytes + beside + CUDA > 1 and not cfg.debug_rollout_only:
        found.append(f"training may need {rank.total / 1e9:.0f} GB" + (f" beside the engine's {beside:.2f}" if beside else "")
                     + f" of the {gpu_bytes * (1 - CUDA) / 1e9:.0f} that CUDA leaves of a GPU; set max_tokens_per_gpu lower, "
                     + ("" if RECOMPUTE.items() <= cfg.megatron.items() else f"megatron={RECOMPUTE}, ") + "or use more GPUs")
    if not engines:
        return found
    if engine(cfg, c, gpu_bytes).samples < 1:
        found.append(f"an engine's {share:.2f} of a GPU holds {engine(cfg, c, gpu_bytes).weights / 1e9:.0f} GB of weights and "
                     f"no cache for a sample of {sample_tokens(cfg):,} tokens; set rollout_num_gpus_per_engine higher")
    if cfg.colocate and cfg.offload_train is False and rank.kept / gpu_bytes + share + CUDA > 1:
        found.append(f"the trainer keeps {rank.kept / 1e9:.0f} GB beside an engine's {share:.2f} of the GPU; "
                     "set offload_train=True")
    return found


def check_model(cfg, c) -> None:
    """ValueError for a layout that this model cannot have, or that its engines would refuse."""
    check_policy(c)
    check_tp(c, cfg.tensor_model_parallel_size, cfg.expert_model_parallel_size, cfg.expert_tensor_parallel_size)
    check_stages(c, cfg)
    need(not num_experts(c) or cfg.tensor_model_parallel_size == 1 or cfg.sequence_parallel,
         "experts with tensor parallelism need sequence_parallel; set it to True")
    fields = megatron_config(c)[0]
    rate = "moe_router_bias_update_rate"
    for key in sorted((fields.keys() - {rate}) & cfg.megatron.keys()):
        raise ValueError(f"megatron[{key!r}] follows from config.json, which the engine reads too; remove it")
    need(not cfg.megatron.get(rate) or fields.get("moe_router_enable_expert_bias"), f"megatron[{rate!r}] moves routers' "
         f"e_score_correction_bias, and {c.model_type} has none; remove it")
    need(num_experts(c) or not (cfg.use_routing_replay or cfg.use_rollout_routing_replay),
         f"routing replay is for models with experts, and {c.model_type} has none; remove it")
    if has_engines(cfg):
        check_engine(cfg, c)


def check_engine(cfg, c) -> int:
    """The GPUs over which an engine cuts attention: all or, with enable_dp_attention, those of a group. ValueError for what
    SGLang would refuse while it starts."""
    width, given = cfg.rollout_num_gpus_per_engine, cfg.sglang
    groups, ep = given.get("dp_size") or 1 if given.get("enable_dp_attention") else 1, given.get("ep_size") or 1
    need(width % groups == 0 and width % ep == 0 and num_experts(c) % ep == 0, f"an engine of {width} GPUs cannot have "
         f"sglang's dp_size {groups} and ep_size {ep}; set both to divisors of its GPUs, and ep_size of the experts")
    tp, heads, kv = width // groups, c.num_attention_heads, c.num_key_value_heads
    ffn = 0 if all(layers_with_experts(c)) else c.intermediate_size
    need(heads % tp == 0 and (is_mla(c) or max(kv, tp) % min(kv, tp) == 0) and ffn % width == 0, f"an engine of {width} GPUs "
         f"cannot cut {heads} heads ({kv} of keys and values) over {tp} and ffn {ffn} over all; set another "
         "rollout_num_gpus_per_engine")
    if cfg.rollout_quantization:
        fp8.check_engine(c, width, groups, ep)
    need(cfg.rollout_quantization or not fp8.is_fp8(c),          # a plain weight would be cast into the engine's fp8 one
         "this is an fp8 model, and so would its engines be; set rollout_quantization='fp8', or write plain weights: "
         "python convert.py to-bf16")
    return tp


def nearest(cfg, c, gpu_bytes: float, settle) -> dict | None:
    """The changes to the settings that make it fit: fewest of them, then fewest GPUs; None: none of 16 x the GPUs does. An
    optimizer on the CPU, virtual stages and etp are not tried."""
    def holds_a_sample(width):
        with contextlib.suppress(ValueError):
            one = dataclasses.replace(cfg, rollout_num_gpus_per_engine=width)
            return not has_engines(cfg) or engine(one, c, gpu_bytes).samples >= 1
    powers, options = [1, 2, 4, 8, 16, 32, 64], []
    widths = [width for width in dict.fromkeys([cfg.rollout_num_gpus_per_engine, *powers]) if holds_a_sample(width)]
    for tp, pp, cp, ep, more, again, width in itertools.product(
            powers[:4], powers[:5], powers[:4], powers[:6], powers[:5], range(2), widths[:2]):
        gpus, each, own = cfg.actor_num_gpus * more, tp * pp * cp, cfg.critic_num_gpus
        if gpus % each or (num_experts(c) or 1) % ep:
            continue
        megatron = cfg.megatron | (RECOMPUTE if again else {})
        if pp != cfg.pipeline_model_parallel_size:
            megatron = {key: value for key, value in megatron.items() if "pipeline_stage" not in key}
            if c.num_hidden_layers % pp:
                megatron["num_layers_in_last_pipeline_stage"] = last_stage(c.num_hidden_layers, pp)
        new = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                   expert_model_parallel_size=ep, actor_num_gpus=gpus, critic_num_gpus=own and -(-own * more // each) * each,
                   megatron=megatron, sequence_parallel=tp > 1 and bool(cfg.sequence_parallel or num_experts(c)),
                   rollout_num_gpus=gpus if cfg.colocate else -(-cfg.rollout_num_gpus // width) * width,
                   rollout_num_gpus_per_engine=width)
        one = dataclasses.replace(cfg, **new)
        new = {key: value for key, value in new.items()          # colocated engines follow
               if getattr(cfg, key) != value and not (cfg.colocate and key == "rollout_num_gpus")}
        options.append((len(new), gpus + (one.critic_num_gpus or 0) + one.rollout_num_gpus, len(options), new, one))
    for *_, new, one in sorted(options, key=lambda option: option[:3]):
        with contextlib.suppress(ValueError):
            for validate in (validate_layout, validate_batch, validate_critic):
                validate(one)
            if not problems(settle(one, c, gpu_bytes), c, gpu_bytes):
                return new
    return None


# ---- Showing -----------------------------------------------------------------------------------------------------------
def dry_run(cfg, settle) -> str:
    """The plan of a run; settle: memory.share_memory."""
    gpu_bytes = gpu_bytes_of(cfg)
    if cfg.device == "cpu":
        return "no plan for a CPU; --device=cuda gives the one for GPUs"
    c, source = read_config(cfg)
    if c is None:
        return f"no plan: {source}"
    settled = cfg
    with contextlib.suppress(ValueError):    # a layout that cannot be; problems() says so
        settled = settle(cfg, c, gpu_bytes)
    return report(settled, cfg, c, source, gpu_bytes, settle)


def report(cfg: Config, asked: Config, c, source: str, gpu_bytes: float, settle) -> str:
    """The plan of a Config with its shared memory settled, for people; asked: as it was given."""
    ours, name = parameters(c), cfg.hf_checkpoint if isinstance(cfg.hf_checkpoint, str) else getattr(
        cfg.hf_checkpoint, "published", c.model_type)
    active = ours.total - ours.experts * (1 - c.num_experts_per_tok / num_experts(c)) if ours.experts else 0
    active = f", {active / 1e9:.2f} B of them for a token" if active else ""
    lines = [f"plan: {name}, {ours.total / 1e9:.2f} B parameters{active}; config.json from {source}"]
    bad = problems(cfg, c, gpu_bytes)
    with contextlib.suppress(ValueError):    # a layout that cannot be: `bad` says why
        if not cfg.debug_rollout_only:
            lines += report_trainer(cfg, trainer(cfg, c), bool(ours.experts), gpu_bytes)
        if has_engines(cfg):
            lines += report_engine(cfg, c, engine(cfg, c, gpu_bytes))
    if not bad:
        return "\n".join(lines + [f"  it fits {cfg.gpu_type}"])
    lines += [f"  DOES NOT FIT {cfg.gpu_type}: {problem}" for problem in bad]
    new = nearest(asked, c, gpu_bytes, settle)
    if new is None:
        return "\n".join(lines + [f"  no layout of up to {16 * cfg.actor_num_gpus} GPUs fits"])
    return "\n".join(lines + ["  the nearest layout that fits:"] + [f"    {key} = {value!r}" for key, value in new.items()])


def report_trainer(cfg, rank: Rank, experts: bool, gpu_bytes: float) -> list[str]:
    keys = dict(tp="tensor_model", pp="pipeline_model", cp="context", ep="expert_model", etp="expert_tensor")
    sizes = [f"{name} {getattr(cfg, key + '_parallel_size')}" for name, key in keys.items()]
    rest = ", the rest on the CPU" if cfg.megatron.get("optimizer_cpu_offload") else ""
    what = dict(weights=cfg.dtype, gradients="fp32", optimizer="fp32 main weights, two moments" + rest,
                activations=f"{micro_batch_tokens(cfg):,} tokens a micro-batch", logits="of one chunk")
    return [f"  trainers: {cfg.actor_num_gpus} GPU(s) = {' x '.join(sizes[:3])} x dp {dp_size(cfg)}"
            + (f"; experts over {', '.join(sizes[3:])}" if experts else ""),
            f"    the fullest rank, in stage {rank.stage}: {rank.layers} layers, {rank.parameters / 1e9:.2f} B parameters",
            *[f"    {key:12} {getattr(rank, key) / 1e9:8.1f} GB   {text}" for key, text in what.items()],
            f"    {'all':12} {rank.total / 1e9:8.1f} GB   of {gpu_bytes / 1e9:.0f}; for each GPU {rank.host / 1e9:.0f} GB "
            "of CPU memory"]


def report_engine(cfg, c, one: Engine) -> list[str]:
    width, share, rate = (cfg.rollout_num_gpus_per_engine, cfg.sglang.get("mem_fraction_static", ENGINE_SHARE),
                          SYNC_RATE.get(cfg.update_weight_transport))
    kind = cfg.rollout_quantization or {"bfloat16": "bf16"}.get(cfg.dtype, cfg.dtype)
    asked, sync = cfg.sglang.get("max_running_requests") or cfg.sglang_server_concurrency, model_bytes(cfg, c)
    return [f"  engines: {cfg.rollout_num_gpus // width}, each on {width} GPU(s)",
            f"    {'weights':12} {one.weights / 1e9:8.1f} GB   {kind}",
            f"    {'cache':12} {one.cache / 1e9:8.1f} GB   the rest of {share} of the GPU",
            f"    {one.token_bytes:,.0f} bytes a token and GPU: {one.tokens:,} tokens, {one.samples:.0f} samples of "
            f"{sample_tokens(cfg):,} at a time; up to {asked} are asked for"
            + ("" if cfg.rollout_max_prompt_len else " (prompts not counted)"),
            f"  weight sync: {sync / 1e9:.2f} GB {kind}"
            + (f", at least {sync / rate:.2f} s at {rate / 1e9:.0f} GB/s (within a node)" if rate else "")]
