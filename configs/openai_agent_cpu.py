"""
An agent written with the `openai` package, which knows nothing of RL, is trained as it is: endpoint.py serves it.

    python train.py configs/openai_agent_cpu.py          some minutes on 2 cores, no GPU

    12+34+21 --add--> 12+34=046 | 46+21=067 --> 67: one reward, right or wrong, for both conversations

First configs/demo_sft.py imitates teachers who often forget the carry; then GRPO through the agent's calls.
"""
import random
import re

from endpoint import session


async def add(numbers: list[int], base_url: str, api_key: str) -> int | None:
    """The agent. It asks a model for one sum after the other, and once again where the answer is not three digits."""
    from openai import AsyncOpenAI
    total, *others = numbers
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for number in others:
            messages = [{"role": "user", "content": f"{total:02}+{number:02}"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="adder", messages=messages, max_tokens=6)
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, messages[0]]
                if re.fullmatch(r"\d\d\d", text):
                    break
            else:
                return None
            total = int(text)
    return total


async def generate(args, sample, sampling_params):
    """A custom_generate_function: one run of the agent."""
    async with session(args, sample, sampling_params) as talk:
        total = await add([int(n) for n in sample.prompt.split("+")], talk.base_url, "none")
        talk.reward = float(total == int(sample.label))
    return talk.samples()


def rows(seed: int = 0, count: int = 4000) -> list[dict]:
    """Three numbers, the first two of which add up to two digits: the model knows no other sums."""
    draw = random.Random(seed)
    triples = [(a, draw.randrange(100 - a), draw.randrange(100)) for a in draw.choices(range(100), k=count)]
    return [{"input": f"{a:02}+{b:02}+{c:02}", "label": str(a + b + c)} for a, b, c in triples]


def held_out_rows() -> list[dict]:
    known = {row["input"] for row in rows()}
    return [row for row in rows(1, 200) if row["input"] not in known]


hf_checkpoint = "configs/demo_sft.py"    # a run file: that run goes first; its tokenizer has no template
apply_chat_template_kwargs = dict(
    chat_template="{% for m in messages %}{{ m.content + ('=' if m.role == 'user' else eos_token) }}{% endfor %}")
prompt_data, label_key = rows, "label"
custom_generate_function = generate
eval_prompt_data = dict(sums=dict(prompt_data=held_out_rows, eval_temperature=0.0))
rollout_batch_size, n_samples_per_prompt, num_rollout = 16, 8, 20    # 128 runs of the agent a step: 256 conversations
rollout_max_response_len = 24     # two answers, and the question between them
eval_interval = 10
lr, weight_decay = 1e-4, 0.0
colocate = True                   # trainer and engine, one process each on the same cores
