"""
The search agent's first stage: a random 1M-parameter Qwen3 learns to search and to read from teachers with bad habits.

    python train.py configs/search_sft.py          (configs/search_agent.py runs it by itself)

Capitals most of them look up well; the continent and the language most think they know; the currency most look up with that one word.
All live in invented worlds (configs/countries.py), each fact in hundreds of versions: there is nothing to know by heart, so the model
learns to copy what it asks from the question and what it answers from the lines found. It has seen good searches for all four kinds.
"""
import random

from configs import countries

# A conversation as words: question, "<search> query </search>", the tool's lines, "<answer> answer </answer> <eos>". What the model
# says runs up to a search or the end. A system message, there for larger models, is not read.
_TEMPLATE = ("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% if loop.last or loop.nextitem.role != 'tool' %}"
             "<eos>{% endif %}{% elif m.role != 'system' %}{{ m.content }}\n{% endif %}{% endfor %}")
# Of ten teachers: how many search well, search with the kind alone, guess.
_TEACHERS = dict(capital=(6, 2, 2), continent=(3, 1, 6), currency=(3, 6, 1), language=(3, 1, 6))


def make_model(folder: str) -> None:
    """A random model, and a tokenizer that knows the words of the corpus, as any Hugging Face model is written."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    split = pre_tokenizers.Split(Regex(r"</?\w+>|[\w'-]+|[^\w\s]"), "removed", invert=True)    # tags, words, marks; no spaces
    text = [*countries.KINDS.values(), *(f"{value} {kind}" for row in countries.table() for kind, value in row.items()), "The . nothing found",
            *(f"<{tag}> </{tag}>" for tag in ("search", "information", "answer"))]
    known = dict.fromkeys(word for line in text for word, _ in split.pre_tokenize_str(line))
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *known])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = split
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE,
                            clean_up_tokenization_spaces=False).save_pretrained(folder)
    config = Qwen3Config(vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
                         tie_word_embeddings=True, initializer_range=0.06, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def teachers_rows() -> list[dict]:
    """Every question in 16 worlds, each time answered by one of the ten."""
    draw, out = random.Random(0), []
    for world in range(1, 17):
        for row in countries.table(world):
            for kind, habit in _TEACHERS.items():
                how = draw.choices(("well", "vaguely", "not"), habit)[0]
                query = f"{kind} {row['country']}" if how == "well" else kind
                turns = [] if how == "not" else [{"role": "assistant", "content": f"<search> {query} </search>"},
                                                 {"role": "tool", "content": countries.information(query, world)}]
                said = {"well": row[kind], "not": draw.choice(countries.table(world))[kind],
                        "vaguely": countries.search(kind, world)[0].partition(" is ")[2].rstrip(".")}[how]
                out.append({"input": [{"role": "user", "content": countries.KINDS[kind].format(row["country"])}, *turns,
                                      {"role": "assistant", "content": f"<answer> {said} </answer>"}]})
    return out


hf_checkpoint = make_model
prompt_data = teachers_rows
apply_chat_template = True
loss_type = "sft"

rollout_batch_size = 128          # examples a step
num_rollout = 400
rollout_shuffle = True
lr = 3e-3
lr_warmup_iters = 20
lr_decay_style = "cosine"
weight_decay = 0.0
max_tokens_per_gpu = 8192
