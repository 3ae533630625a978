"""
Real models' shapes: what their config.json says about sizes, for plans without a network (`train.py --dry-run`), and random
models in such sizes, to measure speed and memory where no weights can be downloaded.

    from configs.shapes import qwen3_4b as hf_checkpoint          in a run file

A random model's tokenizer has one token per character, so a prompt of n characters is n tokens; the vocabulary has its real
size.
"""
QWEN3 = {  # hidden, ffn, layers, heads, kv heads, tied; vocabulary 151,936 and heads of 128 in all of them
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
}


def qwen3(size: str) -> dict:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "tie_word_embeddings")
    return dict(zip(keys, QWEN3[size]), model_type="qwen3", vocab_size=151936, head_dim=128)


MLA = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, tie_word_embeddings=False)
LLAMA = dict(model_type="llama", vocab_size=128256, num_key_value_heads=8, tie_word_embeddings=False)

# Hub name -> the keys of config.json that decide about sizes (nothing about rotary angles, norms' epsilon, routing scores).
# Sources: upstream slime's scripts/models/<name>.sh where there is one: qwen3-*, qwen3-30B-A3B, glm4-9B, glm4.5-355B-A32B,
# llama3.1-8B, deepseek-v3, kimi-k2, moonlight; Llama's also from copies of its config.json, 70B from such copies alone.
# Checked: the bytes of the published safetensors (total_size of their index) where tests/test_plan.py names them.
PUBLISHED = {f"Qwen/Qwen3-{size.upper()}": qwen3(size) for size in QWEN3} | {
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        head_dim=128, num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
    "zai-org/GLM-4-9B-0414": dict(
        model_type="glm4", vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, head_dim=128,
        num_attention_heads=32, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False),
    "zai-org/GLM-4.5": dict(
        model_type="glm4_moe", vocab_size=151552, hidden_size=5120, intermediate_size=12288, num_hidden_layers=92,
        head_dim=128, num_attention_heads=96, num_key_value_heads=8, attention_bias=True, use_qk_norm=True,
        tie_word_embeddings=False, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=1536, first_k_dense_replace=3),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA | dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA | dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "deepseek-ai/DeepSeek-V3": MLA | dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, n_group=8, topk_group=4),
    "moonshotai/Kimi-K2-Instruct": MLA | dict(
        model_type="kimi_k2", vocab_size=163840, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536, n_routed_experts=384, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1, n_group=1, topk_group=1),
    "moonshotai/Moonlight-16B-A3B-Instruct": MLA | dict(
        model_type="deepseek_v3", vocab_size=163840, hidden_size=2048, intermediate_size=11264, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1),
}
PUBLISHED["zai-org/GLM-Z1-9B-0414"] = PUBLISHED["zai-org/GLM-4-9B-0414"]


# What SGLang reads of a DeepSeek's config.json and transformers does not write.
ROUTER = dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)


def random_model(name: str, **changes):
    """-> a function for hf_checkpoint: writes a random model with the shape of PUBLISHED[name], but for the changes."""
    values = PUBLISHED[name] | changes

    def write(folder: str) -> None:
        import json
        import pathlib

        import torch
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
        words = ["<pad>", "<eos>", *map(chr, range(32, 127))]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
        ids = dict(max_position_embeddings=40960, bos_token_id=None, eos_token_id=1, pad_token_id=0)
        config = AutoConfig.for_model(**values, **ids)
        # transformers makes one layer of each kind (dense, with experts), lengthen() writes the others.
        few = min(values.get("first_k_dense_replace", 0) + 1, config.num_hidden_layers)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.set_default_dtype(torch.bfloat16)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values | ids | dict(num_hidden_layers=few)))
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        config.architectures, config.dtype = model.config.architectures, model.config.dtype
        config.save_pretrained(folder)
        del model
        lengthen(pathlib.Path(folder), few, config.num_hidden_layers)
        if values["model_type"] == "deepseek_v3":
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | ROUTER))
    write.published = f"{name} {changes}" if changes else name           # so that sizes.py knows the shape
    PUBLISHED[write.published] = values
    return write


def lengthen(folder, have: int, layers: int) -> None:
    """Give a saved model more layers, each like its last one with other random numbers. One layer in memory at a time."""
    import json

    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where, last = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        path = path.rename(folder / f"first-{path.name}")        # a model.safetensors would be read for the whole model
        with safe_open(path, "pt") as file:
            where |= dict.fromkeys(file.keys(), path.name)
            last |= {name: file.get_tensor(name) for name in file.keys() if f".layers.{have - 1}." in name}
    for i in range(have, layers):
        own = {name.replace(f".layers.{have - 1}.", f".layers.{i}."): tensor if tensor.dim() == 1 else
               torch.empty_like(tensor, device=device).normal_(std=0.02).cpu() for name, tensor in last.items()}
        save_file(own, folder / f"layer-{i}.safetensors", {"format": "pt"})
        where |= dict.fromkeys(own, f"layer-{i}.safetensors")
    size = sum((folder / name).stat().st_size for name in set(where.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))


qwen3_0p6b, qwen3_1p7b, qwen3_4b, qwen3_8b = (random_model(f"Qwen/Qwen3-{size.upper()}") for size in QWEN3)
# Small ones with the parts of large models in their real widths: a quick look at what a family does on a GPU.
_FEW = dict(vocab_size=8192, num_hidden_layers=2)
few_glm4 = random_model("zai-org/GLM-4-9B-0414", **_FEW)
few_qwen3_moe = random_model("Qwen/Qwen3-30B-A3B", **_FEW, num_experts=32)
few_glm4_moe = random_model("zai-org/GLM-4.5", **_FEW, n_routed_experts=16, first_k_dense_replace=1)
few_deepseek_v3 = random_model("deepseek-ai/DeepSeek-V3", **_FEW, n_routed_experts=32, first_k_dense_replace=1,
                               moe_intermediate_size=512)
few_moonlight = random_model("moonshotai/Moonlight-16B-A3B-Instruct", **_FEW, n_routed_experts=32)
