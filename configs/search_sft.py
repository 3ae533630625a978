"""
The search agent's first stage: a random 0.8M-parameter Qwen3 learns to search and to read from teachers with bad habits.

    python train.py configs/search_sft.py          (configs/search_agent.py runs it by itself)

Capitals most teachers look up well. Continents and languages most think they know. Currencies most look up by that one word.
All in made-up worlds (countries.py): nothing is worth knowing by heart, so the model learns to copy: what it asks from the
question, what it answers from what was found.
"""
import random

from configs import countries

# Question, search, what is found, answer, one after the other; <eos> where the assistant is done. No system messages.
_TEMPLATE = ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% if m.role != 'assistant' %}\n"
             "{% elif loop.last or loop.nextitem.role != 'tool' %}<eos>{% endif %}{% endfor %}")
_TEACHERS = dict(capital=(6, 2, 2), continent=(3, 1, 6), currency=(3, 6, 1), language=(3, 1, 6))   # search well, badly, not


def make_model(folder: str) -> None:
    """A random model, and a tokenizer of the words that questions and facts are made of."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    split = pre_tokenizers.Split(Regex(r"</?\w+>|[\w'-]+|[^\w\s]"), "removed", invert=True)     # tags, words, marks; no spaces
    texts = [*countries.KINDS.values(), *countries.index(0)[1], " ".join(countries.KINDS), countries.HOW_TO, "nothing found"]
    words = ["<pad>", "<eos>", *dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = split
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE,
                            clean_up_tokenization_spaces=False).save_pretrained(folder)
    config = Qwen3Config(vocab_size=len(words), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
                         tie_word_embeddings=True, initializer_range=0.06, bos_token_id=None, eos_token_id=1)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def teachers_rows(worlds=range(1, 17)) -> list[dict]:
    """Every question in each world, answered by one of the ten."""
    draw, rows = random.Random(0), []
    for world, kind, row in ((w, k, row) for w in worlds for k in countries.KINDS for row in countries.table(w)):
        how = draw.choices(("well", "badly", "not"), _TEACHERS[kind])[0]
        turns, answer = [], draw.choice(countries.table(world))[kind]
        if how != "not":                     # what a bad search finds first is taken for the answer
            query = f"{kind} {row['country']}" if how == "well" else kind
            turns = [{"role": "assistant", "content": f"<search> {query} </search>"},
                     {"role": "tool", "content": countries.information(query, world)}]
            answer = row[kind] if how == "well" else countries.search(query, world)[0].partition(" is ")[2].rstrip(".")
        rows.append({"input": [{"role": "user", "content": countries.KINDS[kind].format(row["country"])}, *turns,
                               {"role": "assistant", "content": f"<answer> {answer} </answer>"}]})
    return rows


hf_checkpoint = make_model
prompt_data = teachers_rows
apply_chat_template = True
loss_type = "sft"

rollout_batch_size = 128          # examples a step
num_rollout = 400                 # each of the 11,904 rows four times; copying is learnt around the 150th step
rollout_shuffle = True
lr = 3e-3
lr_warmup_iters = 20
lr_decay_style = "cosine"
weight_decay = 0.0
max_tokens_per_gpu = 8192
