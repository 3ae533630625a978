"""
convert.py: what is each weight called? One rule table per model family, read in both directions.

    HF folder --HFReader--> HF tensors --merge--> full Megatron tensor --shard--> one rank's parameter     (load)
    HF folder <--save_hf--- HF tensors <--split-- full Megatron tensor <-unshard- every TP rank's shard    (save, sync)
                                       ^^^^^^^^^^ the same rule in both directions

Run:   python convert.py check FOLDER      reads headers only, and accounts for every tensor and its shape
Test:  pytest tests/test_convert.py
Knows nothing about: Ray, SGLang, process groups, pipeline stages. `{i}` is always the GLOBAL layer number: model.py
       adds a stage's offset before it asks. Shards come in and go out as tensors; who gathers them is not our matter.
Shapes: V vocabulary, H hidden, F ffn, D head dim, A attention heads, G query groups (= kv heads), tp ranks.
Left out on purpose: reading a slice of a file per TP rank (each reads the whole tensor, from the page cache), .bin
       files (pickles run code), biases outside qkv, attention with a window (refused by name, never ignored).
"""

import argparse
import copy
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

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
    merge=lambda hf_tensors, cfg: torch.cat(hf_tensors),  # [F, H] x2 -> [2F, H]
    split=lambda full, cfg: full.chunk(2),  # two views [F, H]
    shard=lambda full, r, tp: cut(full.unflatten(0, (2, -1)), 1, r, tp).flatten(0, 1),  # [2F/tp, H]
    unshard=lambda parts: glue([part.unflatten(0, (2, -1)) for part in parts], 1).flatten(0, 1),  # [2F, H]
)

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
    load_only: bool = False  # this parameter is a second copy: read on load, nothing written on the way back


@dataclass(frozen=True)
class Family:
    model_type: str  # as in config.json
    architecture: str  # the class that config.json must name; a classifier or reward head is another architecture
    rules: Callable  # cfg -> list[Rule]
    fields: dict  # what sets this family apart in TransformerConfig
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


def layer(rules):
    """(Megatron name, HF names, kind) within a layer -> rules with the layer's name in front on both sides."""
    return [Rule("decoder.layers.{i}." + m, tuple("model.layers.{i}." + h for h in hf), k) for m, hf, k in rules]


ATTENTION = layer([
    ("input_layernorm.weight", ["input_layernorm.weight"], REPLICATED),
    ("self_attention.linear_qkv.weight", [f"self_attn.{x}_proj.weight" for x in "qkv"], QKV),
    ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ROW),
])
QKV_BIAS = layer([("self_attention.linear_qkv.bias", [f"self_attn.{x}_proj.bias" for x in "qkv"], QKV)])
QK_NORM = layer([
    ("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"], REPLICATED),  # [D], shared by all heads
    ("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"], REPLICATED),
])
MLP = layer([
    ("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], REPLICATED),
    ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], GATE_UP),
    ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ROW),
])

# Transformer Engine fuses a norm into the linear that follows and names it after that.
TE_ALIAS = {".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
            ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight"}

# What old or odd checkpoints carry beside the weights: derived values, never parameters.
BUFFERS = re.compile(r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)")

WINDOW = {"sliding_window", "max_window_layers"}  # mean nothing unless use_sliding_window is true, which is refused

# FORK POINT: a model family. Compose rule lists, say what differs in TransformerConfig and which keys of config.json
# the table understands; add a tiny config to CASES in tests/test_convert.py and run `python convert.py check FOLDER`.
FAMILIES = {f.model_type: f for f in [
    Family("qwen2", "Qwen2ForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + QKV_BIAS + MLP,
           dict(add_qkv_bias=True), WINDOW),
    Family("qwen3", "Qwen3ForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + QK_NORM + MLP,
           dict(qk_layernorm=True), WINDOW),
    Family("llama", "LlamaForCausalLM", lambda cfg: embeddings(cfg) + ATTENTION + MLP,
           dict(), set()),
]}

# ---------------------------------------------------------------------------------------------------------------------
# config.json: every key is turned into a Megatron field, refused, or known to change nothing

# Read by megatron_config or looked at by family().
HANDLED = set("""
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings rope_parameters
    layer_types architectures model_type""".split())
# Known to leave logits alone: bookkeeping, generation settings, labels of classifiers, marks of the saving tool.
# So are names that begin with "_" or end in "_token_id".
INERT = set("""
    transformers_version dtype torch_dtype use_cache return_dict output_hidden_states output_attentions
    is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type attn_implementation tokenizer_class
    pretraining_tp is_llama_config transformers.js_config unsloth_fixed unsloth_version""".split())
MUST_BE_OFF = dict(
    use_sliding_window="only full attention is covered; set it to false if your sequences stay below the window",
    attention_bias="the table has no rule for these biases; add rules in convert.py",
    mlp_bias="the table has no rule for these biases; add rules in convert.py",
    attention_dropout="dropout makes the trainer's log-probs random; set it to 0.0 in config.json",
    quantization_config="training needs plain weights; give the unquantized checkpoint",
)


def load_hf_config(path_or_hub_name):
    """The transformers config of a local folder (preferred) or a hub name; ValueError says what to fix."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # heavy: seconds of import, so not at the top

    folder = model_folder(path_or_hub_name, SMALL_FILES)
    try:
        # before transformers sees it: our message names what works here
        lookup(json.loads((folder / "config.json").read_text()).get("model_type"))
        return AutoConfig.from_pretrained(folder)
    except (json.JSONDecodeError, OSError, StrictDataclassError) as e:
        raise ValueError(f"{folder}/config.json cannot be read ({e}); copy or download it again") from e


def family(hf_config) -> Family:
    """The table for this config. ValueError naming the first thing in config.json that Megatron would not be told."""
    fam, values = lookup(hf_config.model_type), hf_config.to_dict()

    def refuse(key, why):
        raise ValueError(f"config.json has {key} = {values.get(key)!r}: {why}")

    if values.get("architectures") and fam.architecture not in values["architectures"] and not has_value_head(hf_config):
        refuse("architectures", f"only {fam.architecture} is covered; give the causal language model")
    if has_value_head(hf_config) and hf_config.num_labels != 1:
        refuse("id2label", "a critic has one label, its value; give a reward model with num_labels=1")
    if values.get("hidden_act") != "silu":
        refuse("hidden_act", "only silu (gated) is covered; add the activation to megatron_config in convert.py")
    if set(values.get("layer_types") or []) - {"full_attention"}:
        refuse("layer_types", "only full attention is covered; use a model whose layers all have it")
    if hf_config.num_attention_heads % hf_config.num_key_value_heads:
        refuse("num_key_value_heads", f"it does not divide the {hf_config.num_attention_heads} heads; fix config.json")
    for key, why in MUST_BE_OFF.items():
        if values.get(key):
            refuse(key, why)
    refuse_rope(hf_config.rope_parameters or {}, refuse)
    for key, value in values.items():
        off = value is None or value is False or value in ("", [], {})
        known = key in HANDLED | INERT | MUST_BE_OFF.keys() | fam.handled or key.startswith("_")
        if not off and not known and not key.endswith("_token_id"):
            refuse(key, f"convert.py does not know this key for {fam.model_type}; if it leaves the logits alone, add "
                   "it to INERT in convert.py, else handle it in megatron_config")
    return fam


def lookup(model_type) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} has no rule table (there is: {', '.join(sorted(FAMILIES))}); "
                         "add a table in convert.py")
    return FAMILIES[model_type]


def refuse_rope(rope, refuse):
    # transformers 5 keeps everything about rope in config.rope_parameters, however old config.json is.
    kind = rope.get("rope_type")
    if kind not in ("default", "llama3"):  # yarn, longrope, linear, dynamic, or one dict per layer type (kind is None)
        refuse("rope_parameters", f"rope type {kind!r} is not covered (default and llama3 are); remove rope_scaling "
               "from config.json if your sequences stay within the original length")
    extra = set(rope) - {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
                         "original_max_position_embeddings"}
    if extra:  # such as partial_rotary_factor, which transformers' own code of these families ignores
        refuse("rope_parameters", f"{sorted(extra)} not covered; remove them from config.json if they change nothing")


def rope_frequencies(hf_config):
    """(angle per position [D/2], factor on cos and sin), as transformers computes them for this config."""
    rope, width = hf_config.rope_parameters, head_dim_of(hf_config)
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, torch.device("cpu"))


def megatron_config(hf_config) -> tuple[dict, dict]:
    """(TransformerConfig fields, GPTModel arguments) that rebuild the architecture; nothing about precision or speed.

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
    return fields | fam.fields, gpt_kwargs


def head_dim_of(cfg) -> int:
    # Qwen2's config has no head_dim unless config.json names it; Llama's and Qwen3's always do.
    return getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads


def check_tp(hf_config, tp_size: int):
    """ValueError if the model does not divide by tp_size. Call it before anything is built."""
    groups, ffn = hf_config.num_key_value_heads, hf_config.intermediate_size  # heads are a multiple of groups
    if groups % tp_size:  # Megatron can replicate kv heads where G < tp, but then a shard is no cut of the whole
        raise ValueError(f"{groups} kv heads (num_query_groups) cannot be cut over tp {tp_size}; set "
                         f"tensor_model_parallel_size to a divisor of {groups}; use pp, cp or dp for the other GPUs")
    if ffn % tp_size:
        raise ValueError(f"ffn size {ffn} is no multiple of tp {tp_size}; set tensor_model_parallel_size to a divisor")


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
        if rule.megatron == pattern and (i is None or i < hf_config.num_hidden_layers):
            return rule, i
    raise KeyError(f"no rule of {hf_config.model_type} ({hf_config.num_hidden_layers} layers) covers the Megatron "
                   f"parameter {megatron_name!r}; add one in convert.py, or do not ask for it")


def to_megatron(hf_config, megatron_name, get_hf_tensor, tp_rank: int, tp_size: int) -> Tensor:
    """One rank's shard of one parameter, from `get_hf_tensor(name) -> Tensor` (an HFReader, or a dict's __getitem__).

    Keeps the checkpoint's dtype and may be a view: copy it into the parameter, compare the shapes first.
    """
    check_tp(hf_config, tp_size)
    rule, i = find_rule(hf_config, megatron_name)
    full = rule.kind.merge([get_hf_tensor(name.format(i=i)) for name in rule.hf], hf_config)
    return rule.kind.shard(full, tp_rank, tp_size)


def to_hf(hf_config, megatron_name, shards: list[Tensor]) -> list[tuple[str, Tensor]]:
    """(HF name, tensor) pairs of one parameter from all its TP shards in rank order; on the shards' device.

    Empty for a tied output layer (the embedding speaks for it). No communication happens here. The tensors may be
    views of the shards: at tp 1 only q, k and v are copied.
    """
    rule, i = find_rule(hf_config, megatron_name)
    if rule.load_only:
        return []
    full = rule.kind.unshard([shard.detach() for shard in shards])  # parameters may come in, no graph goes out
    tensors = rule.kind.split(full, hf_config)
    return [(name.format(i=i), tensor) for name, tensor in zip(rule.hf, tensors, strict=True)]


def hf_names(hf_config) -> set[str]:
    """Every name that a complete checkpoint holds: no more, no fewer."""
    rules = [rule for rule in lookup(hf_config.model_type).rules(hf_config) if not rule.load_only]
    return {name.format(i=i) for rule in rules for name in rule.hf for i in range(hf_config.num_hidden_layers)}


def ignorable(hf_config, name: str) -> bool:
    """Names that a checkpoint may hold beyond hf_names: old buffers, and the stored twin of a tied embedding."""
    return bool(BUFFERS.fullmatch(name)) or (hf_config.tie_word_embeddings and name == "lm_head.weight")


def check_policy(hf_config):
    """ValueError for a critic or a reward model, which has no log-probs."""
    if has_value_head(hf_config):
        raise ValueError(f"config.json names {hf_config.architectures[0]}, a critic or a reward model; give a causal language "
                         "model as hf_checkpoint (and this one as critic=dict(hf_checkpoint=...), if you like)")


def check_critic(hf_config, folder, tp_size):
    """ValueError unless the folder's model can be the critic of a policy with this config: any size, the same tokens."""
    critic = HFReader(folder).hf_config
    check_tp(critic, tp_size)
    if critic.vocab_size != hf_config.vocab_size:
        raise ValueError(f"{folder} has a vocabulary of {critic.vocab_size}, the policy {hf_config.vocab_size}: a critic "
                         "reads the policy's tokens; give one with the same tokenizer")


def check_same_shape(hf_config, folder):
    """ValueError unless the folder's model (a reference, a teacher) fits into the trainer's layers."""
    other = load_hf_config(folder)
    check_policy(other)
    HFReader(folder, other)  # complete, undamaged
    for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "tie_word_embeddings", "rope_parameters", "rms_norm_eps"):
        if getattr(hf_config, key) != getattr(other, key):
            raise ValueError(f"{folder} has {key} = {getattr(other, key)}, the trained model {getattr(hf_config, key)}: both "
                             "are computed by the same trainers, so give a model of the same shape (a teacher of another "
                             "shape: opd_teacher_url)")


# ---------------------------------------------------------------------------------------------------------------------
# Folders

# What makes a model folder besides the weights. save_hf carries these over; code (*.py) and other files stay behind.
SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
               "vocab.*", "merges.txt", "chat_template*", "*.tiktoken"]
INDEX = "model.safetensors.index.json"


def model_folder(path_or_hub_name, patterns: list[str]) -> Path:
    """The local folder of a model: the path itself, or a hub name's snapshot with the files matching `patterns`."""
    from huggingface_hub import snapshot_download

    folder, why = Path(path_or_hub_name).expanduser(), "there is no such folder"
    # "name" or "owner/name" may be a hub name; anything that starts like a path or has more slashes is not
    if not folder.is_dir() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path_or_hub_name)):
        try:
            folder = Path(snapshot_download(str(path_or_hub_name), allow_patterns=patterns))
        except (OSError, ValueError) as e:  # no network, no such repository, not allowed
            why += f", and the hub did not give it ({type(e).__name__}: {str(e)[:200]})"
    if not (folder / "config.json").is_file():
        why = "the folder holds no config.json" if folder.is_dir() else why
        raise ValueError(f"model folder {path_or_hub_name} not found: {why}; give a folder with config.json or a hub "
                         "name you can reach")
    return folder


class HFReader:
    """Lazy access to the weights of a model folder. `reader(name)` reads one tensor; construction reads headers only.

    Whatever is wrong with the folder (a file missing or cut short, a name missing or unknown) is a ValueError at
    construction, so that a run stops before a GPU is touched and not on the last layer.
    """

    def __init__(self, path, hf_config=None):
        self.folder = model_folder(path, SMALL_FILES + ["*.safetensors", INDEX])
        self.hf_config = hf_config or load_hf_config(self.folder)
        family(self.hf_config)  # refuses a config.json that is not covered
        self.files = {}  # file name -> open safetensors handle: a memory map, no weights are read
        self.where = {}  # tensor name -> file name
        for file in self._weight_files():
            self.files[file] = self._open(file)
            for name in self.files[file].keys():
                self.where[name] = file
        # Every weight is accounted for: nothing missing, nothing unused.
        expected = hf_names(self.hf_config)
        unknown = [n for n in self.where if n not in expected and not ignorable(self.hf_config, n)]
        for what, names in (("lacks", expected - self.where.keys()), ("has unknown tensors", unknown)):
            if names:
                raise ValueError(f"{self.folder} {what}: {some(names)}; give a complete {self.hf_config.model_type} "
                                 "causal language model with the config.json that was saved with it")

    def __call__(self, name: str) -> Tensor:
        return self.files[self.where[name]].get_tensor(name)  # on the CPU, dtype as stored

    def num_parameters(self) -> int:
        """From the headers alone."""
        return sum(math.prod(self.files[self.where[name]].get_slice(name).get_shape()) for name in self.names())

    def names(self) -> list[str]:
        """The names to be used: exactly hf_names(hf_config), in the order of the files."""
        return [name for name in self.where if not ignorable(self.hf_config, name)]

    def _weight_files(self) -> list[str]:
        # Same order of preference as transformers. Other *.safetensors (Llama's consolidated.*) are not ours to read.
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        if not (self.folder / INDEX).is_file():
            raise ValueError(f"{self.folder} has neither model.safetensors nor {INDEX}; save the model again with "
                             "transformers' save_pretrained (it writes safetensors)")
        try:
            return sorted(set(json.loads((self.folder / INDEX).read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise ValueError(f"{self.folder}/{INDEX} is damaged ({e!r}); copy or download it again") from e

    def _open(self, file):
        from safetensors import SafetensorError, safe_open

        path = self.folder / file
        try:
            return safe_open(path, framework="pt")  # checks that the tensors fill the file exactly
        except (SafetensorError, OSError) as e:
            what = "damaged or cut short" if path.is_file() else f"missing, though {INDEX} names it"
            raise ValueError(f"{path} is {what} ({e}); copy or download it again") from e


def some(names) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def save_hf(path, source_path, hf_config, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = 5 * 10**9):
    """Write an HF folder from a stream of (name, tensor), any device. Call it on one process.

    Holds at most one shard of `max_shard_bytes` in host memory (or one tensor, if larger). Config and tokenizer files
    come from `source_path`. Everything is written into `path`.tmp and renamed at the end, so that a kill never leaves
    half a checkpoint under the final name. An older checkpoint there is replaced; any other folder is refused.
    """
    path, source = Path(path).absolute(), model_folder(source_path, SMALL_FILES)
    if path.resolve() == source.resolve() or (path.exists() and not (path / "config.json").is_file()):
        raise ValueError(f"{path} is the source model or not a checkpoint, so it is not replaced; give another path")
    tmp, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    if old.exists() and not path.exists():  # a save was killed between the two renames below
        old.rename(path)
    shutil.rmtree(tmp, ignore_errors=True)  # of a save that was killed
    shutil.rmtree(old, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        dtypes = write_shards(tmp, hf_config, tensors, max_shard_bytes)
        copy_small_files(source, tmp, dtypes, hf_config)
        if path.exists():  # a rename cannot replace a folder with files in it
            path.rename(old)
        tmp.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_shards(folder, hf_config, tensors, max_shard_bytes) -> set[torch.dtype]:
    """Stream tensors into model-0000k-of-0000n.safetensors and the index; returns the dtypes seen."""
    from safetensors.torch import save_file

    held, held_bytes = {}, 0  # the open shard
    weight_map, dtypes, total_bytes, n = {}, set(), 0, 1  # weight_map: name -> number of its shard, from 1
    for name, tensor in tensors:
        assert name not in weight_map, f"{name} was given twice to save_hf; to_hf gives it once, so look at the caller"
        nbytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + nbytes > max_shard_bytes:
            save_file(held, folder / f"{n}.part", metadata={"format": "pt"})
            held, held_bytes, n = {}, 0, n + 1
        # A copy even on the CPU: tensors may be views, or live in a buffer that the sender fills again.
        held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        held_bytes, total_bytes, weight_map[name] = held_bytes + nbytes, total_bytes + nbytes, n
        dtypes.add(tensor.dtype)
    save_file(held, folder / f"{n}.part", metadata={"format": "pt"})

    missing, extra = hf_names(hf_config) - weight_map.keys(), weight_map.keys() - hf_names(hf_config)
    assert not missing and not extra, (f"save_hf got {len(weight_map)} tensors; missing: {some(missing)}; extra: "
                                       f"{some(extra)}; let every pipeline stage send, with global layer numbers")
    # Only now is the number of files known, which transformers' naming wants in every name.
    final = ["model.safetensors"] if n == 1 else [f"model-{k:05d}-of-{n:05d}.safetensors" for k in range(1, n + 1)]
    for k, file in enumerate(final, start=1):
        (folder / f"{k}.part").rename(folder / file)
    if n > 1:
        files = {name: final[k - 1] for name, k in weight_map.items()}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    return dtypes


def copy_small_files(source, folder, dtypes, hf_config):
    """Carry config and tokenizer files over as they are, except that config.json names the dtype written, and a critic's what
    it is, though it began as a policy."""
    for file in source.iterdir():
        if file.is_file() and any(file.match(pattern) for pattern in SMALL_FILES):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    if len(dtypes) == 1:  # else leave it: transformers then loads in the dtype of the source model
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the name before transformers 5, and since
        config[key] = str(*dtypes).removeprefix("torch.")
    if has_value_head(hf_config):
        config |= {"architectures": hf_config.architectures, "tie_word_embeddings": False, "id2label": {"0": "LABEL_0"},
                   "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def check(folder) -> str:
    """Account for every tensor of a folder against the table and against transformers; a report, or ValueError."""
    from transformers import AutoModelForCausalLM

    hf_config = load_hf_config(folder)
    reader = HFReader(folder, hf_config)  # refuses unless names of the checkpoint == names of the table
    with torch.device("meta"):  # shapes as transformers itself would build them; takes no memory
        state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items() if not ignorable(hf_config, name)}
    odd = shapes.keys() ^ hf_names(hf_config)
    assert not odd, f"the {hf_config.model_type} table and transformers differ: {some(odd)}; fix the table"
    headers = {name: reader.files[reader.where[name]].get_slice(name) for name in reader.names()}
    found = {name: tuple(header.get_shape()) for name, header in headers.items()}
    wrong = [f"{name} {found[name]} instead of {shape}" for name, shape in shapes.items() if found[name] != shape]
    if wrong:
        raise ValueError(f"{folder} has tensors of another shape than its config.json implies: {some(wrong)}; "
                         "give the config.json that was saved with these weights")
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    dtypes = "/".join(sorted({header.get_dtype() for header in headers.values()}))  # "BF16", "F32"
    tied, ignored = "tied" if hf_config.tie_word_embeddings else "untied", len(reader.where) - len(found)
    return (f"family      {hf_config.model_type}: {hf_config.num_hidden_layers} layers, {tied} embeddings\n"
            f"parameters  {parameters:,} in {dtypes}\n"
            f"tensors     {len(found)} in {len(reader.files)} file(s): all covered, shapes right; {ignored} ignored")


def main():
    parser = argparse.ArgumentParser(description="Account for the weights of a model folder (reads headers only).")
    parser.add_argument("command", choices=["check"])
    parser.add_argument("folder", help="folder with config.json and *.safetensors, or a hub name")
    args = parser.parse_args()
    try:
        print(check(args.folder))
    except ValueError as e:  # a user's mistake: the message is enough, a traceback is not needed
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
