"""
test_model.py: real Megatron ranks on gloo against transformers, and every layout against every other.

    tiny HF models --transformers, one sample at a time--> log-probs, loss, gradients   == ?
                   --model.py: 1 process | TP 2 | PP 2 | DP 2, packed-------------------^

Run:   pytest -s tests/test_model.py    CPU only, about 90 s; prints the differences. Each layout is started once.
The vocabulary of 101 is odd on purpose, layers 2, everything fp32; clip, KL and entropy terms are all active.
"""
import json
import math

import pytest
import torch

import algos
import buffer
import convert
import families
from helpers import make_cfg, run_workers

LAYOUTS = {"one": (1, dict()), "tp2": (2, dict(tensor_model_parallel_size=2)), "pp2": (2, dict(pipeline_model_parallel_size=2)),
           "dp2": (2, dict())}               # name -> processes, settings
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
FAMILIES = {"qwen3": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
            "qwen2": ("Qwen2Config", dict(tie_word_embeddings=False)),      # biases
            "llama": ("LlamaConfig", dict(head_dim=8, tie_word_embeddings=False, rope_parameters=dict(
                rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0,
                original_max_position_embeddings=16)))}                     # bends angles within these short sequences
COMMON = dict(rollout_temperature=0.7, eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01,
              log_probs_chunk_size=7, lr=1e-3, min_lr=2e-4, lr_decay_style="linear", train_timeout_s=300.0,
              adam_eps=1e-5)                 # above the rounding noise: Adam turns noise on tiny gradients into whole steps
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
VARIANTS = {                                 # all must train alike
    "distributed optimizer": dict(),
    "plain optimizer": dict(use_distributed_optimizer=False),
    "small micro-batches": dict(max_tokens_per_gpu=40),
    "recomputation": dict(megatron=RECOMPUTE),
    "sequence parallel": dict(sequence_parallel=True),                      # only where tp is 2
    "sequence parallel, plain": dict(sequence_parallel=True, use_distributed_optimizer=False, megatron=RECOMPUTE),
}
CLIP, STEPS = 0.5, 3                         # the gradient norm is above CLIP (asserted)


# ---- Data and the reference ------------------------------------------------------------------------------------------
def write_model(family: str, folder) -> str:
    cls, extra = FAMILIES[family]
    return write_random(cls, SIZES | extra, folder, seed=len(family))


def write_random(cls: str, config: dict, folder, published: dict | None = None, seed: int = 0) -> str:
    """A model of that config class with random weights; published: what config.json says otherwise."""
    import transformers
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**config))
    for name, p in [*model.named_parameters(), *model.named_buffers()]:      # norms start at 1 and biases at 0, which would
        if "inv_freq" not in name:                                           # hide a mistake
            torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    if published:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | published))
    return str(folder)


def make_samples() -> list[buffer.Sample]:
    """3 groups of 4; one sample is longer than a small micro-batch, one has no trainable token, one a hole."""
    g = torch.Generator().manual_seed(1)

    def ids(low, high):
        return torch.randint(0, 101, (int(torch.randint(low, high, (1,), generator=g)),), generator=g).tolist()
    samples = []
    for i in range(12):
        s = buffer.Sample(group_index=i // 4, index=i, tokens=ids(2, 9), reward=0.0)
        response = ids(1, 20) if i != 5 else ids(50, 51)
        s.append(response, [-1.0] * len(response), trainable=i != 7)
        if i == 2:
            s.append(ids(3, 4), trainable=False)
            s.append(ids(2, 3), [-1.0] * 2)
        samples.append(s)
    return samples


def train_data(samples, family_reference) -> dict:
    cfg = make_cfg(**COMMON)
    data = buffer.to_train_data(cfg, samples, [s.reward for s in samples])
    return data | {key: [family_reference[key][s.index] for s in samples] for key in ("advantages", "log_probs", "ref_log_probs")}


def ask_transformers(family: str, folder: str, samples) -> dict:
    """Log-probs one sample at a time, without packing or padding; then loss and gradients of one step."""
    import transformers
    cfg, g = make_cfg(**COMMON), torch.Generator().manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=convert.load_hf_config(folder),
                                                              attn_implementation="eager", dtype=torch.float32)
    logp, entropy = [], []
    for s in samples:
        n = s.response_length
        z = model(torch.tensor([s.tokens])).logits[0, -n - 1:-1] / cfg.rollout_temperature                  # [R_i, V]
        d = torch.distributions.Categorical(logits=z)
        logp.append(d.log_prob(torch.tensor(s.tokens[-n:])))
        entropy.append(d.entropy())

    def noise(scale, mean=0.0):
        return [mean + scale * torch.randn(len(x), generator=g) for x in logp]
    out = {"folder": folder, "logp": [x.detach() for x in logp], "advantages": noise(1.0, -0.5),
           "log_probs": [x.detach() + e for x, e in zip(logp, noise(0.3))],                                 # some get clipped
           "ref_log_probs": [x.detach() + e for x, e in zip(logp, noise(0.3))]}
    data = train_data(samples, out)
    buffer.plan(cfg, data, 1)
    weight = torch.cat([m * w for m, w in zip(data["loss_masks"], data["loss_weights"])])
    sample = torch.arange(len(logp)).repeat_interleave(torch.tensor([len(x) for x in logp]))
    loss, sums = algos.policy_loss(cfg, algos.LossInput(
        weight, sample, torch.cat(logp), torch.cat(entropy), advantages=torch.cat(data["advantages"]),
        old_logp=torch.cat(data["log_probs"]), ref_logp=torch.cat(data["ref_log_probs"])))
    loss.backward()
    names = families.hf_names(model.config)   # without the stored twin of a tied embedding
    out["gradients"] = {n: g for n, g in gradients(model) if n in names}
    out["metrics"] = algos.reduce_metrics({k: float(v) for k, v in sums.items()})
    out["metrics"]["grad_norm"] = math.sqrt(sum(float(p.square().sum()) for p in out["gradients"].values()))
    return out


def gradients(model):
    """By the names of the checkpoint: transformers keeps a layer's experts in one parameter."""
    for name, p in model.named_parameters():
        if ".experts." not in name:
            yield name, p.grad
            continue
        head, what = name.rsplit(".", 1)     # gate_up_proj [E, 2F, H], down_proj [E, H, F]
        for e, grad in enumerate(p.grad):
            for part, one in zip(what.removesuffix("_proj").split("_"), grad.chunk(2) if "gate" in what else [grad]):
                yield f"{head}.{e}.{part}_proj.weight", one


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root, samples = tmp_path_factory.mktemp("model"), make_samples()
    families = {f: ask_transformers(f, write_model(f, root / f), samples) for f in FAMILIES}
    return {"samples": samples, "families": families, "root": root}


# ---- What one layout does --------------------------------------------------------------------------------------------
class Rank:
    """The calls that actor.py makes, on this rank."""

    def __init__(self, rank, world, port, settings, job):
        import model                         # Megatron: 8 s, so only in the workers
        self.make_model, self.job = model.MegatronModel, job
        self.settings = COMMON | settings | dict(actor_num_gpus=world)
        self.grid = model.init_distributed(make_cfg(**self.settings), rank, world, "127.0.0.1", port)

    def model(self, family="qwen3", trainable=True, **changes):
        cfg = make_cfg(**self.settings | changes)
        return self.make_model(cfg, self.grid, self.job["families"][family]["folder"], 10, trainable)

    def batches(self, model, family="qwen3", only=None):
        samples = self.job["samples"] if only is None else [self.job["samples"][i] for i in only]
        data = train_data(samples, self.job["families"][family])
        plan = buffer.plan(model.cfg, data, self.grid.dp_size)
        return [model.pack(data, one) for one in plan[0][self.grid.dp_rank]]

    def step(self, model, batches):
        return model.train_step(batches, lambda x: algos.policy_loss(model.cfg, x))

    def weights(self, model):
        return {name: p.detach().clone() for name, p in model.named_weights()}

    def log_probs(self, model, batches):
        """{sample: logp}, {} on all but the last stage."""
        out = model.forward_only(batches)
        return {i: own for b, logp in zip(batches, out) for i, own in zip(b.samples, logp.split(b.lengths))}


def work(rank, world, port, layout, job):
    r = Rank(rank, world, port, LAYOUTS[layout][1], job)
    g = r.grid
    out = {"layout": layout, "place": (g.pp_rank, g.tp_rank, g.dp_rank), "logp": {}, "gradients": {}, "first": {}, "variants": {}}
    for family in FAMILIES:
        m = r.model(family, trainable=False, sequence_parallel=g.tp_size > 1, max_tokens_per_gpu=60)
        out["logp"][family] = r.log_probs(m, r.batches(m, family))
        m = r.model(family, use_distributed_optimizer=False, clip_grad=1e6, sequence_parallel=g.tp_size > 1)
        out["first"][family] = r.step(m, r.batches(m, family))
        out["gradients"][family] = {name: p.main_grad.clone() for name, p in m.named_weights() if isinstance(p, torch.nn.Parameter)}
    for name, changes in VARIANTS.items():
        if changes.get("sequence_parallel") and g.tp_size == 1:
            continue
        m = r.model(clip_grad=CLIP, **changes)
        out["variants"][name] = [r.step(m, r.batches(m)) for _ in range(STEPS)]
    m = r.model(clip_grad=0.0, use_distributed_optimizer=False)
    out["no clipping"] = [r.step(m, r.batches(m, only=[3])) for _ in range(2)]   # with dp 2, one rank has nothing at all
    out |= checkpoints(r, layout, job["root"])
    out |= accidents(r)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return out


def checkpoints(r, layout, root) -> dict:
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer
    # As Megatron sets them where Transformer Engine is installed, whose Adam has another state.
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.HAVE_APEX_OR_TE = True
    out, folder = {}, root / f"checkpoint_{layout}"
    m = r.model(clip_grad=CLIP)
    for _ in range(STEPS):
        r.step(m, r.batches(m))
    if r.grid.rank == 0:                     # what a killed save leaves behind, and an older checkpoint of the same name
        for name in (f"{folder.name}.part", folder.name):
            (root / name).mkdir()
            (root / name / "__0_0.distcp").write_text("half of it")
    torch.distributed.barrier()
    torch.manual_seed(7)
    m.save(folder, {"step": 3, "text": layout})
    if r.grid.rank == 0:
        (root / f"{folder.name}.part").mkdir()                             # the next save was killed
        (root / f"{folder.name}.part" / "common.pt").write_text("half of it")
    torch.distributed.barrier()
    out["next"] = [r.step(m, r.batches(m)) for _ in range(2)]
    for name in dict.fromkeys((layout, "tp2")):   # our own, and the one that was written under TP 2
        m = r.model(clip_grad=CLIP)
        extra = m.load(root / f"checkpoint_{name}")
        out[f"loaded from {name}"] = [r.step(m, r.batches(m)) for _ in range(2)], extra, torch.get_rng_state().sum()
    out["folders"] = sorted(p.name for p in root.glob(f"checkpoint_{layout}*"))
    if layout == "one":
        m.save(folder, {"step": 5})          # over the killed one, and over the good one
        out["folders again"] = sorted(p.name for p in root.glob(f"checkpoint_{layout}*"))
        out["extra again"] = m.load(folder)
    return out


def accidents(r) -> dict:
    """A NaN in one micro-batch of one data-parallel rank; weights swapped out and in; a nap; then the step that was due."""
    out = {}
    m = r.model(clip_grad=CLIP, max_tokens_per_gpu=40)
    for _ in range(STEPS):
        r.step(m, r.batches(m))
    before, bad = r.weights(m), r.batches(m)
    if r.grid.dp_rank == r.grid.dp_size - 1:
        bad[-1].per_token["advantages"][bad[-1].weight.nonzero()[0]] = math.nan
    try:
        r.step(m, bad)
        out["nan"] = None
    except FloatingPointError as error:
        out["nan"] = str(error)
    after = r.weights(m)
    out["unchanged by nan"] = all(torch.equal(before[n], after[n]) for n in before)

    logp = r.log_probs(m, r.batches(m))
    saved = m.snapshot()
    m.load_hf(r.job["families"]["qwen3"]["folder"])
    other = r.log_probs(m, r.batches(m))
    m.restore(saved)
    again = r.log_probs(m, r.batches(m))
    out["swap"] = [all(torch.equal(logp[i], other[i]) for i in logp), all(torch.equal(logp[i], again[i]) for i in logp)]
    m.sleep()                                # memory handed to the engine, and back
    out["asleep"] = sum(storage.nbytes() for storage, _ in m.storages())
    m.wake()
    out["weights back"] = all(torch.equal(before[n], p) for n, p in r.weights(m).items())
    out["after accidents"] = [r.step(m, r.batches(m))]
    return out


# ---- Starting the layouts: TP 2 first, because the others read its checkpoint ------------------------------------------
def start(layout, job):
    return run_workers(work, LAYOUTS[layout][0], layout, job, limit_s=400)


@pytest.fixture(scope="module")
def tp2(job):
    return start("tp2", job)


@pytest.fixture(scope="module")
def one(job, tp2):
    return start("one", job)


@pytest.fixture(scope="module")
def pp2(job, tp2):
    return start("pp2", job)


@pytest.fixture(scope="module")
def dp2(job, tp2):
    return start("dp2", job)


@pytest.fixture(params=LAYOUTS)
def ranks(request):
    return request.getfixturevalue(request.param)


def close(got: list[dict], want: list[dict], rel=1e-5, but=()):
    """Metrics of some steps, name by name."""
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want)):
        assert a.keys() == b.keys()
        for name in a.keys() - set(but):
            assert a[name] == pytest.approx(b[name], rel=rel, abs=rel), f"step {k}: {name}"


# ---- Against transformers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_transformers(job, ranks, family):
    want, seen, worst = job["families"][family]["logp"], {}, 0.0
    for rank in ranks:
        for i, logp in rank["logp"][family].items():
            assert logp.shape == want[i].shape
            worst = max(worst, float((logp - want[i]).abs().max()))
            seen.setdefault(rank["place"][2], set()).add(i)
    print(f"\n{family} on {ranks[0]['layout']}: max |logp - transformers| {worst:.1e}")
    assert worst < 1e-4
    assert set.union(*seen.values()) == set(range(12)) and sum(map(len, seen.values())) == 12   # each on one dp rank
    assert max(float(x.max()) for x in want) < -1e-3 and min(float(x.min()) for x in want) > -60     # a real distribution


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_transformers(job, ranks, family):
    reference = job["families"][family]
    for rank in ranks:
        got = rank["first"][family]
        for name, value in reference["metrics"].items():
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert abs(reference["metrics"]["loss"]) > 0.01 and 0 < reference["metrics"]["pg_clipfrac"] < 1

    hf_config = convert.load_hf_config(reference["folder"])
    got = {}
    for pp in {r["place"][0] for r in ranks}:                              # the shards of each stage, in TP order
        stage = sorted((r for r in ranks if r["place"][0] == pp and r["place"][2] == 0), key=lambda r: r["place"][1])
        for name in stage[0]["gradients"][family]:
            shards = [r["gradients"][family][name] for r in stage]
            if families.find_rule(hf_config, name)[0].kind is families.REPLICATED:
                assert all(torch.allclose(s, shards[0], atol=1e-6) for s in shards), f"{name} differs between TP ranks"
            got |= families.to_hf(hf_config, name, shards)
    assert got.keys() == reference["gradients"].keys()
    largest = max(float(g.abs().max()) for g in reference["gradients"].values())
    for name, want in reference["gradients"].items():
        worst = float((got[name] - want).abs().max())
        assert worst <= 1e-4 * float(want.abs().max()) + 1e-6 * largest, (name, worst)
    for r in ranks:                          # DP ranks hold the same sum
        twin = next(q for q in ranks if q["place"][:2] == r["place"][:2])
        for name, gradient in r["gradients"][family].items():
            assert torch.equal(gradient, twin["gradients"][family][name])


# ---- Layouts against each other ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_train_alike(one, ranks, variant):
    """Three steps with clipping, so that gradients, clip, Adam and schedule all have to agree."""
    if variant not in ranks[0]["variants"]:
        pytest.skip("sequence parallelism needs tp > 1")
    want, got = one[0]["variants"]["distributed optimizer"], ranks[0]["variants"][variant]
    worst = {key: max(abs(a[key] / b[key] - 1) for a, b in zip(got, want)) for key in ("loss", "grad_norm")}
    print(f"\n{ranks[0]['layout']}, {variant}: relative difference to 1 process over {STEPS} steps: "
          f"loss {worst['loss']:.1e}, grad norm {worst['grad_norm']:.1e}")
    for rank in ranks:                       # the metrics are the same on every rank
        close(rank["variants"][variant], want)
    assert want[0]["grad_norm"] > CLIP and want[2]["loss"] < want[0]["loss"]
    assert [w["lr"] for w in want] == pytest.approx([1e-3, 0.92e-3, 0.84e-3])   # to 2e-4 within 10 steps
    assert want[0]["tokens"] == sum(map(sum, (s.loss_mask for s in make_samples())))


def test_one_sample_on_two_ranks_and_no_clipping(one, ranks):
    want = one[0]["no clipping"]
    for rank in ranks:
        close(rank["no clipping"], want)
    assert want[0]["grad_norm"] > 0 and want[0]["loss"] != want[1]["loss"]


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
def test_checkpoint_goes_on_under_any_layout(one, ranks, request):
    layout = next(name for name in LAYOUTS if request.node.callspec.params["ranks"] == name)
    for rank in ranks:
        close(rank["next"], one[0]["next"])
        assert rank["next"][0]["lr"] < rank["variants"]["distributed optimizer"][-1]["lr"]
        own, extra, rng = rank[f"loaded from {layout}"]
        assert own == rank["next"]           # the same layout: to the last bit
        assert extra == {"step": 3, "text": layout}
        other, extra, other_rng = rank["loaded from tp2"]
        close(other, one[0]["next"])
        assert extra == {"step": 3, "text": "tp2"}
        assert rng == other_rng == torch.Generator().manual_seed(7).get_state().sum()     # as it was at the save
    assert ranks[0]["folders"] == [f"checkpoint_{layout}", f"checkpoint_{layout}.part"]
    if layout == "one":
        assert ranks[0]["folders again"] == ["checkpoint_one"] and ranks[0]["extra again"] == {"step": 5}


# ---- Accidents -------------------------------------------------------------------------------------------------------
def test_nan_stops_every_rank_and_changes_nothing(one, ranks):
    for rank in ranks:
        assert rank["nan"] and "the loss is nan" in rank["nan"] and "weights are unchanged" in rank["nan"]
        assert rank["unchanged by nan"]
        close(rank["after accidents"], one[0]["next"][:1])                 # nor is anything left in the gradients


def test_snapshot_and_restore(ranks):
    for rank in ranks:
        same_under_other_weights, same_after = rank["swap"]
        assert same_after and rank["weights back"] and rank["asleep"] == 0
        if rank["logp"]["qwen3"]:            # only the last stage has log-probs to tell by
            assert not same_under_other_weights
