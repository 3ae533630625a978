"""A rollout, and a data source, as a slime user writes them: training and evaluation in one plain function; a thread at work."""
import asyncio
import copy
import os
import queue
import threading

import torch

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


class Counting(DataSource):
    def __init__(self, args):
        self.args, self.sample_group_index, self.sample_index, self.offset = args, 0, 0, 0
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.prompts = [Sample(prompt=f"{n}+{n}=", label=str(2 * n)) for n in range(12)]

    def get_samples(self, num_samples):
        samples = []
        for prompt in self.prompts[self.offset:self.offset + num_samples]:
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prompt)
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            samples.append(group)
        self.offset += num_samples
        return samples

    def add_samples(self, samples):
        raise RuntimeError(f"Cannot add samples to {self.__class__.__name__}. This is a read-only data source.")

    def path(self, folder, rollout_id):
        return os.path.join(folder, f"rollout/global_dataset_state_dict_{rollout_id}.pt")

    def save(self, rollout_id):
        os.makedirs(os.path.dirname(self.path(self.args.save, rollout_id)), exist_ok=True)
        torch.save(vars(self) | dict(args=None, tokenizer=None, prompts=None), self.path(self.args.save, rollout_id))

    def load(self, rollout_id=None):
        state = torch.load(self.path(self.args.load, rollout_id))
        for key in ("sample_group_index", "sample_index", "offset"):
            setattr(self, key, state[key])

    def __len__(self):
        return len(self.prompts)


async def generate_rollout_async(args, rollout_id, data_source):
    assert args.rollout_global_dataset
    state = GenerateState(args)
    pendings = set()
    for group in data_source.get_samples(args.rollout_batch_size):
        pendings.add(asyncio.create_task(generate_and_rm_group(
            args, group, sampling_params=state.sampling_params.copy() | {"max_new_tokens": 5}, evaluation=False)))
    data = []
    while pendings:
        done, pendings = await asyncio.wait(pendings, return_when=asyncio.FIRST_COMPLETED)
        data += [task.result() for task in done]
    return sorted(data, key=lambda group: group[0].index)


async def eval_rollout(args):
    state = GenerateState(args)
    tasks = []
    for index, prompt in enumerate(("1+1=", "2+2=", "3+3=")):
        sample = Sample(index=index, prompt=prompt, tokens=state.tokenizer(prompt)["input_ids"], label="2")
        tasks.append(generate_and_rm(args, sample, sampling_params={"temperature": 0.0, "max_new_tokens": 4}, evaluation=True))
    data = await asyncio.gather(*tasks)
    return {"sums": {"rewards": [sample.get_reward_value(args) for sample in data], "samples": data,
                     "truncated": [sample.status == Sample.Status.TRUNCATED for sample in data]}}


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return RolloutFnEvalOutput(data=run(eval_rollout(args)), metrics={"eval/own": rollout_id})
    data = run(generate_rollout_async(args, rollout_id, data_source))
    return RolloutFnTrainOutput(samples=data, metrics={"rollout/own": rollout_id})


def generate_in_a_thread(args, rollout_id, data_source, evaluation=False):
    """A worker with an event loop of its own fills a queue; returns the bare list."""
    results = queue.Queue()

    def work():
        async def loop():
            groups = data_source.get_samples(args.rollout_batch_size)
            for done in asyncio.as_completed([generate_and_rm_group(args, group, {}) for group in groups]):
                results.put(await done)
        asyncio.run(loop())
    threading.Thread(target=work, daemon=True).start()
    return [results.get(timeout=60) for _ in range(args.rollout_batch_size)]


def add_back(args, rollout_id, data_source, evaluation=False):
    """Two batches are made; one is trained, the other put back, to be first the next time."""
    groups = data_source.get_samples(2 * args.rollout_batch_size)
    data_source.add_samples(groups[args.rollout_batch_size:])

    async def all_of_them():
        return await asyncio.gather(*[generate_and_rm_group(args, g, {}) for g in groups[:args.rollout_batch_size]])
    return RolloutFnTrainOutput(samples=run(all_of_them()))
