"""
layers.py: what is a transformer layer made of? Megatron's own parts, and those that its local layer spec lacks.

    config --block_spec--> (norm, linear_qkv, PackedAttention, linear_proj, norm, linear_fc1, SwiGLU, linear_fc2) * L
    query, key, value [T, heads, D] --turn by the token's angle--> causal attention within each sequence --> [T, A * D]
    DeepSeek's layers have LatentAttention in linear_qkv's place, those with experts moe.py in the mlp's

With context parallelism (cp) each sequence is cut into 2 cp chunks, and rank r holds the chunks r and 2 cp - 1 - r, a zigzag:
a token attends to all before it, so this way every rank has the same work. Ranks gather each other's keys and values (they
are few heads, so this is little) and attend from their own queries:

    cp 2, a sequence of 8 tokens    0 1 | 2 3 | 4 5 | 6 7      rank 0: 0 1 6 7    rank 1: 2 3 4 5

No Transformer Engine needed: Megatron's local spec lacks two things, and its spec system takes ours instead, a norm that knows
sequence parallelism and an attention that takes packed sequences. What would be five kernels on a GPU, each reading and
writing all tokens, torch.compile fuses into one (`logprobs.fused`). With transformer_impl="transformer_engine" in `megatron`
the layers are Transformer Engine's; in benchmarks/h200.md the two stand side by side.

Test:  pytest tests/test_model.py tests/test_gpu.py
Knows nothing about: optimizers, micro-batches, losses, checkpoints.
Shapes: T packed tokens, A attention heads, G key and value heads, D their width, H hidden, tp tensor-parallel ranks.
"""
import dataclasses
import functools
import importlib.util
import logging
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region,
                                           gather_from_sequence_parallel_region)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

import logprobs
import moe


@dataclass
class LayerConfig(TransformerConfig):
    """Megatron's config, and what its local layers do not know."""
    sandwich_norm: bool = False              # a second norm behind attention and mlp each (GLM-4)
    kv_lora_rank: int = 0                    # > 0: latent attention, see there
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass
class Packing(PackedSeqParams):
    """What the layers must know of a micro-batch beside its hidden states; see pack_for. T: tokens on this cp rank."""
    cos: Tensor | None = None                # [T, 1, D/2] of each token's position
    sin: Tensor | None = None
    key_index: Tensor | None = None          # cp: [K] of the gathered keys, in the order of cu_seqlens_kv
    real: Tensor | None = None               # [T or, with sequence parallelism, T/tp] not padding
    experts: Tensor | None = None            # [as real, L, k] that the routers must take; -1: their own choice
    recorded: Tensor | None = None           # [as real, L, k] where they write down what they took
    load: Tensor | None = None               # [L, E] where they count tokens


def check(cfg) -> None:
    """The settings in `megatron` that concern this file, before anything is started."""
    impl = cfg.megatron.get("transformer_impl", "local")
    if impl not in ("local", "transformer_engine"):
        raise ValueError(f"megatron: transformer_impl={impl!r} is unknown; use 'local' (the default) or 'transformer_engine'")
    if impl != "local" and not (cfg.device == "cuda" and HAVE_TE):
        raise ValueError("megatron: transformer_impl='transformer_engine' needs device='cuda' and Transformer Engine: "
                         "pip install --no-build-isolation 'transformer_engine[pytorch]==2.12.0'; or leave it out")
    if impl != "local" and cfg.deterministic:
        raise ValueError("deterministic needs our own layers; leave megatron's transformer_impl out")
    if {"fp8", "fp4"} & set(cfg.megatron):
        raise ValueError("megatron: training in fp8 or fp4 is not covered, checkpoints would lack its scales; remove it")
    if "moe" in cfg.megatron.get("recompute_modules", ()):
        raise ValueError("megatron: recompute_modules=['moe'] would compute experts again for another micro-batch's routes; "
                         "use recompute_granularity='full'")
    for name in {"moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor"} & set(cfg.megatron):
        raise ValueError(f"megatron: {name} is of pretraining, where experts must first find their balance; remove it. What "
                         "moves routers' biases against an imbalance, where a family has them (GLM-4.5, DeepSeek, Kimi): "
                         "megatron=dict(moe_router_bias_update_rate=1e-3)")
    for name in {"moe_token_dispatcher_type", "moe_permute_fusion", "moe_shared_expert_overlap",
                 "moe_router_padding_for_quantization"} & set(cfg.megatron):
        raise ValueError(f"megatron: {name} is for Megatron's own dispatchers, and moe.py has another; remove it")
    for name in {"attention_dropout", "hidden_dropout", "window_size", "softmax_type"} & set(cfg.megatron):
        raise ValueError(f"megatron: {name} would make the trainer's model another than the engine's, which reads config.json "
                         "and has no dropout; remove it")


def block_spec(config: LayerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the norm after the last of all, for Megatron to build."""
    if config.transformer_impl == "transformer_engine":
        if config.num_moe_experts or config.kv_lora_rank or config.sandwich_norm or config.context_parallel_size > 1:
            raise ValueError("megatron: transformer_impl='transformer_engine' is for dense models without context "
                             "parallelism; leave it out")
        from megatron.core.extensions.transformer_engine import TENorm as norm
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layer.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
    else:
        norm = Norm
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if config.sandwich_norm:             # Megatron warns of an mlp class that it does not know, once for each layer
            logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
            layer.submodules.self_attention.module, layer.submodules.mlp.module = NormedAttention, NormedMLP
        if config.kv_lora_rank:
            layer.submodules.self_attention = LatentAttention
    count, first = get_num_layers_to_build(config, vp_stage), get_transformer_layer_offset(config, vp_stage)
    specs = [layer] * count
    if config.num_moe_experts:
        submodules = dataclasses.replace(layer.submodules, mlp=moe.spec(config))
        with_experts = ModuleSpec(module=LayerWithExperts, submodules=submodules)
        specs = [with_experts if has else layer for has in config.moe_layer_freq[first:first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


class LayerWithExperts(TransformerLayer):
    """Tells the router which micro-batch it sees: also where the layer is computed again in a backward pass, in which other
    micro-batches came between."""

    def forward(self, *args, packed_seq_params=None, **kwargs):
        self.mlp.router.packing = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


# ---- A micro-batch, as the layers see it -------------------------------------------------------------------------------
def zigzag(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the T packed tokens a context-parallel rank holds, in its order. Each sequence is a multiple of 2 cp long.

    cu_seqlens [S+1] -> index [T/cp]; and of its 2 S chunks, one after the other, the lengths [2S] and the lengths of all that
    is before their ends in their sequence [2S]: what they attend to.
    """
    starts, chunks = cu_seqlens[:-1].long(), cu_seqlens.diff().long() // (2 * cp_size)            # [S], [S]
    which = torch.tensor([cp_rank, 2 * cp_size - 1 - cp_rank], device=cu_seqlens.device)          # [2]
    begin = (starts[:, None] + which * chunks[:, None]).flatten()                                 # [2S]
    lengths = chunks.repeat_interleave(2)                                                         # [2S]
    return spans(begin, lengths), lengths, ((which + 1) * chunks[:, None]).flatten()


def spans(begin: Tensor, lengths: Tensor) -> Tensor:
    """begin [S], lengths [S] -> begin, begin + 1, ... of each span, one after the other [sum]"""
    offset = begin - lengths.cumsum(0) + lengths                                                  # [S]
    return offset.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=begin.device)


def ends(lengths: Tensor) -> Tensor:
    """lengths [S] -> [S+1] int32, from 0"""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def pack_for(cu_seqlens: Tensor, longest: int, cp_rank: int, cp_size: int) -> tuple[Packing, Tensor | slice]:
    """-> what one context-parallel rank's attention needs, and which tokens it holds. longest: of the sequences"""
    if cp_size == 1:
        return Packing("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest), slice(None)
    index, lengths, reach = zigzag(cu_seqlens, cp_rank, cp_size)
    order = torch.cat([zigzag(cu_seqlens, r, cp_size)[0] for r in range(cp_size)])                # [T] as gathered
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)                                  # [T] token -> gathered
    begin = cu_seqlens[:-1].long().repeat_interleave(2)
    chunk = longest // (2 * cp_size)
    return Packing("thd", ends(lengths), ends(reach), max_seqlen_q=chunk, max_seqlen_kv=chunk * (2 * cp_size - cp_rank),
                   key_index=place[spans(begin, reach)]), index


# ---- Norm and position -------------------------------------------------------------------------------------------------
@logprobs.fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32. [rows, H] -> same"""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@logprobs.fused
def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]                # further dimensions of a head stay as they are
    y, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = y.chunk(2, dim=-1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([y.to(x.dtype), rest], dim=-1)


class Rotate(torch.autograd.Function):
    """Rotary position embedding (2104.09864): pairs of dimensions of each head turn by the token's angle. [T, A, D] -> same

    Pairs are (i, i + D/2), or with `interleaved` (2i, 2i + 1). By hand: the gradient is the same kernel, it turns back.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return turn(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin, ctx.interleaved), None, None, None


class Norm(torch.nn.RMSNorm):
    """RMSNorm (1910.07467) under Megatron's constructor. With sequence parallelism each TP rank sees part of the tokens, so
    the weight's gradient must be summed over them: Megatron does so for weights that carry this mark."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """For checkpoints: every TP rank has all of it. Megatron's MLP asks each of its parts."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets)


# ---- Attention ---------------------------------------------------------------------------------------------------------
@functools.cache
def has_flash4() -> bool:
    """FlashAttention-4 (Zadouri et al., 2026) comes with SGLang, for Hopper and Blackwell; elsewhere torch's own serves."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")         # kernels are compiled once, not in every run
    packages = ("flash_attn", "flash_attn.cute", "cutlass", "tvm_ffi")           # flash_attn alone may be FlashAttention-2
    return torch.cuda.get_device_capability()[0] in (9, 10) and all(importlib.util.find_spec(name) for name in packages)


def attention_name(config, device: torch.device) -> str:
    """Which kernels compute attention there, for the log. It follows PackedAttention.forward."""
    if config.transformer_impl == "transformer_engine":
        return "Transformer Engine"
    if device.type == "cpu":
        return "torch's scaled_dot_product_attention"
    return "FlashAttention-4" if has_flash4() else "torch's varlen_attn"


class PackedAttention(torch.nn.Module):
    """Positions, then causal attention within each packed sequence.

    query [T, A/tp, D], key and value [T, G/tp, D] -> [T, A/tp * D]. Megatron would turn queries and keys itself, but without
    Transformer Engine it does so one sequence at a time; here all T tokens turn at once, by packed_seq_params.cos and sin.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **unused):
        super().__init__()
        self.scale = softmax_scale           # None: 1 / sqrt(D), the default of all functions below
        self.interleaved, self.cp_group = config.rotary_interleaved, pg_collection.cp

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        packing = packed_seq_params
        query, key = (Rotate.apply(x, packing.cos, packing.sin, self.interleaved) for x in (query, key))
        return attend(query, key, value, packing, self.scale, self.cp_group)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, cp_group) -> Tensor:
    """Causal attention within each packed sequence. query [T, A, D], key [T, G, D], value [T, G, V] -> [T, A * V]"""
    if packing.key_index is not None:        # forward: gather over cp; backward: sum over cp, each rank keeps its own tokens'
        key, value = (gather_from_sequence_parallel_region(x, group=cp_group)[packing.key_index] for x in (key, value))
    width = value.shape[-1]
    lengths = packing.cu_seqlens_q, packing.cu_seqlens_kv, packing.max_seqlen_q, packing.max_seqlen_kv
    if not query.is_cuda:
        return attend_on_cpu(query, key, value, *lengths[:2], scale).flatten(1)
    if has_flash4():
        from flash_attn.cute import flash_attn_varlen_func
        names = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths))
        out, _ = flash_attn_varlen_func(query, key, value, **names, softmax_scale=scale, causal=True,
                                        deterministic=torch.are_deterministic_algorithms_enabled())
    else:
        from torch.nn.attention.varlen import varlen_attn
        value = F.pad(value, (0, query.shape[-1] - width))       # latent attention: it wants values as wide as keys
        out = varlen_attn(query, key, value, *lengths, scale=scale, window_size=(-1, 0))          # causal
    return out[..., :width].flatten(1)                                                            # [T, A * V]


def attend_on_cpu(query, key, value, cu_q, cu_k, scale) -> Tensor:
    """Sequences of about the same length go through one padded call. What stands right of a sequence's end is not its own, but
    causal attention never looks right, and those rows are not read. A query's row ends where its sequence of keys ends."""
    out = query.new_empty(*query.shape[:2], value.shape[-1])                                      # [T, A, V]
    q_lens, k_lens = cu_q.diff(), cu_k.diff()                                                     # [S]
    size_class = k_lens.clamp(min=1).float().log2().ceil()                                        # within a factor of 2
    for size in size_class.unique():
        some = size_class == size
        q_len, k_len = q_lens[some], k_lens[some]
        q_pos, k_pos = torch.arange(int(q_len.max())), torch.arange(int(k_len.max()))
        q_index = (cu_q[:-1][some][:, None] + q_pos).clamp(max=len(query) - 1)                    # [s, Q] into T
        k_index = (cu_k[:-1][some][:, None] + k_pos).clamp(max=len(key) - 1)                      # [s, K]
        q, k, v = (x[i].transpose(1, 2) for x, i in ((query, q_index), (key, k_index), (value, k_index)))
        mask = dict(is_causal=True)
        if cu_q is not cu_k:                 # cp: queries are the end of their keys
            last = (k_len - q_len)[:, None, None, None] + q_pos[:, None]                          # [s, 1, Q, 1]
            mask = dict(attn_mask=k_pos <= last)                                                  # [s, 1, Q, K]
        o = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **mask).transpose(1, 2)
        inside = q_pos < q_len[:, None]                                                           # [s, Q]
        out = out.index_put((q_index[inside],), o[inside])
    return out


class LatentAttention(MegatronModule):
    """DeepSeek's multi-head latent attention (2405.04434, sec. 2.1), under the constructor and call of Megatron's attention.

        hidden --down--> [q_lora_rank]  --norm, q_up-->  of each head: query without, and with position
                         [kv_lora_rank] --norm, kv_up--> of each head: key without position, value
                         [rope]                          one key with position, shared by all heads

    The narrow matrices are whole on every TP rank, the wide ones are cut by heads. Megatron's own module cuts the narrow ones
    too and gathers, and then sums the gradient of the shared key over too few ranks.
    """

    def __init__(self, config: LayerConfig, layer_number: int, pg_collection, **unused):
        super().__init__(config)
        c, self.tp_group, self.cp_group = config, pg_collection.tp, pg_collection.cp
        wide = dict(config=c, init_method=c.init_method, bias=False, tp_group=pg_collection.tp)
        qk, heads = c.qk_nope_head_dim + c.qk_rope_head_dim, c.num_attention_heads
        self.linear_down_proj = Replicated(c, c.hidden_size, (c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_rope_head_dim)
        if c.q_lora_rank:
            self.q_layernorm = Norm(c, c.q_lora_rank, c.layernorm_epsilon)
            self.linear_q_up_proj = ColumnParallelLinear(c.q_lora_rank, heads * qk, **wide)
        else:
            self.linear_q_proj = ColumnParallelLinear(c.hidden_size, heads * qk, **wide)
        self.kv_layernorm = Norm(c, c.kv_lora_rank, c.layernorm_epsilon)
        self.linear_kv_up_proj = ColumnParallelLinear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), **wide)
        self.linear_proj = RowParallelLinear(heads * c.v_head_dim, c.hidden_size, input_is_parallel=True, skip_bias_add=True,
                                             **wide)

    def forward(self, hidden: Tensor, attention_mask=None, packed_seq_params=None, **unused):
        """[T, 1, H], with sequence parallelism [T/tp, 1, H] -> same, and no bias"""
        c, packing = self.config, packed_seq_params
        query, latent, key_rope = self.linear_down_proj(hidden).split([c.q_lora_rank or 0, c.kv_lora_rank, c.qk_rope_head_dim],
                                                                      dim=-1)
        query = self.linear_q_up_proj(self.q_layernorm(query))[0] if c.q_lora_rank else self.linear_q_proj(hidden)[0]
        query = query[:, 0].unflatten(-1, (-1, c.qk_nope_head_dim + c.qk_rope_head_dim))          # [T, A/tp, nope + rope]
        key_value = self.linear_kv_up_proj(self.kv_layernorm(latent))[0][:, 0].unflatten(-1, (query.shape[1], -1))
        key_nope, value = key_value.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)             # [T, A/tp, nope], [.., v]
        # Forward: every rank has the shared key of all T tokens. Backward: its gradient is summed over the ranks' heads.
        if c.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope, group=self.tp_group)        # [T/tp, 1, rope] -> [T, ..]
        else:
            key_rope = copy_to_tensor_model_parallel_region(key_rope, group=self.tp_group)
        query_nope, query_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        turned = [Rotate.apply(x, packing.cos, packing.sin, c.rotary_interleaved) for x in (query_rope, key_rope)]
        query = torch.cat([query_nope, turned[0]], dim=-1)
        key = torch.cat([key_nope, turned[1].expand(-1, query.shape[1], -1)], dim=-1)             # [T, A/tp, nope + rope]
        out = attend(query, key, value, packing, c.softmax_scale, self.cp_group)                  # [T, A/tp * v]
        return self.linear_proj(out[:, None])


class Replicated(torch.nn.Linear):
    """A matrix that is whole on every TP rank."""

    def __init__(self, config, width: int, out: int):
        super().__init__(width, out, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel     # each rank saw part of the tokens: see Norm


class NormedAttention(SelfAttention):
    """With a norm of its own behind it (GLM-4)."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias


class NormedMLP(MLP):
    """The same."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias


def transformer_engine_attention() -> type:
    """Transformer Engine's attention (cuDNN's or FlashAttention's kernels) behind the same rotation."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class Attention(TEDotProductAttention):
        def forward(self, query, key, value, *args, packed_seq_params=None, **kwargs):
            packing = packed_seq_params
            query, key = (Rotate.apply(x, packing.cos, packing.sin, False) for x in (query, key))
            return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)   # [T, A/tp * D]
    return Attention
