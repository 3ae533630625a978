"""
Random models in the sizes of real ones, to measure speed and memory where no weights can be downloaded.

    from configs.shapes import qwen3_4b as hf_checkpoint          in a run file

The tokenizer has one token per character, so a prompt of n characters is n tokens; the vocabulary has its real size.
"""
QWEN3 = {  # hidden, ffn, layers, heads, kv heads, tied; vocabulary 151,936 and heads of 128 in all of them
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
}


def write_random_qwen3(folder: str, size: str) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    words = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    hidden, ffn, layers, heads, kv_heads, tied = QWEN3[size]
    config = Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, tie_word_embeddings=tied,
                         max_position_embeddings=40960, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def qwen3_0p6b(folder: str) -> None:
    write_random_qwen3(folder, "0.6b")


def qwen3_1p7b(folder: str) -> None:
    write_random_qwen3(folder, "1.7b")


def qwen3_4b(folder: str) -> None:
    write_random_qwen3(folder, "4b")


def qwen3_8b(folder: str) -> None:
    write_random_qwen3(folder, "8b")
