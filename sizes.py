"""
sizes.py: how large is this model? What config.json says of its layers, and the parameters of each.

    hf_checkpoint --read_config--> config --parameters, layer, layers_with_experts--> counts, by how a layout may cut them

Test:  pytest tests/test_plan.py       (exactly what transformers' models have, for every family and every published size)
Knows nothing about: layouts, GPUs, bytes (plan.py). Everywhere: c is the model's config, as transformers gives it.
Left out on purpose: MTP layers, which are not trained; the router's correction bias, a buffer.
"""
import json
import pathlib
import urllib.request
from dataclasses import dataclass

from families import ALIASES, head_dim_of, layers_with_experts, num_experts


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


def layer(c, moe: bool) -> Parameters:
    hidden, heads = c.hidden_size, c.num_attention_heads
    if is_mla(c):
        wide, rank, q_rank = c.qk_nope_head_dim + c.qk_rope_head_dim, c.kv_lora_rank, c.q_lora_rank
        down = hidden * (rank + c.qk_rope_head_dim) + rank + (q_rank * (hidden + 1) if q_rank else 0)      # and their norms
        up = heads * ((q_rank or hidden) * wide + rank * (c.qk_nope_head_dim + c.v_head_dim) + c.v_head_dim * hidden)
        attention = Parameters(up, down)
    else:
        rows = (heads + 2 * c.num_key_value_heads) * head_dim_of(c)            # of q, k and v together
        bias = c.model_type == "qwen2" or getattr(c, "attention_bias", False)
        norm = c.model_type in ("qwen3", "qwen3_moe") or getattr(c, "use_qk_norm", False)
        attention = Parameters(hidden * (rows + heads * head_dim_of(c)) + bias * rows, 2 * head_dim_of(c) * norm)
    mlp = Parameters(3 * hidden * c.intermediate_size)
    if moe:
        each = 3 * hidden * c.moe_intermediate_size
        mlp = Parameters(each * (getattr(c, "n_shared_experts", 0) or 0), hidden * num_experts(c), each * num_experts(c))
    return attention + mlp + Parameters(whole=(4 if c.model_type == "glm4" else 2) * hidden)


def parameters(c) -> Parameters:
    """Of the whole model: what transformers' parameters() add up to."""
    return of_layers(c, layers_with_experts(c)) + Parameters(vocab(c), c.hidden_size)


def vocab(c) -> int:
    """Of the embedding and, unless it is the same one, the output layer."""
    return c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)


def of_layers(c, layers: list[bool]) -> Parameters:
    return sum((layer(c, moe) * layers.count(moe) for moe in set(layers)), Parameters())


# ---- config.json ------------------------------------------------------------------------------------------------------
def read_config(cfg):
    """(the model's config, where it was found); (None, why not) where the model does not exist before the run."""
    from configs.shapes import PUBLISHED
    name, values, source = cfg.hf_checkpoint, None, "its folder"
    if callable(name) or name.endswith(".py"):
        name, source = getattr(name, "published", None), "configs/shapes.py"
        if name is None:
            return None, "the model is made when the run starts"
        values = PUBLISHED[name]
    elif (pathlib.Path(name).expanduser() / "config.json").is_file():
        values = json.loads((pathlib.Path(name).expanduser() / "config.json").read_text())
    else:
        try:                                 # not through huggingface_hub: with no network it tries for half a minute
            with urllib.request.urlopen(f"https://huggingface.co/{name}/resolve/main/config.json", timeout=5) as answer:
                values, source = json.load(answer), "the hub"
        except (OSError, ValueError):
            if name not in PUBLISHED:
                raise ValueError(f"config.json of {name} was not reached at the hub, and configs/shapes.py has no copy; "
                                 "give a folder") from None
            values, source = PUBLISHED[name], "configs/shapes.py (hub not reached)"
    from transformers import AutoConfig      # 3 s; knows what a config.json leaves out
    kind = ALIASES.get(values["model_type"], (values["model_type"],))[0]
    return AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key != "model_type"}), source
