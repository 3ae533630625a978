"""
families.py: what is each weight called? One rule table per model family, read in both directions; and what config.json means.

    HF tensors --merge--> full Megatron tensor --shard--> one rank's parameter     (load)
    HF tensors <--split-- full Megatron tensor <-unshard- every rank's shard       (save, sync)
                 ^^^^^ the same rule in both directions
    config.json --family--> refused by name, or understood --megatron_config--> TransformerConfig fields

Test:  pytest tests/test_convert.py
Knows nothing about: Ray, SGLang, process groups, files. `{i}` is always the GLOBAL layer number: model.py adds a stage's
       offset before it asks. Shards come in and go out as tensors; who gathers them is not our matter.
Shapes: V vocabulary, H hidden, F ffn, D head dim, A attention heads, G query groups (= kv heads), tp ranks.
Left out on purpose: biases outside qkv, attention with a window (refused by name, never ignored).
"""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# Kinds: how the tensors of HF and of Megatron lie in each other. A kind is four functions and knows no names.
#
#   merge(hf_tensors, cfg) -> full          split(full, cfg) -> hf_tensors        its inverse, exactly (bits)
#   shard(full, tp_rank, tp_size) -> part   unshard(parts, in TP order) -> full   its inverse up to vocabulary padding
#
# All of them return views where the layout allows it, so treat what comes out as read-only.


@dataclass(frozen=True)
class Kind:
    merge: Callable
    split: Callable
    shard: Callable
    unshard: Callable


def cut(full, dim, tp_rank, tp_size):
    """Rank r's piece of tp equal pieces: a view, [.., size/tp, ..]."""
    size = full.shape[dim]
    assert size % tp_size == 0, f"dimension {dim} of {tuple(full.shape)} is no multiple of tp {tp_size}; see check_tp"
    return full.narrow(dim, tp_rank * (size // tp_size), size // tp_size)


def glue(parts, dim):
    # NOTE: a single part is passed through, so at tp 1 the weight sync copies nothing here.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def plain(shard, unshard):
    """A kind whose HF tensor and full Megatron tensor are the same one."""
    return Kind(lambda hf_tensors, cfg: hf_tensors[0], lambda full, cfg: [full], shard, unshard)


COLUMN = plain(lambda full, r, tp: cut(full, 0, r, tp), lambda parts: glue(parts, 0))  # [out/tp, in]
ROW = plain(lambda full, r, tp: cut(full, 1, r, tp), lambda parts: glue(parts, 1))  # [out, in/tp]
# Replicas hold the same bits by construction (same start, same all-reduced gradient). A caller need not even gather
# them: `rule.kind is REPLICATED` says so, and then one part is enough.
REPLICATED = plain(lambda full, r, tp: full, lambda parts: parts[0])


# --- qkv: Megatron fuses the three and sorts the rows by query group. With A/G = 2 query heads per kv head:
#
#     HF      q: q0 q1 q2 q3   k: k0 k1   v: v0 v1        each item is D rows
#     fused   q0 q1 k0 v0 | q2 q3 k1 v1                   one block of (A/G + 2) * D rows per group
#     tp 2    rank 0      | rank 1                        whole groups, so a plain cut along dim 0 does
#
# A bias is the same with no H dimension: `*rest` below is (H,) for a weight and () for a bias.


def merge_qkv(hf_tensors, cfg):
    blocks = [t.unflatten(0, (cfg.num_key_value_heads, -1)) for t in hf_tensors]  # [G, A/G*D, *rest], [G, D, *rest] x2
    return torch.cat(blocks, dim=1).flatten(0, 1)  # [(A + 2G) * D, *rest]


def split_qkv(full, cfg):
    groups, d = cfg.num_key_value_heads, head_dim_of(cfg)
    rows = [cfg.num_attention_heads // groups * d, d, d]  # of one block: A/G query heads, k, v
    blocks = full.unflatten(0, (groups, -1)).split(rows, dim=1)  # [G, rows, *rest], views
    return [block.flatten(0, 1) for block in blocks]  # [A*D, *rest], [G*D, *rest] x2; copies where G > 1


QKV = Kind(merge_qkv, split_qkv, COLUMN.shard, COLUMN.unshard)


# --- gate and up: Megatron fuses them into fc1, and every rank holds ITS gate above ITS up, so that silu(gate) * up
# needs no communication. A plain concat of the shards would therefore interleave the two:
#
#     full fc1 [2F, H]     tp 2, rank 0   rank 1       cat(rank 0, rank 1) = g0 u0 g1 u1    wrong
#     g0 g1 | u0 u1        g0 | u0        g1 | u1      cat over the middle dimension of [2, F/tp, H] = g0 g1 u0 u1

GATE_UP = Kind(
    merge=lambda hf_tensors, cfg: torch.cat(hf_tensors),  # [F, H] x2 or, fused in HF too (GLM-4), [2F, H] -> [2F, H]
    split=lambda full, cfg: full.chunk(2),  # two views [F, H]
    shard=lambda full, r, tp: cut(full.unflatten(0, (2, -1)), 1, r, tp).flatten(0, 1),  # [2F/tp, H]
    unshard=lambda parts: glue([part.unflatten(0, (2, -1)) for part in parts], 1).flatten(0, 1),  # [2F, H]
)
GATE_UP_FUSED = Kind(GATE_UP.merge, lambda full, cfg: [full], GATE_UP.shard, GATE_UP.unshard)

# --- latent attention: the narrow matrices of queries (where they have one) and of keys and values, one above the other.


def split_latent(full, cfg):
    rows = [cfg.q_lora_rank or 0, cfg.kv_lora_rank + cfg.qk_rope_head_dim]
    return [part for part in full.split(rows) if len(part)]  # [q_lora, H], [kv_lora + rope, H]; views


LATENT_DOWN = Kind(lambda hf_tensors, cfg: torch.cat(hf_tensors), split_latent, REPLICATED.shard, REPLICATED.unshard)

WHOLE = (REPLICATED, LATENT_DOWN)  # kinds of which every TP rank has all

# --- vocabulary: embedding and output layer, cut by rows after padding with zero rows to padded_vocab_size.
# NOTE: a zero row of the output layer gives the logit 0, not -inf. Whoever computes log-probs or entropy must mask the
# columns >= vocab_size of the padded logits, or the padding takes probability and every log-prob is off.
PAD_ROWS = 8  # rows per rank are a multiple of this: 16 bytes in bf16, what the fast matrix kernels ask for. Small, so
#               that the vocabularies of Qwen (151936 = 2^7 * 1187) and Llama 3 (128256 = 2^8 * 501) need none to tp 16


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding over all TP ranks: `vocab_size` rounded up to a multiple of PAD_ROWS * tp_size."""
    return -(-vocab_size // (PAD_ROWS * tp_size)) * PAD_ROWS * tp_size


def merge_vocab(hf_tensors, cfg):
    rows = hf_tensors[0].shape[0]
    if rows != cfg.vocab_size:  # seen after adding tokens: the tensor was resized, config.json was not
        raise ValueError(f"an embedding has {rows} rows, config.json says vocab_size {cfg.vocab_size}; save the model "
                         "again with transformers' save_pretrained, which writes both")
    return hf_tensors[0]


def split_vocab(full, cfg):
    assert full.shape[0] >= cfg.vocab_size, f"{full.shape[0]} rows < vocab_size {cfg.vocab_size}: pass every TP shard"
    return [full[: cfg.vocab_size]]  # [V, H], a view: the padding is cut


def shard_vocab(full, tp_rank, tp_size):
    rows = padded_vocab_size(full.shape[0], tp_size) // tp_size
    part = full[tp_rank * rows : (tp_rank + 1) * rows]  # a view; shorter, or empty, where the vocabulary has ended
    missing = rows - part.shape[0]
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part  # [V_padded/tp, H]


VOCAB = Kind(merge_vocab, split_vocab, shard_vocab, COLUMN.unshard)

# ---------------------------------------------------------------------------------------------------------------------
# Rules and families


@dataclass(frozen=True)
class Rule:
    megatron: str  # parameter name in GPTModel with the local layer spec; {i} is the global layer number
    hf: tuple[str, ...]  # names in the HF checkpoint, in the order that the kind's merge expects
    kind: Kind
    layers: str = "all"  # or those with a "dense" mlp, or those with experts: "moe"
    load_only: bool = False  # this parameter is a second copy: read on load, nothing written on the way back

    @property
    def of_experts(self) -> bool:
        """Whether HF names carry {e}, the expert's number: the rule is then about one expert's slice of the parameter."""
        return "{e}" in self.hf[0]


@dataclass(frozen=True)
class Family:
    model_type: str  # as in config.json
    architecture: str  # the class that config.json must name; a classifier or reward head is another architecture
    rules: Callable  # cfg -> list[Rule]
    fields: Callable  # cfg -> what sets this family apart in TransformerConfig
    handled: set  # keys of config.json that only this family's table understands


def embeddings(cfg):
    rules = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED),
    ]
    # NOTE: tied embeddings have no lm_head in HF. Megatron's output layer has no parameter of its own on one stage;
    # with pipeline stages the last one holds a copy of the embedding under this name: load it, never write it twice.
    if has_value_head(cfg):
        return rules + [Rule("output_layer.weight", (VALUE_HEAD,), REPLICATED)]
    head = "model.embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
    return rules + [Rule("output_layer.weight", (head,), VOCAB, load_only=cfg.tie_word_embeddings)]


# A critic, or a reward model: transformers' ...ForSequenceClassification with one label, whose head is [1, H].
VALUE_HEAD = "score.weight"


def has_value_head(cfg) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in cfg.architectures or ())


def value_config(cfg):
    """The config of a critic with the layers of this model."""
    cfg = copy.deepcopy(cfg)
    cfg.architectures = [lookup(cfg.model_type).architecture.replace("ForCausalLM", "ForSequenceClassification")]
    cfg.num_labels, cfg.tie_word_embeddings = 1, False
    return cfg


def layer(rules, layers="all"):
    """(Megatron name, HF names, kind) within a layer -> rules with the layer's name in front on both sides."""
    return [Rule("decoder.layers.{i}." + m, tuple("model.layers.{i}." + h for h in hf), k, layers) for m, hf, k in rules]


NORMS = layer([
    ("input_layernorm.weight", ["input_layernorm.weight"], REPLICATED),
    ("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], REPLICATED),
])
ATTENTION = NORMS + layer([
    ("self_attention.linear_qkv.weight", [f"self_attn.{x}_proj.weight" for x in "qkv"], QKV),
    ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ROW),
])
QKV_BIAS = layer([("self_attention.linear_qkv.bias", [f"self_attn.{x}_proj.bias" for x in "qkv"], QKV)])
QK_NORM = layer([
    ("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"], REPLICATED),  # [D], shared by all heads
    ("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"], REPLICATED),
])
MLP = layer([
    ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], GATE_UP),
    ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ROW),
], "dense")

# Mixture of experts. moe.py keeps all of a rank's experts in one parameter, fc1 [e, 2, F/etp, H] and fc2 [e, H, F/etp]; a
# rule is about one of them. The router is whole on every rank.
EXPERTS = layer([
    ("mlp.router.weight", ["mlp.gate.weight"], REPLICATED),
    ("mlp.experts.fc1", ["mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"], GATE_UP),
    ("mlp.experts.fc2", ["mlp.experts.{e}.down_proj.weight"], ROW),
], "moe")
EXPERT_BIAS = layer([("mlp.router.expert_bias", ["mlp.gate.e_score_correction_bias"], REPLICATED)], "moe")  # 2408.15664
SHARED_EXPERTS = layer([
    ("mlp.shared_experts.linear_fc1.weight", ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
     GATE_UP),
    ("mlp.shared_experts.linear_fc2.weight", ["mlp.shared_experts.down_proj.weight"], ROW),
], "moe")

# GLM-4: gate and up fused in HF too, and a second norm behind attention and mlp each, before the residual is added.
GLM4_MLP = layer([
    ("self_attention.post_layernorm.weight", ["post_self_attn_layernorm.weight"], REPLICATED),
    ("mlp.post_layernorm.weight", ["post_mlp_layernorm.weight"], REPLICATED),
    ("mlp.linear_fc1.weight", ["mlp.gate_up_proj.weight"], GATE_UP_FUSED),
    ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ROW),
])


def latent_attention(cfg):
    """DeepSeek's multi-head latent attention (2405.04434): through narrow matrices, whole on every rank, then wide ones, cut
    by heads."""
    # NOTE: one parameter for both narrow matrices, so that they are sent one after the other: see weights_sync.pack_buckets.
    narrow, wide = ["self_attn.kv_a_proj_with_mqa.weight"], ("linear_q_proj.weight", "q_proj.weight")
    norm = []
    if cfg.q_lora_rank is not None:
        narrow, wide = ["self_attn.q_a_proj.weight", *narrow], ("linear_q_up_proj.weight", "q_b_proj.weight")
        norm = [("self_attention.q_layernorm.weight", ["self_attn.q_a_layernorm.weight"], REPLICATED)]
    return NORMS + layer(norm + [
        ("self_attention.linear_down_proj.weight", narrow, LATENT_DOWN),
        (f"self_attention.{wide[0]}", [f"self_attn.{wide[1]}"], COLUMN),
        ("self_attention.kv_layernorm.weight", ["self_attn.kv_a_layernorm.weight"], REPLICATED),
        ("self_attention.linear_kv_up_proj.weight", ["self_attn.kv_b_proj.weight"], COLUMN),
        ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ROW),
    ])

# Transformer Engine fuses a norm into the linear that follows and names it after that.
TE_ALIAS = {".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
            ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight"}

# What old or odd checkpoints carry beside the weights: derived values, never parameters.
BUFFERS = re.compile(r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)")

WINDOW = {"sliding_window", "max_window_layers"}  # mean nothing unless use_sliding_window is true, which is refused
MTP = {"num_nextn_predict_layers"}  # layers that predict further tokens: see carried()
SOFTMAX_ROUTER = set("""num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers output_router_logits router_aux_loss_coef""".split())
SIGMOID_ROUTER = MTP | set("""n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size
    first_k_dense_replace moe_layer_freq n_group topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method
    aux_loss_alpha seq_aux ep_size""".split())  # the last three: of pretraining
LATENT = set("""q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave""".split())

# FORK POINT: a model family. Compose rule lists, say what differs in TransformerConfig and which keys of config.json
# the table understands; add a tiny config to CASES in tests/test_convert.py and run `python convert.py check FOLDER`.
FAMILIES = {f.model_type: f for f in [
    Family("qwen2", "Qwen2ForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + QKV_BIAS + MLP,
           lambda cfg: dict(add_qkv_bias=True), WINDOW),
    Family("qwen3", "Qwen3ForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + QK_NORM + MLP,
           lambda cfg: dict(qk_layernorm=True), WINDOW),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + QK_NORM + MLP + EXPERTS,
           lambda cfg: dict(qk_layernorm=True) | expert_fields(cfg), WINDOW | SOFTMAX_ROUTER),
    Family("llama", "LlamaForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + MLP,
           lambda cfg: dict(), set()),
    # GLM-4-9B-0414, GLM-Z1
    Family("glm4", "Glm4ForCausalLM",
           lambda cfg: embeddings(cfg) + ATTENTION + QKV_BIAS * cfg.attention_bias + GLM4_MLP,
           lambda cfg: dict(add_qkv_bias=cfg.attention_bias, sandwich_norm=True, rotary_interleaved=True),
           {"attention_bias", "partial_rotary_factor"}),
    # GLM-4.5, 4.6, 4.7
    Family("glm4_moe", "Glm4MoeForCausalLM",
           lambda cfg: (embeddings(cfg) + ATTENTION + QKV_BIAS * cfg.attention_bias + QK_NORM * cfg.use_qk_norm + MLP + EXPERTS
                        + EXPERT_BIAS + SHARED_EXPERTS),
           lambda cfg: dict(add_qkv_bias=cfg.attention_bias, qk_layernorm=cfg.use_qk_norm) | expert_fields(cfg),
           {"attention_bias", "partial_rotary_factor", "use_qk_norm"} | SIGMOID_ROUTER),
    # DeepSeek V3 and R1; Moonlight and Kimi K2 are the same architecture
    Family("deepseek_v3", "DeepseekV3ForCausalLM",
           lambda cfg: embeddings(cfg) + latent_attention(cfg) + MLP + EXPERTS + EXPERT_BIAS + SHARED_EXPERTS,
           lambda cfg: latent_fields(cfg) | expert_fields(cfg), LATENT | SIGMOID_ROUTER),
]}

# Other names for the same computation: model_type in config.json -> whose table, and under which class it is published.
ALIASES = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"), "mimo": ("qwen2", "MiMoForCausalLM")}


def has_experts(cfg, i: int) -> bool:
    """Whether layer i is one with experts."""
    if cfg.model_type == "qwen3_moe":
        return i not in (cfg.mlp_only_layers or ()) and (i + 1) % cfg.decoder_sparse_step == 0
    return hasattr(cfg, "n_routed_experts") and i >= cfg.first_k_dense_replace


def layers_with_experts(cfg) -> list[int]:
    """1 for each layer with experts, 0 for a dense one; Megatron's moe_layer_freq."""
    return [int(has_experts(cfg, i)) for i in range(cfg.num_hidden_layers)]


def num_experts(cfg) -> int:
    """Of one layer; 0 for a dense model."""
    return getattr(cfg, "n_routed_experts", None) or getattr(cfg, "num_experts", None) or 0


def shared_ffn(cfg) -> int:
    """Of all experts together that every token goes through; 0 where there are none."""
    return (getattr(cfg, "n_shared_experts", None) or 0) * (getattr(cfg, "moe_intermediate_size", None) or 0)


def expert_fields(cfg) -> dict:
    """TransformerConfig fields of a mixture of experts."""
    softmax = cfg.model_type == "qwen3_moe"
    fields = dict(
        num_moe_experts=num_experts(cfg), moe_router_topk=cfg.num_experts_per_tok,
        moe_ffn_hidden_size=cfg.moe_intermediate_size, moe_layer_freq=layers_with_experts(cfg),
        moe_router_score_function="softmax" if softmax else "sigmoid",
        # the pretrained balance stays: no auxiliary loss, and the bias moves only where the run file sets a rate
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_router_bias_update_rate=0.0)
    if softmax:
        return fields | dict(moe_router_pre_softmax=not cfg.norm_topk_prob)  # normalised over the chosen = softmax of them
    groups = dict(moe_router_num_groups=cfg.n_group, moe_router_group_topk=cfg.topk_group) if cfg.n_group > 1 else {}
    return fields | groups | dict(moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=cfg.routed_scaling_factor,
                                  moe_shared_expert_intermediate_size=shared_ffn(cfg) or None)


def latent_fields(cfg) -> dict:
    """Fields of layers.LayerConfig for multi-head latent attention."""
    # NOTE: transformers normalises the narrow states with eps 1e-6 whatever rms_norm_eps says; SGLang, whose samples we train
    # on, with rms_norm_eps. The two differ for Moonlight only (1e-5).
    return dict(q_lora_rank=cfg.q_lora_rank, kv_lora_rank=cfg.kv_lora_rank, qk_nope_head_dim=cfg.qk_nope_head_dim,
                qk_rope_head_dim=cfg.qk_rope_head_dim, v_head_dim=cfg.v_head_dim, rotary_interleaved=cfg.rope_interleave,
                # only counted with (train_flops): q k^T and p v are products over qk and v dimensions
                kv_channels=(cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim) // 2,
                softmax_scale=yarn_scale(cfg) / (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)**0.5)


def yarn_scale(cfg) -> float:
    """What DeepSeek multiplies attention scores with where rope was stretched by yarn (2309.00071, sec. 3.4)."""
    rope = cfg.rope_parameters
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return (0.1 * rope["mscale_all_dim"] * math.log(max(rope["factor"], 1.0)) + 1.0)**2

# ---------------------------------------------------------------------------------------------------------------------
# config.json: every key is turned into a Megatron field, refused, or known to change nothing

# Read by megatron_config or looked at by family().
HANDLED = set("""
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings rope_parameters
    layer_types architectures model_type quantization_config""".split())  # the last: fp8.is_fp8
# Known to leave logits alone: bookkeeping, generation settings, labels of classifiers, marks of the saving tool.
# So are names that begin with "_" or end in "_token_id".
INERT = set("""
    transformers_version dtype torch_dtype use_cache return_dict output_hidden_states output_attentions
    is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type attn_implementation tokenizer_class
    pretraining_tp is_llama_config auto_map transformers.js_config unsloth_fixed unsloth_version""".split())
MUST_BE_OFF = dict(
    use_sliding_window="only full attention is covered; set it to false if your sequences stay below the window",
    attention_bias="the table has no rule for these biases; add rules in families.py",
    mlp_bias="the table has no rule for these biases; add rules in families.py",
    attention_dropout="dropout makes the trainer's log-probs random; set it to 0.0 in config.json",
)


def family(hf_config) -> Family:
    """The table for this config. ValueError naming the first thing in config.json that Megatron would not be told."""
    fam, values = lookup(hf_config.model_type), hf_config.to_dict()

    def refuse(key, why):
        raise ValueError(f"config.json has {key} = {values.get(key)!r}: {why}")

    names = {fam.architecture} | {published for whose, published in ALIASES.values() if whose == fam.model_type}
    if values.get("architectures") and not names & set(values["architectures"]) and not has_value_head(hf_config):
        refuse("architectures", f"only {fam.architecture} is covered; give the causal language model")
    if has_value_head(hf_config) and hf_config.num_labels != 1:
        refuse("id2label", "a critic has one label, its value; give a reward model with num_labels=1")
    if values.get("hidden_act") != "silu":
        refuse("hidden_act", "only silu (gated) is covered; add the activation to megatron_config in families.py")
    if set(values.get("layer_types") or []) - {"full_attention"}:
        refuse("layer_types", "only full attention is covered; use a model whose layers all have it")
    if hf_config.num_attention_heads % hf_config.num_key_value_heads:
        refuse("num_key_value_heads", f"it does not divide the {hf_config.num_attention_heads} heads; fix config.json")
    for key, why in MUST_BE_OFF.items():
        if values.get(key) and key not in fam.handled:
            refuse(key, why)
    refuse_router(hf_config, fam, refuse)
    refuse_rope(hf_config.rope_parameters or {}, fam, refuse)
    for key, value in values.items():
        off = value is None or value is False or value in ("", [], {})
        known = key in MTP | HANDLED | INERT | MUST_BE_OFF.keys() | fam.handled or key.startswith("_")
        if not off and not known and not key.endswith("_token_id"):
            refuse(key, f"families.py does not know this key for {fam.model_type}; if it leaves the logits alone, add "
                   "it to INERT in families.py, else handle it in megatron_config")
    return fam


def lookup(model_type) -> Family:
    whose = ALIASES.get(model_type, (model_type,))[0]
    if whose not in FAMILIES:
        known = ", ".join(sorted({**FAMILIES, **ALIASES}))
        raise ValueError(f"model_type {model_type!r} has no rule table; give a model of one of these: {known}; or add a table "
                         "in families.py" if model_type else "config.json names no model_type; copy or download it again")
    return FAMILIES[whose]


def refuse_router(cfg, fam, refuse):
    if fam.model_type == "qwen3_moe" and not all(layers_with_experts(cfg)):
        refuse("mlp_only_layers" if cfg.mlp_only_layers else "decoder_sparse_step", "SGLang gives every layer of this family "
               "experts; only models that have them everywhere are covered")
    if "n_group" not in fam.handled:
        return
    must = dict(scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, moe_layer_freq=1)
    for key, value in must.items():
        if getattr(cfg, key, value) != value:
            refuse(key, f"only {value!r} is covered; extend expert_fields in families.py")
    if cfg.num_experts_per_tok == 1:
        refuse("num_experts_per_tok", "Megatron does not normalise the weight of a single expert; 2 or more are covered")
    if cfg.n_group > 1 and cfg.num_experts_per_tok != 2 * cfg.topk_group:
        refuse("topk_group", "a group counts by its two best experts, and Megatron's by its share of num_experts_per_tok: the "
               "two are the same for num_experts_per_tok = 2 * topk_group only")
    if (fam.model_type == "glm4_moe" or cfg.q_lora_rank is None) and getattr(cfg, "n_shared_experts", 1) is None:
        refuse("n_shared_experts", "a number is needed; set it to 0 for none")


def refuse_rope(rope, fam, refuse):
    # transformers 5 keeps everything about rope in config.rope_parameters, however old config.json is.
    kind = rope.get("rope_type")
    covered = ["default", "yarn"] if fam.handled >= LATENT else ["default", "llama3"]
    if kind not in covered:  # longrope, linear, dynamic, or one dict per layer type (kind is None)
        refuse("rope_parameters", f"rope type {kind!r} is not covered ({' and '.join(covered)} are); remove rope_scaling "
               "from config.json if your sequences stay within the original length")
    extra = set(rope) - {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
                         "original_max_position_embeddings"} - fam.handled
    if kind == "yarn":
        extra -= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if extra:  # such as partial_rotary_factor, which transformers' own code of these families ignores
        refuse("rope_parameters", f"{sorted(extra)} not covered; remove them from config.json if they change nothing")


def rope_frequencies(hf_config):
    """(angle per position [D/2], factor on cos and sin), as transformers computes them for this config. D: the dimensions of a
    head that turn; the others come behind them, and stay."""
    rope, width = hf_config.rope_parameters, getattr(hf_config, "qk_rope_head_dim", None) or head_dim_of(hf_config)
    width = int(width * (rope.get("partial_rotary_factor") or 1.0))
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, torch.device("cpu"))


def megatron_config(hf_config) -> tuple[dict, dict]:
    """(layers.LayerConfig fields, GPTModel arguments) that rebuild the architecture; nothing about precision or speed.

    `vocab_size` is the real one: the caller builds GPTModel with padded_vocab_size(vocab_size, tp_size), and keeps the
    real one for masking the padded logits.
    """
    fam = family(hf_config)
    fields = dict(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim_of(hf_config),  # set always: Qwen3-0.6B has 16 heads of 128 in a hidden size of 1024
        normalization="RMSNorm", layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False,  # fam.fields overrule them
        attention_dropout=0.0, hidden_dropout=0.0,  # NOTE: Megatron's default is 0.1 for both
        init_method_std=hf_config.initializer_range,  # seen only by weights that no checkpoint fills
    )
    gpt_kwargs = dict(
        vocab_size=hf_config.vocab_size, max_sequence_length=hf_config.max_position_embeddings,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",  # rotary angles are rope_frequencies, applied in the attention
    )
    return fields | fam.fields(hf_config), gpt_kwargs


def head_dim_of(cfg) -> int:
    # Qwen2's config has no head_dim unless config.json names it; Llama's and Qwen3's always do.
    return getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads


def check_tp(hf_config, tp_size: int, ep_size: int = 1, etp_size: int = 1):
    """ValueError if the model does not divide by these sizes. Call it before anything is built."""
    groups, experts = hf_config.num_key_value_heads, num_experts(hf_config)  # heads are a multiple of groups
    if groups % tp_size:  # Megatron can replicate kv heads where G < tp, but then a shard is no cut of the whole
        raise ValueError(f"{groups} kv heads (num_query_groups) cannot be cut over tp {tp_size}; set "
                         f"tensor_model_parallel_size to a divisor of {groups}; use pp, cp or dp for the other GPUs")
    for ffn in (hf_config.intermediate_size, shared_ffn(hf_config)):
        if ffn % tp_size:
            raise ValueError(f"ffn size {ffn} is no multiple of tp {tp_size}; set tensor_model_parallel_size to a divisor of "
                             "it")
    if not experts and ep_size * etp_size > 1:
        raise ValueError(f"{hf_config.model_type} has no experts; remove expert_model_parallel_size={ep_size} and "
                         f"expert_tensor_parallel_size={etp_size}")
    if experts % ep_size:
        raise ValueError(f"{experts} experts cannot be dealt to ep {ep_size}; set expert_model_parallel_size to a divisor")
    if experts and hf_config.moe_intermediate_size % etp_size:
        raise ValueError(f"an expert's ffn size {hf_config.moe_intermediate_size} is no multiple of etp {etp_size}; set "
                         "expert_tensor_parallel_size to a divisor")


def check_stages(hf_config, cfg):
    """ValueError if the layers cannot be dealt to the pipeline stages as the run file says."""
    pp, vpp = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size or 1
    layers = hf_config.num_hidden_layers
    ends = [f"num_layers_in_{which}_pipeline_stage" for which in ("first", "last")]
    given = [cfg.megatron[end] for end in ends if cfg.megatron.get(end) is not None]
    rest, stages = layers - sum(given), pp - len(given)
    uneven = rest % stages or rest < stages if stages > 0 else rest != 0     # and no stage without a layer
    if stages < 0 or uneven or min(given, default=1) < 1:
        remedy = ("remove num_layers_in_..._pipeline_stage" if layers % pp == 0 else f"set pipeline_model_parallel_size to at "
                  f"most {layers}" if layers < pp else f"set megatron=dict({ends[1]}={last_stage(layers, pp)})")
        raise ValueError(f"{layers} layers cannot be dealt to pp {pp} stages ({rest} over {stages} of them); {remedy}")
    if any(n % vpp for n in [*given, *([rest // stages] if stages else [])]):
        raise ValueError(f"a stage's layers are no multiple of virtual_pipeline_model_parallel_size={vpp}; set it to a "
                         "divisor")


def last_stage(layers: int, pp: int) -> int:
    """Layers of the last stage where all others have equally many, so that the largest stage is as small as can be, and then
    the last one, which has the logits too."""
    each = -(-layers // pp)
    each -= each * (pp - 1) >= layers
    return layers - each * (pp - 1)


# ---------------------------------------------------------------------------------------------------------------------
# The table, read in both directions


def find_rule(hf_config, megatron_name: str) -> tuple[Rule, int | None]:
    """The rule of one parameter, and its global layer number (None outside the layers). KeyError if none covers it."""
    # Only a lookup, cheap enough for a weight sync: megatron_config checked the config before any parameter existed.
    for te, local in TE_ALIAS.items():
        megatron_name = megatron_name.replace(te, local)
    number = re.match(r"decoder\.layers\.(\d+)\.", megatron_name)
    i = int(number[1]) if number else None
    pattern = megatron_name if i is None else megatron_name.replace(f".{i}.", ".{i}.", 1)
    for rule in lookup(hf_config.model_type).rules(hf_config):
        if rule.megatron == pattern and (i is None or covers(rule, hf_config, i)):
            return rule, i
    raise KeyError(f"no rule of {hf_config.model_type} ({hf_config.num_hidden_layers} layers) covers the Megatron "
                   f"parameter {megatron_name!r}; add one in families.py, or do not ask for it")


def covers(rule: Rule, hf_config, i: int) -> bool:
    """Whether the rule is about layer i."""
    return i < hf_config.num_hidden_layers and (rule.layers == "all" or has_experts(hf_config, i) == (rule.layers == "moe"))


def to_megatron(hf_config, megatron_name, get_hf_tensor, tp_rank: int, tp_size: int, expert: int | None = None) -> Tensor:
    """One rank's shard of one parameter, from `get_hf_tensor(name) -> Tensor` (an HFReader, or a dict's __getitem__).

    Of an experts' parameter: the shard of one expert, by its global number, and tp is the experts' own.
    Keeps the checkpoint's dtype and may be a view: copy it into the parameter, compare the shapes first.
    """
    rule, i = find_rule(hf_config, megatron_name)
    full = rule.kind.merge([get_hf_tensor(name.format(i=i, e=expert)) for name in rule.hf], hf_config)
    return rule.kind.shard(full, tp_rank, tp_size)


def to_hf(hf_config, megatron_name, shards: list[Tensor], expert: int | None = None) -> list[tuple[str, Tensor]]:
    """(HF name, tensor) pairs of one parameter from all its TP shards in rank order; on the shards' device.

    Empty for a tied output layer (the embedding speaks for it). No communication happens here. The tensors may be
    views of the shards: at tp 1 only q, k and v are copied.
    """
    rule, i = find_rule(hf_config, megatron_name)
    if rule.load_only:
        return []
    full = rule.kind.unshard([shard.detach() for shard in shards])  # parameters may come in, no graph goes out
    tensors = rule.kind.split(full, hf_config)
    return [(name.format(i=i, e=expert), tensor) for name, tensor in zip(rule.hf, tensors, strict=True)]


def hf_names(hf_config) -> set[str]:
    """Every name that a complete checkpoint holds: no more, no fewer."""
    names = set()
    for rule in lookup(hf_config.model_type).rules(hf_config):
        if not rule.load_only:
            experts = range(num_experts(hf_config)) if rule.of_experts else [None]
            layers = [i for i in range(hf_config.num_hidden_layers) if covers(rule, hf_config, i)]
            names |= {name.format(i=i, e=e) for name in rule.hf for i in layers for e in experts}
    return names


def carried(hf_config, name: str) -> bool:
    """Weights that a checkpoint may hold beside those of hf_names, that nothing here computes with, and that a saved model
    must have too: layers that predict further tokens (multi-token prediction, 2412.19437), as drafts for an engine. They keep
    their values while the model learns."""
    number = re.match(r"model\.(?:mtp_layers\.|layers\.(\d+)\.)", name)
    extra = getattr(hf_config, "num_nextn_predict_layers", None) or 0
    last = hf_config.num_hidden_layers
    return bool(number and extra and (number[1] is None or last <= int(number[1]) < last + extra))


def ignorable(hf_config, name: str) -> bool:
    """Names that a checkpoint may hold beyond hf_names: old buffers, and the stored twin of a tied embedding."""
    return bool(BUFFERS.fullmatch(name)) or (hf_config.tie_word_embeddings and name == "lm_head.weight")


def check_policy(hf_config):
    """ValueError for a critic or a reward model, which has no log-probs."""
    if has_value_head(hf_config):
        raise ValueError(f"config.json names {hf_config.architectures[0]}, a critic or a reward model; give a causal language "
                         "model as hf_checkpoint (and this one as critic=dict(hf_checkpoint=...), if you like)")
