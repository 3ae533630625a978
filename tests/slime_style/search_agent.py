"""A search agent as a slime user writes it: turns of the model, a search result between them, lists kept by hand."""
import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SETTINGS = {"max_turns": 3, "turn_tokens": 5, "send": "input_ids"}


def look_up(query: str) -> str:
    return f"\n(found {len(query)})\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "this function begins each sample anew"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(SETTINGS["max_turns"]):
        params = sampling_params | {"max_new_tokens": SETTINGS["turn_tokens"]}
        payload = {"sampling_params": params, "return_logprob": True}
        if SETTINGS["send"] == "text":
            payload["text"] = sample.prompt + response
        else:
            payload["input_ids"] = prompt_ids + response_ids
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        said_ids, said = [item[1] for item in pairs], output["text"]
        response += said
        response_ids += said_ids
        loss_mask += [1] * len(said_ids)
        log_probs += [item[0] for item in pairs]
        if not re.search(r"\d", said):
            break
        found = look_up(said)
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response += found
        response_ids += found_ids
        loss_mask += [0] * len(found_ids)
        log_probs += [0.0] * len(found_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.weight_versions.append(output["meta_info"]["weight_version"])
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    found = sample.response.count("(found")
    return {"score": found + (0.5 if sample.label in sample.response else 0.0), "found": found}
