"""
layers.py: what is a transformer layer made of? Megatron's own parts, and those that its local layer spec lacks.

    config --block_spec--> (norm, linear_qkv, PackedAttention, linear_proj, norm, linear_fc1, SwiGLU, linear_fc2) * L
    query, key, value [T, heads, D] --turn by the token's angle--> causal attention within each sequence --> [T, A * D]

No Transformer Engine needed: Megatron's local spec lacks two things, and its spec system takes ours instead, a norm that knows
sequence parallelism and an attention that takes packed sequences. What would be five kernels on a GPU, each reading and
writing all tokens, torch.compile fuses into one (`logprobs.fused`). With transformer_impl="transformer_engine" in `megatron`
the layers are Transformer Engine's; in benchmarks/h200.md the two stand side by side.

Test:  pytest tests/test_model.py tests/test_gpu.py
Knows nothing about: optimizers, micro-batches, losses, checkpoints.
Shapes: T packed tokens, A attention heads, G key and value heads, D their width, H hidden, tp tensor-parallel ranks.
"""
import functools
import importlib.util
import os

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

import logprobs


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
    for name in {"attention_dropout", "hidden_dropout", "window_size", "softmax_type"} & set(cfg.megatron):
        raise ValueError(f"megatron: {name} would make the trainer's model another than the engine's, which reads config.json "
                         "and has no dropout; remove it")


def block_spec(config) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the norm after the last of all, for Megatron to build."""
    if config.transformer_impl == "transformer_engine":
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
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)


# ---- Norm and position -------------------------------------------------------------------------------------------------
@logprobs.fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32. [rows, H] -> same"""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@logprobs.fused
def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Rotate(torch.autograd.Function):
    """Rotary position embedding (2104.09864): pairs (i, i + D/2) of each head turn by the token's angle. [T, A, D] -> same

    By hand, because the gradient is the same kernel: it turns back.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


class Norm(torch.nn.RMSNorm):
    """RMSNorm (1910.07467) under Megatron's constructor. With sequence parallelism each TP rank sees part of the tokens, so
    the weight's gradient must be summed over them: Megatron does so for weights that carry this mark."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


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
    Transformer Engine it does so one sequence at a time; here all T tokens turn at once, by packed_seq_params.angles.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.scale = softmax_scale           # None: 1 / sqrt(D), the default of all functions below

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        cu_seqlens, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        query, key = (Rotate.apply(x, *packed_seq_params.angles) for x in (query, key))
        if query.is_cuda and has_flash4():
            from flash_attn.cute import flash_attn_varlen_func
            out, _ = flash_attn_varlen_func(
                query, key, value, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest,
                max_seqlen_k=longest, softmax_scale=self.scale, causal=True,
                deterministic=torch.are_deterministic_algorithms_enabled())
            return out.flatten(1)                                                                 # [T, A/tp * D]
        if query.is_cuda:
            from torch.nn.attention.varlen import varlen_attn
            out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=self.scale,
                              window_size=(-1, 0))                                                # causal
            return out.flatten(1)                                                                 # [T, A/tp * D]
        # CPU: sequences of about the same length go through one padded call. What stands right of a sequence's end is not
        # its own, but causal attention never looks right, and those rows are not read.
        out = torch.empty_like(query)
        lengths = cu_seqlens.diff()                                                               # [S]
        size_class = lengths.clamp(min=1).float().log2().ceil()                                   # within a factor of 2
        for size in size_class.unique():
            starts, lens = cu_seqlens[:-1][size_class == size], lengths[size_class == size]
            position = torch.arange(int(lens.max()))
            index = (starts[:, None] + position).clamp(max=len(query) - 1)                        # [s, L] into T
            q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))                     # [s, A or G, L, D]
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True).transpose(1, 2)
            inside = position < lens[:, None]                                                     # [s, L]
            out = out.index_put((index[inside],), o[inside])
        return out.flatten(1)                                                                     # [T, A/tp * D]


def transformer_engine_attention() -> type:
    """Transformer Engine's attention (cuDNN's or FlashAttention's kernels) behind the same rotation."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class Attention(TEDotProductAttention):
        def forward(self, query, key, value, *args, packed_seq_params=None, **kwargs):
            query, key = (Rotate.apply(x, *packed_seq_params.angles) for x in (query, key))
            return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)   # [T, A/tp * D]
    return Attention
