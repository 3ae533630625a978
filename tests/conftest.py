"""
conftest.py: what several tests share. A model small enough for every test, written to disk like a real one.

Test:  pytest tests/
Left out on purpose: anything from the network; the model is random and its tokenizer has one token per character.
"""
import os

import pytest

os.environ["RAY_worker_niceness"] = "0"      # as train.py does: Ray's 15 starves trainers beside a busy engine
os.environ["RAY_memory_monitor_refresh_ms"] = "0"    # nor may Ray kill ours because somebody else fills the memory

CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz?!\n"   # token ids 3, 4, ... in this order


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a random Qwen3 (2 layers, about 0.1M parameters, fp32) with a character tokenizer."""
    folder = str(tmp_path_factory.mktemp("tiny_model"))
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def reference(tiny_model):
    """The same model in transformers, which says what is right."""
    import torch
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def write_tiny_model(folder: str) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    tokenizer = write_char_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
        initializer_range=0.2,               # ten times the usual: a random model with opinions, so that errors show
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def write_char_tokenizer(folder: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()      # characters are joined with nothing between them
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return fast
