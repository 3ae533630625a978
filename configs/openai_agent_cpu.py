"""
An agent written with the `openai` package, which knows nothing of RL, is trained as it is: endpoint.py serves it.

    python train.py configs/openai_agent_cpu.py          some minutes on 2 cores, no GPU

    12+34+21 --add--> 12+34=046   46+21=067 --> 67, right or wrong: one reward for both conversations

First configs/demo_sft.py imitates teachers who often forget the carry. Then GRPO through the agent's calls. A sum that is not
three digits is asked for again, in the same conversation.
"""
import random
import re

from endpoint import session


# ---- The agent: any program that takes a base_url --------------------------------------------------------------------
async def add(numbers: list[int], base_url: str, api_key: str) -> int | None:
    """The sum, by asking a model for one pair after the other."""
    from openai import AsyncOpenAI
    total, *others = numbers
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for number in others:
            messages = [{"role": "user", "content": f"{total:02}+{number:02}"}]
            for attempt in range(2):
                answer = (await client.chat.completions.create(model="adder", messages=messages, max_tokens=6)).choices[0].message
                if re.fullmatch(r"\d\d\d", answer.content):
                    break
                messages += [answer, messages[0]]
            else:
                return None
            total = int(answer.content)
    return total


# ---- The run ---------------------------------------------------------------------------------------------------------
async def generate(args, sample, sampling_params):
    """A custom_generate_function: one rollout, two samples."""
    async with session(args, sample, sampling_params) as talk:
        total = await add([int(n) for n in sample.prompt.split("+")], talk.base_url, "none")
        talk.reward = float(total == int(sample.label))
    return talk.samples()


def rows(count: int, seed: int) -> list[dict]:
    """Three numbers, of which the first two add up to two digits, as the model knows them."""
    draw, out = random.Random(seed), []
    while len(out) < count:
        a, b, c = (draw.randrange(100) for _ in range(3))
        if a + b < 100:
            out.append({"input": f"{a:02}+{b:02}+{c:02}", "label": str(a + b + c)})
    return out


def training_rows() -> list[dict]:
    return rows(4000, seed=0)


def held_out_rows() -> list[dict]:
    known = {row["input"] for row in training_rows()}
    return [row for row in rows(220, seed=1) if row["input"] not in known][:200]


hf_checkpoint = "configs/demo_sft.py"    # a run file: that run goes first
_TEMPLATE = "{% for m in messages %}{{ m.content + ('=' if m.role == 'user' else eos_token) }}{% endfor %}"
apply_chat_template_kwargs = dict(chat_template=_TEMPLATE)       # its tokenizer has none
prompt_data = training_rows
label_key = "label"
custom_generate_function = generate
eval_prompt_data = dict(sums=dict(prompt_data=held_out_rows, eval_temperature=0.0))

rollout_batch_size, n_samples_per_prompt = 16, 8     # 128 runs of the agent a step, 256 conversations
num_rollout = 40
rollout_max_response_len = 24     # two answers, and the question between them
rollout_shuffle = True
eval_interval = 10
lr, weight_decay = 1e-4, 0.0
colocate = True                   # trainer and engine, one process each on the same cores
max_tokens_per_gpu = 8192
