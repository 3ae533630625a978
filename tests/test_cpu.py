"""
test_cpu.py: is SGLang on plain torch right? A real server with a tiny model, against transformers, and against itself.

Test:  pytest tests/test_cpu.py          (about 25 s: one start of Ray, one of SGLang)
Left out on purpose: the Megatron half of cpu.py; tests/test_model.py runs on it.
"""
import hashlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cpu
from engines import call
from helpers import running_engines

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="cpu.py is for machines with no GPU")


# ---- The parts ---------------------------------------------------------------------------------------------------------
def test_importing_it_is_cheap():
    code = "import sys, cpu; print([m for m in ('torch', 'sglang', 'ray', 'megatron') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_sglang_finds_the_platform():
    from importlib.metadata import entry_points
    plugins = {plugin.name: plugin for plugin in entry_points(group="sglang.srt.platforms")}
    assert plugins["nanoslime_cpu"].load()() == "cpu.CpuPlatform"


def test_murmur_hash_is_murmur_hash():
    """Against scikit-learn's MurmurHash3 of the same 16 bytes; a wrong hash would still look random."""
    from sklearn.utils import murmurhash3_32
    seed = torch.tensor([0, 42, 2**40 + 7, 2**62 + 2**31 + 1], dtype=torch.uint64)         # [N]
    positions = torch.tensor([0, 1, 999, 2**31 - 1])                                        # [N]
    hashed = cpu.murmur_hash32(seed, positions, torch.arange(50))                           # [N, V]
    for row, (s, p) in enumerate(zip(seed.tolist(), positions.tolist())):
        for column in range(50):
            key = s.to_bytes(8, "little") + p.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert hashed[row, column].item() == murmurhash3_32(key, seed=0, positive=True)


def test_products_do_not_depend_on_the_number_of_rows(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)   # put back after the test
    monkeypatch.setattr(torch, "matmul", torch.matmul)
    cpu.make_products_batch_invariant()
    x, bias = torch.randn(70, 96), torch.randn(160)
    weight = torch.randn(160, 96)
    whole, plain = torch.nn.functional.linear(x, weight, bias), x @ weight.T + bias
    torch.testing.assert_close(whole, plain)
    for rows in range(1, 70):
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(torch.matmul(x[:rows], weight.T), torch.matmul(x, weight.T)[:rows]), rows


# ---- The server --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=1, deterministic=True) as engines:
        yield engines


def generate(engines, input_ids: list[int], **sampling) -> tuple[list[int], list[float], dict]:
    """-> response tokens, their log-probs, meta_info"""
    sampling = dict(temperature=1.0, ignore_eos=True) | sampling
    answer = call("POST", engines.router_url + "/generate",
                  dict(input_ids=input_ids, sampling_params=sampling, return_logprob=True), 60.0)
    log_probs, tokens = zip(*[entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert list(tokens) == answer["output_ids"]
    return list(tokens), list(log_probs), answer["meta_info"]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_log_probs_are_those_of_transformers(engines, tiny_model, temperature):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    prompt = [5, 17, 30, 22, 9]
    for seed in range(3):
        tokens, log_probs, meta = generate(engines, prompt, temperature=temperature, max_new_tokens=60,
                                           sampling_seed=seed)
        with torch.no_grad():                # logits at i are about token i + 1
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]     # [R, V]
        # SGLang's log-probs are after the temperature; a greedy request's are of the plain softmax.
        expected = (logits / (temperature or 1.0)).log_softmax(-1)                            # [R, V]
        picked = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]                      # [R]
        torch.testing.assert_close(torch.tensor(log_probs), picked, atol=1e-4, rtol=0)
        assert temperature > 0 or tokens == expected.argmax(-1).tolist()
        assert meta["finish_reason"]["type"] == "length" and meta["weight_version"] == "default"


def test_same_seeds_same_bits(engines):
    """Whatever else is in the batch, in whatever order, and whether the prompt was seen before."""
    rng = random.Random(0)
    jobs = [dict(input_ids=[rng.randrange(3, 50) for _ in range(rng.randrange(3, 60))], sampling_seed=seed,
                 max_new_tokens=rng.randrange(5, 60)) for seed in range(16)]
    jobs += [jobs[0] | dict(sampling_seed=100 + seed) for seed in range(4)]      # one prompt, several samples

    def run(jobs: list[dict], at_a_time: int) -> dict[int, tuple]:
        with ThreadPoolExecutor(at_a_time) as pool:
            answers = list(pool.map(lambda job: generate(engines, **job)[:2], jobs))
        return {job["sampling_seed"]: answer for job, answer in zip(jobs, answers)}

    engines.flush_cache()
    first = run(jobs, len(jobs))
    assert run(jobs[::-1], len(jobs)) == first
    assert run(jobs, 3) == first             # MKL has other kernels for a few rows
    engines.flush_cache()
    assert run(jobs[::-1], 1) == first
    samples = [tuple(first[seed][0]) for seed in (0, 100, 101, 102, 103)]
    assert len(set(samples)) == len(samples), "another seed must give another sample"


def test_checksums_are_of_the_bytes_in_the_checkpoint(engines, tiny_model):
    """/weights_checker: the first 8 bytes of each parameter's SHA-256, under SGLang's own (fused) names."""
    from safetensors.torch import load_file
    hf = load_file(f"{tiny_model}/model.safetensors")

    def checksum(*tensors: torch.Tensor) -> str:
        return hashlib.sha256(torch.cat(tensors).contiguous().numpy().tobytes()).hexdigest()[:16]

    checksums = engines.post("/weights_checker", {"action": "checksum"})[0]["ranks"][0]["checksums"]
    assert checksums["model.embed_tokens.weight"] == checksum(hf["model.embed_tokens.weight"])
    layer = "model.layers.1."
    assert checksums[layer + "self_attn.qkv_proj.weight"] == checksum(
        *[hf[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert checksums[layer + "mlp.gate_up_proj.weight"] == checksum(
        *[hf[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")])
