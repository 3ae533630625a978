"""
fp8.py: a matrix in 8 bits: float8_e4m3fn, and one scale for each block of 128 x 128, as in DeepSeek-V3's checkpoints.

    "x.weight" [R, C] --quantize_block--> "x.weight" [R, C] e4m3 + "x.weight_scale_inv" [R/128, C/128] fp32   (engines)
                      <--dequantize_block-- w = q * scale (not / scale, whatever its name says)               (trainers)

Test:  pytest tests/test_fp8.py
Knows nothing about: files, engines, who asks. Trainers compute in bf16; an engine's weights and activations have 4 significant
       bits then, so `train_rollout_logprob_abs_diff` grows: see use_tis.
NOTE: transformers 5.12 takes R / r for the height of a block, so it misreads matrices that are no multiple of 128; we do not.
Shapes: R rows, C columns; r, c the blocks along them (the last one of each may be smaller than 128).
"""
import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from families import head_dim_of, layers_with_experts, shared_ffn

BLOCK, LARGEST = 128, 448.0                  # rows and columns of a block; e4m3's largest number
SUFFIX = "_scale_inv"                        # of the scale's name, after the weight's
# What config.json says of such a folder. transformers would turn an untied output layer into fp8 too; SGLang never does.
QUANTIZATION_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                       "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
# Every projection of a layer. Not: embeddings, norms, biases, routers (mlp.gate), and what puts token and state together in an
# extra layer: eh_proj of DeepSeek's and GLM's, input_proj of MiMo's.
QUANTIZED = re.compile(r"model\.(mtp_)?layers\.\d+\..*(?<!\.eh)(?<!\.input)(_proj|kv_a_proj_with_mqa)\.weight")


# ---- One matrix ------------------------------------------------------------------------------------------------------
def quantize_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C] -> (e4m3 [R, C], fp32 scales [r, c]). Each block's largest number becomes 448; rounding is at most 1/16 of a
    number, or half of e4m3's smallest step (scale * 2^-10) where that is more."""
    rows, columns = weight.shape
    full = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))          # zeros change no maximum
    blocks = full.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))                                # [r, 128, c, 128]
    scale = (blocks.abs().amax((1, 3)) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)         # [r, c]; no 0 / 0
    q = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale                           # [R, C], [r, c]


def dequantize_block(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[R, C], [r, c] -> [R, C]. The same operations in the same order as SGLang's, so that checksums agree."""
    wide = scale.float().repeat_interleave(BLOCK, 0)[:q.shape[0]]                                    # [R, c]
    return (q.float() * wide.repeat_interleave(BLOCK, 1)[:, :q.shape[1]]).to(dtype)                  # [R, C]


# ---- A model's tensors -----------------------------------------------------------------------------------------------
def is_quantized(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and QUANTIZED.fullmatch(name) is not None


def bytes_sent(name: str, shape: tuple) -> int:
    """Of one tensor and its scales in quantize_stream; of a plain one in bf16."""
    blocks = math.prod(-(-size // BLOCK) for size in shape)      # each with a scale in fp32
    return math.prod(shape) + 4 * blocks if is_quantized(name, torch.empty(shape, device="meta")) else 2 * math.prod(shape)


def quantize_stream(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a plain model -> those of the fp8 one, on the same device."""
    for name, tensor in tensors:
        if is_quantized(name, tensor):
            q, scale = quantize_block(tensor)
            yield name, q
            yield name + SUFFIX, scale
        else:
            yield name, tensor


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, in bf16; what is plain stays as it is."""
    return {name: dequantize_block(tensor, tensors[name + SUFFIX]) if name + SUFFIX in tensors else tensor
            for name, tensor in tensors.items() if not name.endswith(SUFFIX)}


# ---- What cannot work ------------------------------------------------------------------------------------------------
def is_fp8(hf_config) -> bool:
    """Whether the folder's weights are as above. ValueError where they are quantised in any other way."""
    given = getattr(hf_config, "quantization_config", None)
    if not given:
        return False
    same = {key: given.get(key) for key in ("quant_method", "weight_block_size", "activation_scheme")}
    if same != {key: QUANTIZATION_CONFIG[key] for key in same} or given.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"config.json has quantization_config = {given}: only fp8 (e4m3) in blocks of 128 x 128 with dynamic "
                         "activations can be read; give the unquantized checkpoint")
    return True


def check_engine(hf_config, tp_size: int, dp_size: int = 1, ep_size: int = 1) -> None:
    """ValueError unless SGLang can compute this model in fp8 over tp_size GPUs: a block must not be cut in two. Attention is
    cut inside each of dp_size groups only, an expert inside each of ep_size."""
    if hf_config.model_type == "llama":
        raise ValueError("rollout_quantization='fp8': SGLang 0.5.17 renames a Llama's weight_scale_inv while loading and then "
                         "drops it; set rollout_quantization=None, or use a Qwen model")
    c, layers = hf_config, layers_with_experts(hf_config)
    heads, groups = c.num_attention_heads * dp_size / tp_size, max(c.num_key_value_heads * dp_size / tp_size, 1)   # of a GPU
    sizes = {"hidden_size": c.hidden_size}                   # rows of activations are quantised in pieces of 128
    if not all(layers):
        sizes["intermediate_size / tp"] = c.intermediate_size / tp_size
    if any(layers):
        sizes |= {"moe_intermediate_size / tp * ep": c.moe_intermediate_size * ep_size / tp_size,
                  "moe_intermediate_size * n_shared_experts / tp": shared_ffn(c) / tp_size}
    if getattr(c, "kv_lora_rank", None):                     # latent attention
        wide = c.qk_nope_head_dim + c.qk_rope_head_dim
        sizes |= {"heads * qk_head_dim / tp": heads * wide, "heads * v_head_dim / tp": heads * c.v_head_dim,
                  "heads * (qk_nope_head_dim + v_head_dim) / tp": heads * (c.qk_nope_head_dim + c.v_head_dim)}
    else:
        sizes |= {"heads * head_dim / tp": heads * head_dim_of(c), "kv heads * head_dim / tp": groups * head_dim_of(c)}
    for name, size in sizes.items():
        if size % BLOCK:
            raise ValueError(f"rollout_quantization='fp8' has blocks of {BLOCK}, and {name} = {size:g} with tp {tp_size} is "
                             "no multiple of that; set a smaller rollout_num_gpus_per_engine, or rollout_quantization=None")
