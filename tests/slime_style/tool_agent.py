"""A tool agent as a slime user writes it: append_response_tokens, a list that is held on to, attributes set on the sample."""
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    sample.rollout_log_probs = None
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = []
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = "use the tool. " + sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response_ids, loss_masks, calls = [], sample.loss_mask, 0
    if args.rollout_max_context_len is not None:
        limit = args.rollout_max_context_len
    else:
        limit = args.context_parallel_size * args.max_tokens_per_gpu
    for turn in range(2):
        params = dict(sampling_params)
        params["max_new_tokens"] = min(6, limit - len(prompt_ids) - len(response_ids))
        output = await post(url, {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response_ids += ids
        sample.append_response_tokens(
            args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=output["meta_info"], text=output["text"])
        if turn == 1:
            break
        observation = state.tokenizer(" tool = 42 ", add_special_tokens=False)["input_ids"]
        response_ids += observation
        sample.append_response_tokens(args, tokens=observation, trainable=False)
        calls += 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = state.tokenizer.decode(response_ids)
    sample.loss_mask = loss_masks
    sample.tool_call_count = calls
    return sample


async def reward_func(args, sample, **kwargs):
    return float(sample.tool_call_count) + sample.effective_response_length / 100


async def group_reward(args, samples, **kwargs):
    """The longest of a group gets 1."""
    longest = max(s.effective_response_length for s in samples)
    return [float(s.effective_response_length == longest) for s in samples]
