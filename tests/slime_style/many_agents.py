"""Several samples of one, as a slime user writes it: args copied and written to, samples copied from the one that was given."""
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


async def solve(args, sample, key):
    sample = deepcopy(sample)
    params = deepcopy(args.sampling_params)
    params["max_new_tokens"] = min(params["max_new_tokens"], args.rollout_max_context_len - len(sample.tokens))
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens += [item[1] for item in pairs]
    sample.response_length += len(pairs)
    sample.rollout_log_probs = [item[0] for item in pairs]
    sample.response = output["text"]
    sample.status = Sample.Status.COMPLETED
    args.results[key].append(sample)


async def run_system(args, sample):
    args = deepcopy(args)
    args.results = {"solver": [], "critic": []}
    for key in ("solver", "critic"):
        for _ in range(args.num_parallel):
            await solve(args, sample, key)
    rewards = await batched_async_rm(args, args.results["solver"])
    for one, reward in zip(args.results["solver"], rewards):
        one.reward = 2 * reward
    return args.results["solver"] + args.results["critic"]


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.sampling_params = sampling_params
    args.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    args.num_parallel = 1 if evaluation else 2
    samples = await load_function("many_agents.run_system")(args, sample)
    for one in samples:
        one.rollout_id = sample.index
    return samples
