"""
How a conversation with a search engine runs, and how it is graded: the hooks of configs/search_agent.py.

    question --model--> ... </search> --BM25--> <information> ... </information> --model--> ... </search>, or the end
                        trained                 not trained, log-prob 0             trained

Test:  pytest tests/test_search_agent.py
Knows nothing about: countries; another corpus is another information(query).
"""
import re

from configs.countries import information

MAX_SEARCHES = 2                  # of one sample


async def generate(args, sample, sampling_params):
    """A custom_generate_function: the model writes up to a </search> or its end; what is found is put behind it; and so on.

    How far it is, is read off the sample: one that was aborted (partial_rollout) goes on where it was.
    """
    Status = type(sample.status)
    while True:
        shown, _, turn = sample.response.rpartition("</information>")
        if "</search>" in turn:              # perhaps with more behind it: a larger model's token may be ">\n"
            if shown.count("<information>") >= MAX_SEARCHES:     # asked once more than it may: over, with no answer
                sample.status = Status.COMPLETED
                break
            found = information(turn.rpartition("</search>")[0].rpartition("<search>")[2])
            ids = args.tokenizer(found, add_special_tokens=False)["input_ids"]
            if sample.response_length + len(ids) >= sampling_params["max_new_tokens"]:   # the limit is for all turns together
                sample.status = Status.TRUNCATED
                break
            sample.append(ids, trainable=False)
            sample.response += found         # until the next turn decodes all of it anew
        elif sample.status == Status.COMPLETED:                  # the last turn was no search
            break
        sample.status = Status.PENDING       # NOTE: or a step that has its groups takes it for finished, and does not wait
        sample = await args.generate(sample, sampling_params | {"stop": ["</search>"]})
        if sample.status in (Status.TRUNCATED, Status.ABORTED):
            break
    sample.metadata["searches"] = sample.response.count("</information>")
    return sample


def right(args, sample) -> float:
    """A custom_rm: is the last answer the label, letter by letter?"""
    return float(re.findall(r"<answer>\s*(.*?)\s*</answer>", sample.response)[-1:] == [sample.label])


def searched(args, sample) -> float:
    """A custom_rm for evaluation: did it look anything up?"""
    return float(sample.metadata["searches"] > 0)
