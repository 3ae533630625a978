"""
sizes.py: how large is this model? What config.json says of its layers, and the parameters of each.

    hf_checkpoint --read_config--> config --parameters, layer, layers_with_experts--> counts, by how a layout may cut them

Test:  pytest tests/test_plan.py       (exactly what transformers' models have, for every family and every published size)
Knows nothing about: layouts, GPUs, bytes (plan.py). Everywhere: c is the model's config, as transformers gives it.
Left out on purpose: MTP layers, which are not trained; the router's correction bias, a buffer.
"""
import http.client
import json
import math
import pathlib
import urllib.parse
import urllib.request
from dataclasses import dataclass

from families import family, head_dim_of, layers_with_experts, lookup, num_experts, shared_ffn


# ---- Parameters --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parameters:
    """Counts, by how a layout cuts them."""
    cut: float = 0                           # over tp: most matrices, embeddings
    whole: float = 0                         # on every tp rank: norms, router, MLA's down projections
    experts: float = 0                       # over ep * etp

    def __add__(self, other):
        return Parameters(self.cut + other.cut, self.whole + other.whole, self.experts + other.experts)

    def __mul__(self, n: int):
        return Parameters(self.cut * n, self.whole * n, self.experts * n)

    @property
    def total(self):
        return self.cut + self.whole + self.experts


def is_mla(c) -> bool:                       # DeepSeek's latent attention (2405.04434, sec. 2.1)
    return bool(getattr(c, "kv_lora_rank", None))


def count(name: str, *shape: int) -> int:
    return math.prod(shape)


def layer(c, moe: bool, size=count) -> Parameters:
    """The sum of size(last part of its name, *shape) over the layer's tensors."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    whole = (4 if c.model_type == "glm4" else 2) * size("norm", hidden)
    if is_mla(c):
        wide, rank, q_rank = c.qk_nope_head_dim + c.qk_rope_head_dim, c.kv_lora_rank, c.q_lora_rank
        whole += size("kv_a_proj_with_mqa", rank + c.qk_rope_head_dim, hidden) + size("norm", rank)
        whole += size("q_a_proj", q_rank, hidden) + size("norm", q_rank) if q_rank else 0
        cut = size("q_proj", heads * wide, q_rank or hidden) + size("o_proj", hidden, heads * c.v_head_dim)
        cut += size("kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), rank)
    else:
        q, kv = heads * head_dim_of(c), c.num_key_value_heads * head_dim_of(c)
        bias = c.model_type == "qwen2" or getattr(c, "attention_bias", False)
        norm = c.model_type in ("qwen3", "qwen3_moe") or getattr(c, "use_qk_norm", False)
        whole += 2 * size("norm", head_dim_of(c)) * norm
        cut = size("q_proj", q, hidden) + 2 * size("k_proj", kv, hidden) + size("o_proj", hidden, q)
        cut += bias * size("bias", q + 2 * kv)

    def mlp(ffn):
        return 2 * size("up_proj", ffn, hidden) + size("down_proj", hidden, ffn)           # up: and gate
    if not moe:
        return Parameters(cut + mlp(c.intermediate_size), whole)
    return Parameters(cut + mlp(shared_ffn(c)), whole + size("gate", num_experts(c), hidden),
                      num_experts(c) * mlp(c.moe_intermediate_size))


def parameters(c, size=count) -> Parameters:
    """Of the whole model: what transformers' parameters() add up to."""
    vocab = size("embed_tokens", c.vocab_size, c.hidden_size) * (1 if c.tie_word_embeddings else 2)    # and the output layer
    return of_layers(c, layers_with_experts(c), size) + Parameters(vocab, size("norm", c.hidden_size))


def of_layers(c, layers: list[bool], size=count) -> Parameters:
    return sum((layer(c, moe, size) * layers.count(moe) for moe in set(layers)), Parameters())


# ---- config.json ------------------------------------------------------------------------------------------------------
def read_config(cfg):
    """(the model's config, where it was found); (None, why not) where the model does not exist before the run."""
    from configs.shapes import PUBLISHED
    name = cfg.hf_checkpoint
    if callable(name) or name.endswith(".py"):
        name, source = getattr(name, "published", None), "configs/shapes.py"
        if name is None:
            return None, "the model is made when the run starts"
        values = PUBLISHED[name]
    else:
        file = pathlib.Path(name).expanduser() / "config.json"
        url = f"https://huggingface.co/{urllib.parse.quote(name)}/resolve/main/config.json"
        source = "its folder" if file.is_file() else "the hub"
        try:                                 # not through huggingface_hub: with no network it tries for half a minute
            with file.open() if file.is_file() else urllib.request.urlopen(url, timeout=5) as text:
                values = json.load(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if file.is_file() or name not in PUBLISHED:
                raise ValueError(f"config.json of {name} could not be read from {source} ({error}), and configs/shapes.py has "
                                 "no copy; give a folder with a whole one") from None
            values, source = PUBLISHED[name], "configs/shapes.py (hub not reached)"
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig      # 3 s; knows what a config.json leaves out
    kind = lookup(values.get("model_type") if isinstance(values, dict) else None).model_type
    try:
        c = AutoConfig.for_model(**values | {"model_type": kind})
    except StrictDataclassError as error:
        raise ValueError(f"config.json of {name}: {' '.join(str(error).split())}; mend it, or download it again") from None
    family(c)                                # refuses what is not covered
    return c, source
