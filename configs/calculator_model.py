"""
The calculator agent's model: a random 0.8M-parameter Qwen3, and a tokenizer with a chat template in the manner of Qwen's.

    <|im_start|>user\\n37*45<|im_end|>\\n<|im_start|>assistant\\n<tool_call>\\n{"name": "calculator", "arguments": {...

Test:  pytest tests/test_agent.py
Knows nothing about: teachers and questions. Other tools need other phrases.
"""
import re

# Set phrases, each one token: so a call is nine tokens long.
_CALL = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>')
_RESULT = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response>")
# Qwen's way to write conversations, with the tools' names in the place of their descriptions.
_TEMPLATE = ("{% if tools %}<|im_start|>system\nTools: {{ tools | map(attribute='function.name') | join(', ') }}<|im_end|>\n"
             "{% endif %}"
             "{% for m in messages %}"
             "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
             "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
             "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make_model(folder: str) -> None:
    """A random model, and a tokenizer with one token for each of the template's set phrases, and for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    phrases = [*_RESULT, *_CALL, "<|im_start|>system\nTools: calculator", "\n<|im_start|>user\n", "\n<|im_start|>assistant\n"]
    words = ["<pad>", "<|im_end|>", *phrases, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, phrases)) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()      # joined with nothing between them
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>",
                            chat_template=_TEMPLATE).save_pretrained(folder)
    config = Qwen3Config(vocab_size=len(words), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
                         tie_word_embeddings=True, initializer_range=0.06, bos_token_id=None, eos_token_id=1)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
