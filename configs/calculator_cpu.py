"""
A calculator agent on a laptop: a small model learns by GRPO when, and how, to call a tool.

    python train.py configs/calculator_cpu.py          some minutes on 2 cores, no GPU

First configs/calculator_sft.py imitates teachers of whom many type the wrong sign, or answer without the tool. Then GRPO: no
more examples, only "right" or "wrong". What the tool says is read, and never trained.
"""
from configs.calculator import called, calculator, questions, right


def training_questions() -> list[dict]:
    return questions(held_out=False)


def held_out_questions() -> list[dict]:
    return questions(held_out=True)


hf_checkpoint = "configs/calculator_sft.py"      # a run file: that run goes first
prompt_data = training_questions
label_key = "label"
apply_chat_template = True
tools = [calculator]              # functions with type hints and a docstring: the chat template describes them
tool_call_parser = "qwen25"       # the tiny model writes its calls as Qwen does
max_turns = 3                     # a call, perhaps another one, the answer
custom_rm = right
eval_prompt_data = dict(right=dict(prompt_data=held_out_questions),            # share of held-out questions answered right...
                        called=dict(prompt_data=held_out_questions, custom_rm=called))   # ...and of those calculated
eval_temperature = 0.0

rollout_batch_size = 32           # P prompts
n_samples_per_prompt = 8          # n: 256 samples a step
num_rollout = 25
rollout_shuffle = True
rollout_max_response_len = 64     # all turns together: a call is 8 tokens, its result up to 8, the answer 5
eval_interval = 5
save_interval = 10

advantage_estimator = "grpo"
lr = 2e-4
weight_decay = 0.0
colocate = True                   # trainer and engine, one process each on the same cores
max_tokens_per_gpu = 8192
sglang = dict(max_running_requests=256)
