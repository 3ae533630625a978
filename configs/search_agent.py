"""
A search agent on a laptop, in the manner of Search-R1 (2503.09516): it learns by GRPO to look up what it cannot know.

    python train.py configs/search_agent.py          some minutes on 2 cores, no GPU

    What is the capital of Peru? <search> capital Peru </search>
    <information> The capital of Peru is Lima. The currency of Peru is sol. </information> <answer> Lima </answer>

First configs/search_sft.py imitates teachers who often search badly or not at all. Then GRPO on real facts, with no more than
"right" or "wrong". The held-out questions are about countries of which no stage trains a fact: only a search can tell.

A chat model can take the small one's place, with no SFT: its prompt says how to search (countries.HOW_TO). It must follow such
words now and then: SmolLM2-135M went through the loop, but it never searched, so there was nothing to reinforce.
    python train.py configs/search_agent.py --hf_checkpoint=FOLDER --rollout_max_response_len=512
"""
from configs.countries import questions
from configs.search_turns import generate, right, searched


def training_questions() -> list[dict]:
    return questions(held_out=False)


def held_out_questions() -> list[dict]:
    return questions(held_out=True)


hf_checkpoint = "configs/search_sft.py"  # a run file: that run goes first
prompt_data = training_questions
apply_chat_template = True
custom_generate_function = generate
custom_rm = right
eval_prompt_data = dict(right=dict(prompt_data=held_out_questions),            # share of held-out questions answered right...
                        searched=dict(prompt_data=held_out_questions, custom_rm=searched))   # ...and of those looked up
eval_temperature = 0.0

rollout_batch_size = 32           # P prompts
n_samples_per_prompt = 8          # n: 256 samples a step
num_rollout = 30
rollout_shuffle = True
rollout_max_response_len = 64     # all turns together: a search is 4 tokens, what it finds 20, an answer 4
eval_interval = 5
save_interval = 10

advantage_estimator = "grpo"
lr = 2e-4
weight_decay = 0.0
colocate = True                   # trainer and engine, one process each on the same cores
max_tokens_per_gpu = 8192
sglang = dict(max_running_requests=256)
