"""
The demo's first stage: a random 0.8M-parameter Qwen3 learns to add two numbers from teachers who often forget the carry.

    python train.py configs/demo_sft.py          (configs/demo_cpu.py runs it by itself)

SFT copies its teachers, so the model ends about half right: sums without a carry. It has seen how to carry, but seldom does.
Numbers are written with leading zeros, 07+45=052, so that each digit has its place: easier for a model of this size.
"""
import random


def make_model(folder: str) -> None:
    """A random model and a tokenizer with one token per character, written as any Hugging Face model is."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    words = ["<pad>", "<eos>", *"0123456789+="]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = Qwen3Config(vocab_size=len(words), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
                         tie_word_embeddings=True, initializer_range=0.06, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def rows(held_out: bool) -> list[dict]:
    """All sums of two numbers below 100, in a fixed random order; every 50th is kept for evaluation."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    pairs = [pair for i, pair in enumerate(pairs) if (i % 50 == 0) == held_out]
    return [{"input": f"{a:02}+{b:02}=", "label": f"{a + b:03}"} for a, b in pairs]


def teachers_rows() -> list[dict]:
    """Each sum as four teachers write it; three of them forget the carry of the last digit: 37+45=072."""
    out = []
    for row in rows(held_out=False):
        a, b = map(int, row["input"][:-1].split("+"))
        carry = a % 10 + b % 10 >= 10
        out += [row] + [row | {"label": f"{a + b - 10 * carry:03}"}] * 3
    return out


hf_checkpoint = make_model
prompt_data = teachers_rows
label_key = "label"
loss_type = "sft"

rollout_batch_size = 256          # examples a step
num_rollout = 400                 # 400 * 256 examples: each of the 39,200 two or three times
rollout_shuffle = True
lr = 3e-3
lr_warmup_iters = 20
lr_decay_style = "cosine"
weight_decay = 0.0
max_tokens_per_gpu = 4096         # 256 examples of 10 tokens fit into one micro-batch
