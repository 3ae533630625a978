"""
A search agent on a laptop, in the manner of Search-R1 (2503.09516): it learns by GRPO to look up what it cannot know.

    python train.py configs/search_agent.py          some minutes on 2 cores, no GPU

    What is the capital of Peru? <search> capital Peru </search>
    <information> The capital of Peru is Lima. The currency of Peru is sol. </information> <answer> Lima </answer>

First configs/search_sft.py imitates teachers who often search badly or not at all. Then GRPO on real facts, with "right" or "wrong" as
the only word. The held-out questions are about countries of which no stage trains a fact: only a search can tell.
"""
import re

from configs.countries import information, questions

_MAX_SEARCHES = 2                 # of one sample


async def generate(args, sample, sampling_params):
    """The model writes up to a </search> or its end; what is found is put behind, untrained; and so on.

    How far it is, is read off the sample: one that was aborted (partial_rollout) goes on where it was.
    """
    Status = type(sample.status)
    while True:
        shown, _, turn = sample.response.rpartition("</information>")
        if "</search>" in turn:
            if shown.count("<information>") == _MAX_SEARCHES:    # asked once more than it may: over, with no answer
                sample.status = Status.COMPLETED
                break
            found = information(turn.rpartition("</search>")[0].rpartition("<search>")[2])
            ids = args.tokenizer(found, add_special_tokens=False)["input_ids"]
            if sample.response_length + len(ids) >= sampling_params["max_new_tokens"]:
                sample.status = Status.TRUNCATED                 # no room for an answer behind it
                break
            sample.append(ids, trainable=False)
            sample.response += found
        elif sample.status == Status.COMPLETED:                  # it has ended by itself
            break
        sample.status = Status.PENDING       # NOTE: what is not pending is not waited for when a step has enough groups
        sample = await args.generate(sample, sampling_params | {"stop": ["</search>"]})
        if sample.status in (Status.TRUNCATED, Status.ABORTED):
            break
    sample.metadata["searches"] = sample.response.count("</information>")
    return sample


def right(args, sample) -> float:
    return float(re.findall(r"<answer>\s*(.*?)\s*</answer>", sample.response)[-1:] == [sample.label])


def searched(args, sample) -> float:
    return float(sample.metadata["searches"] > 0)


def training_questions() -> list[dict]:
    return questions(held_out=False)


def held_out_questions() -> list[dict]:
    return questions(held_out=True)


hf_checkpoint = "configs/search_sft.py"  # a run file: that run goes first
prompt_data = training_questions
custom_generate_function = generate
custom_rm = right
apply_chat_template = True
eval_temperature = 0.0
eval_prompt_data = dict(right=dict(prompt_data=held_out_questions),            # share of held-out questions answered right...
                        searched=dict(prompt_data=held_out_questions, custom_rm=searched))   # ...and of those looked up

rollout_batch_size = 32           # P prompts
n_samples_per_prompt = 8          # n: 256 samples a step
num_rollout = 50
rollout_shuffle = True
rollout_max_response_len = 64     # all turns together: a search is 4 tokens, what it finds 20, an answer 4
eval_interval = 10
save_interval = 10

lr = 1e-4
weight_decay = 0.0
colocate = True                   # trainer and engine, one process each on the same cores
max_tokens_per_gpu = 8192
sglang = dict(max_running_requests=256)
