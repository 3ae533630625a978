"""
test_weights_sync.py: does an engine compute with the trainer's weights? Real Megatron ranks, two real SGLang servers, and
transformers as the judge.

    Hugging Face folder A --load--> trainers (1 process | TP 2 | PP 2) --push by each transport--> engines: log-probs == A's

Test:  pytest tests/test_weights_sync.py     (about 150 s on two cores: three SGLang starts, five Megatron ranks)
Left out on purpose: NCCL and CUDA IPC (a GPU's business); engines of TP 2, which a CPU cannot run.
"""
import contextlib
import dataclasses
import itertools
import pathlib
import zlib

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import buffer
import convert
import families
import weights_sync
from actor import Trainers
from buffer import Sample, Status
from engines import EngineError, Engines, call
from helpers import make_cfg, running_engines

LAYOUTS = {"one": dict(actor_num_gpus=1),
           "tp2": dict(actor_num_gpus=2, tensor_model_parallel_size=2),
           "dp2": dict(actor_num_gpus=2),    # each replica serves one of the engines, where weights travel through memory
           "pp2": dict(actor_num_gpus=2, pipeline_model_parallel_size=2)}
SMALL = 40_000                               # bytes of a bucket: several tensors each, several buckets
versions = itertools.count(1)                # every push has its own number, so that a stale answer shows


# ---- What is shared ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    here = str(pathlib.Path(__file__).parent)    # trainers run functions of this file
    env = {"env_vars": {"PYTHONPATH": f"{here}:{pathlib.Path(here).parent}"}}
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, dict(runtime_env=env), rollout_num_gpus=2) as engines:
        yield engines


@pytest.fixture(scope="module", params=LAYOUTS)
def trainers(request, engines, tiny_model, tmp_path_factory):
    # lr: a step that moves every log-prob. Every sync is checked.
    cfg = make_cfg(**LAYOUTS[request.param], start_timeout_s=400.0, train_timeout_s=300.0, lr=0.05, global_batch_size=4,
                   n_samples_per_prompt=4, rollout_batch_size=1, update_weight_buffer_size=SMALL, check_weight_update_interval=1,
                   rollout_num_gpus=2)
    trainers = Trainers(cfg)
    try:
        trainers.start(tiny_model, {}, 10, str(tmp_path_factory.mktemp("disk")))
        yield trainers
    finally:
        with contextlib.suppress(EngineError):   # the next trainers make a group of the same name
            engines.post("/destroy_weights_update_group", {"group_name": weights_sync.GROUP}, timeout_s=120.0)
        trainers.stop()


@pytest.fixture
def other_model(tiny_model, tmp_path, request) -> str:
    """A folder with the tiny model's shapes and weights that only this test has, norms included (they start as ones)."""
    return write_other_model(tiny_model, tmp_path / "other", request.node.name)


def write_other_model(tiny_model: str, folder: pathlib.Path, seed: str) -> str:
    random = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    weights = load_file(f"{tiny_model}/model.safetensors")
    for name in weights:
        noise = torch.randn(weights[name].shape, generator=random)
        weights[name] = 1 + 0.3 * noise if "norm" in name else 0.2 * noise
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((pathlib.Path(tiny_model) / file).read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def on_every_rank(trainers: Trainers, function, *args) -> list:
    """function(TrainActor, ...) inside each trainer -> the answers of all ranks."""
    import ray
    return ray.get([actor.__ray_call__.remote(function, *args) for actor in trainers.actors], timeout=300)


def push(trainers: Trainers, engines: Engines, **kw) -> int:
    """The trainers' weights as a new version -> its number."""
    version = next(versions)
    on_every_rank(trainers, setattr, "version", version)
    trainers.push_weights(engines, version, **kw)
    return version


def load(trainers: Trainers, folder: str, **changes) -> None:
    """Other weights into the running trainers, and other settings for their syncs."""
    def inside(actor, folder, changes):
        actor.model.load_hf(folder)
        actor.sync.cfg = dataclasses.replace(actor.cfg, **changes)
    on_every_rank(trainers, inside, folder, changes)


@torch.no_grad()
def assert_engines_compute_with(folder: str, urls: list[str], version: int) -> None:
    """What an engine samples has the log-probs that transformers gives the same tokens under the weights in `folder`."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, url in enumerate(urls):
        prompt = [5 + i, 9, 30, 12, 7, 41]
        answer = call("POST", url + "/generate", dict(
            input_ids=prompt, return_logprob=True,
            sampling_params=dict(temperature=1.0, max_new_tokens=24, ignore_eos=True)), 60.0)
        tokens = torch.tensor([prompt + answer["output_ids"]])
        want = model(tokens).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[len(prompt) - 1:, 0]   # [R]
        have = torch.tensor([logp for logp, _, _ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(have, want, atol=1e-4, rtol=0)
        assert answer["meta_info"]["weight_version"] == str(version)


# ---- Gathering ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 2**30])
def test_buckets_hold_every_tensor_once(trainers, other_model, bucket_bytes):
    load(trainers, other_model)
    want = load_file(f"{other_model}/model.safetensors")     # tied embeddings: no lm_head in it

    def inside(actor, bucket_bytes):
        return [(bucket.names, bucket.flat.numel(), {n: t.clone() for n, t in bucket.tensors()})
                for bucket in weights_sync.buckets(actor.model, bucket_bytes)]
    for got in on_every_rank(trainers, inside, bucket_bytes):            # the other ranks only help, but they see the same
        names = [name for bucket in got for name in bucket[0]]
        assert sorted(names) == sorted(want) and set(names) == families.hf_names(convert.load_hf_config(other_model))
        for names, nbytes, tensors in got:
            assert nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
            assert nbytes <= bucket_bytes or len(names) == 1, f"{names} are {nbytes} bytes"
            for name in names:
                assert torch.equal(tensors[name], want[name]), name
        stages = trainers.cfg.pipeline_model_parallel_size
        assert {1: len(got) == len(want), SMALL: 2 * stages < len(got) < len(want), 2**30: len(got) == stages}[bucket_bytes]


def test_saved_folder_is_the_model(trainers, other_model, tmp_path):
    from transformers import AutoModelForCausalLM
    load(trainers, other_model)
    trainers.call("save_hf", str(tmp_path / "saved"))
    saved, want = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
                   for folder in (tmp_path / "saved", other_model))
    assert saved.keys() == want.keys()
    for name in want:
        assert torch.equal(saved[name], want[name]), name


# ---- Sending -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_weights_arrive(trainers, engines, other_model, transport):
    load(trainers, other_model, update_weight_transport=transport)
    version = next(versions)
    on_every_rank(trainers, setattr, "version", version)
    with pytest.raises(AssertionError, match=f"pushed weights of version {version}, the loop is at {version + 1}"):
        trainers.push_weights(engines, version + 1)
    answer = trainers.push_weights(engines, version)
    assert_engines_compute_with(other_model, engines.urls, version)
    numbers = sum(t.numel() for t in load_file(f"{other_model}/model.safetensors").values())
    assert answer["perf/update_weights_bytes"] == 4 * numbers            # fp32


def test_trained_weights_arrive(trainers, engines, other_model, tmp_path):
    """The parameters that the optimizer writes are the ones that are sent."""
    load(trainers, other_model, update_weight_transport="tensor")
    samples = []
    for i in range(4):
        sample = Sample(group_index=0, index=i, tokens=[5, 6, 7], reward=float(i % 2), status=Status.COMPLETED)
        sample.append([8 + i, 20, 30 + i, 1], [-2.0] * 4)
        samples.append(sample)
    data = buffer.to_train_data(trainers.cfg, samples, [-1.0, 1.0, -1.0, 1.0])
    before = load_file(f"{other_model}/model.safetensors")
    cfg = trainers.cfg
    dp_size = cfg.actor_num_gpus // (cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size)
    trainers.train(1, data, buffer.plan(cfg, data, dp_size))
    trainers.call("save_hf", str(tmp_path / "saved"))
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert all((after[name] - before[name]).abs().max() > 0.01 for name in before), "Adam's first step moves each by about lr"
    version = push(trainers, engines)
    assert_engines_compute_with(str(tmp_path / "saved"), engines.urls, version)


# ---- Verifying ---------------------------------------------------------------------------------------------------------
def flip_one_bit(actor):
    """From now on this rank sends another bit in one element of the last bucket's last tensor."""
    handle = type(actor.sync).handle

    def corrupted(bucket):
        if bucket.names[-1] == "model.norm.weight":
            bucket = actor.kept = dataclasses.replace(bucket, flat=bucket.flat.clone())
            bucket.flat[-4] ^= 1             # the lowest bit of an fp32 number
        return handle(actor.sync, bucket)
    actor.sync.handle = corrupted


def lose_one_bucket(actor):
    send = type(actor.sync).send_tensor
    actor.sync.send_tensor = lambda bucket, *rest: (
        rest[-1] if "model.norm.weight" in bucket.names else send(actor.sync, bucket, *rest))


def mend(actor):
    for method in ("handle", "send_tensor"):
        vars(actor.sync).pop(method, None)


@pytest.mark.parametrize("damage", [flip_one_bit, lose_one_bucket])
@pytest.mark.parametrize("trainers", ["one"], indirect=True)
def test_a_damaged_sync_is_noticed(trainers, engines, other_model, damage):
    load(trainers, other_model, update_weight_transport="tensor")
    on_every_rank(trainers, damage)
    with pytest.raises(RuntimeError, match=r"engine 0 .* differs from the trainer in .*model\.norm\.weight"):
        push(trainers, engines)
    on_every_rank(trainers, mend)
    push(trainers, engines)                  # engines that were left paused take the next one


def test_one_wrong_element_is_found_and_named(engines, tiny_model, tmp_path):
    """Checksums of a folder's tensors against an engine that has them, and one that has all but one element."""
    good = load_file(f"{tiny_model}/model.safetensors")
    bad = pathlib.Path(write_other_model(tiny_model, tmp_path / "bad", "unused"))
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = good[name].clone()
    changed[-1, -1] += 1e-6
    save_file(good | {name: changed}, bad / "model.safetensors", metadata={"format": "pt"})
    engines.post("/update_weights_from_disk", [{"model_path": tiny_model}, {"model_path": str(bad)}])
    expected = weights_sync.expected_checksums(good, 1, 2, "cpu")
    answers = engines.post("/weights_checker", {"action": "checksum"})
    weights_sync.compare_checksums(expected, answers[:1], [0])
    with pytest.raises(RuntimeError, match=r"engine 1 .* in 1 of .*\['model\.layers\.1\.self_attn\.qkv_proj\.weight'\]"):
        weights_sync.compare_checksums(expected, answers, [0, 1])


def test_a_parameter_that_nobody_sent_is_named():
    answer = {"ranks": [{"checksums": {"a": "1", "b": "2"}, "parallelism_info": {"tp_rank": 0}}]}
    weights_sync.compare_checksums([{"a": "1", "b": "2"}], [answer], [4])
    with pytest.raises(AssertionError, match="engine 4 has 2 ranks, and 1 of them"):
        weights_sync.compare_checksums([{"a": "1", "b": "2"}] * 2, [answer], [4])
    with pytest.raises(RuntimeError, match=r"\['b'\]"):
        weights_sync.compare_checksums([{"a": "1"}], [answer], [4])
    with pytest.raises(RuntimeError, match=r"\['c'\]"):
        weights_sync.compare_checksums([{"a": "1", "b": "2", "c": "3"}], [answer], [4])


def test_heads_are_repeated_where_an_engine_has_more_ranks():
    """Qwen2.5-1.5B has 2 key-value heads: ranks 0 and 1 of 4 hold the first, 2 and 3 the second. Queries are cut in 4."""
    q, k = torch.arange(8)[:, None], torch.arange(4)[:, None]
    def cut(tensor, heads):
        return [weights_sync.shard("qkv_proj", tensor, rank, 4, heads).flatten().tolist() for rank in range(4)]
    assert cut(q, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut(k, 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    both = weights_sync.expected_checksums({"q_proj.weight": q, "k_proj.weight": k}, 4, 2, "cpu")
    assert len({row["qkv_proj.weight"] for row in both}) == 4


# ---- After an engine was replaced ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["distributed", "tensor", "disk"])
@pytest.mark.parametrize("trainers", ["pp2"], indirect=True)
def test_a_restarted_engine_gets_the_weights(trainers, engines, tiny_model, other_model, tmp_path, transport):
    """Only the new engine is sent to; then both again. A process group must be left and joined by the right ones."""
    import ray
    load(trainers, other_model, update_weight_transport=transport)
    version = push(trainers, engines)
    if transport == "distributed":           # one restart serves all: for the others the engine gets other weights
        psutil.Process(ray.get(engines.actors[1][0].pid.remote())).kill()
        engines.restart(1)
    else:
        engines.post("/update_weights_from_disk", {"model_path": tiny_model}, only=[1])
    with pytest.raises(AssertionError):
        assert_engines_compute_with(other_model, engines.urls[1:], version)
    trainers.push_weights(engines, None, only=[1])
    assert_engines_compute_with(other_model, engines.urls, version)

    third = write_other_model(tiny_model, tmp_path / "third", "third" + transport)
    load(trainers, third, update_weight_transport=transport)
    version = push(trainers, engines)
    assert_engines_compute_with(third, engines.urls, version)
