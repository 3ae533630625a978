"""
test_moe.py: routing replay, against transformers that is told the same experts; load metrics; the zigzag of context
parallelism, by direct definition.

    routes (random, or of an earlier pass) --Packing.experts--> Router --> log-probs, gradients   == transformers with them

Run:   pytest -s tests/test_moe.py     CPU only, about 2 minutes
"""
import math

import pytest
import torch
import torch.nn.functional as F

import buffer
from helpers import run_workers
from test_families import layout, write
from test_model import COMMON, Rank, ask_transformers, make_samples, train_data

LAYOUTS = {"1 process": layout(), "tp 2": layout(tp=2), "cp 2": layout(cp=2), "pp 2": layout(pp=2), "ep 2": layout(ep=2, dp=2)}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
K, E, L = 2, 8, 4


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root, samples = tmp_path_factory.mktemp("moe"), make_samples()
    g = torch.Generator().manual_seed(3)
    routes = []                              # of each sample [T_i, L * K]: two different experts; none for the last token
    for s in samples:
        own = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(len(s.tokens) * L)]).view(len(s.tokens), L * K)
        own[-1] = -1
        routes.append(own.to(torch.int16))
    folder = write("qwen3_moe", root / "qwen3_moe")
    return {"samples": samples, "root": root, "routes": routes, "told": told(folder, samples, routes),
            "families": {"qwen3_moe": ask_transformers("qwen3_moe", folder, samples)}}


@torch.no_grad()
def told(folder, samples, routes) -> list[torch.Tensor]:
    """transformers' log-probs where its routers are told the experts."""
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    out, now = [], {}
    for i, layer in enumerate(model.model.layers):
        def forward(hidden, i=i, gate=layer.mlp.gate):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            chosen = now["routes"].view(-1, L, K)[:, i].long()
            chosen = torch.where(chosen >= 0, chosen, logits.topk(K).indices)
            return logits, logits.gather(1, chosen).softmax(-1), chosen
        layer.mlp.gate.forward = forward
    for s, own in zip(samples, routes):
        now["routes"] = own
        z = model(torch.tensor([s.tokens])).logits[0, -s.response_length - 1:-1] / COMMON["rollout_temperature"]
        out.append(z.log_softmax(-1).gather(1, torch.tensor(s.tokens[-s.response_length:])[:, None])[:, 0])
    return out


class Replays(Rank):
    def batches(self, model, family="qwen3_moe", only=None):
        data = train_data(self.job["samples"], self.job["families"][family])
        data["rollout_routed_experts"] = self.job["routes"]
        plan = buffer.plan(model.cfg, data, self.grid.dp_size)
        return [model.pack(data, one) for one in plan[0][self.grid.dp_rank]]


def work(rank, world, port, settings, job):
    r, out = Replays(rank, world, port, settings, job), {}
    for name, more in {"engine's": {}, "engine's, computed again": dict(megatron=FULL)}.items():
        m = r.model("qwen3_moe", use_rollout_routing_replay=True, clip_grad=1e6, **more)
        batches = r.batches(m)
        out[f"{name} logp"] = log_probs(m, batches, replays=True)
        out[f"{name} own"] = log_probs(m, batches)                           # a reference's pass chooses for itself
        out[name] = r.step(m, batches)
    # R2: the first pass writes its routes down; then the routers change, and the step takes the old ones all the same
    m = r.model("qwen3_moe", use_routing_replay=True, clip_grad=1e6)
    batches = r.batches(m)
    log_probs(m, batches, replays=True)
    out["kept"] = {key: routes.clone() for key, routes in m.routes.items()}
    with torch.no_grad():
        for name, p in m.named_weights():
            if name.endswith("router.weight"):
                p.copy_(p.flip(0))           # every expert's score goes to another
    out["R2"] = r.step(m, batches)
    out["R2 load"] = m.expert_load.clone()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return out


def log_probs(model, batches, **how) -> dict:
    out = model.forward_only(batches, **how)
    return {i: own for b, logp in zip(batches, out) for i, own in zip(b.samples, logp.split(b.lengths))}


@pytest.fixture(scope="module")
def results(job):
    return {name: run_workers(work, world, settings, job, limit_s=300) for name, (world, settings) in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_told_experts_are_taken(job, results, name):
    own = job["families"]["qwen3_moe"]["logp"]
    for rank in results[name]:
        for i, logp in rank["engine's logp"].items():
            torch.testing.assert_close(logp, job["told"][i], atol=1e-4, rtol=0)
        for i, logp in rank["engine's own"].items():
            torch.testing.assert_close(logp, own[i], atol=1e-4, rtol=0)
    assert max((a - b).abs().max() for a, b in zip(own, job["told"])) > 0.1  # it makes a difference which are taken


@pytest.mark.parametrize("name", LAYOUTS)
def test_replayed_steps_are_the_same_under_every_layout(results, name):
    want = results["1 process"][0]
    for rank in results[name]:
        for key in ("engine's", "engine's, computed again", "R2"):
            base = want["engine's"] if key.startswith("engine") else want[key]
            for metric in ("loss", "grad_norm", "moe_load_imbalance"):
                assert rank[key][metric] == pytest.approx(base[metric], rel=1e-5), (key, metric)


def test_the_kept_routes_are_taken_though_the_routers_changed(results):
    out = results["1 process"][0]
    counts = torch.zeros(L, E)
    for routes in out["kept"].values():      # [T, L, K], padding among them
        for layer in range(L):
            counts[layer] += torch.bincount(routes[:, layer].flatten().long(), minlength=E)
    real = sum(len(s.tokens) for s in make_samples())
    padding = sum(len(routes) for routes in out["kept"].values()) - real
    assert out["R2 load"].sum(1).tolist() == [real * K] * L
    assert ((counts - out["R2 load"]).abs().sum(1) <= padding * K).all()


def test_copies_as_in_megatron():
    """Where rows go, what comes back, and both gradients, against Megatron's functions."""
    import types

    import moe
    from megatron.core.transformer.moe import moe_utils
    g = torch.Generator().manual_seed(0)
    map_ = torch.zeros(37, E, dtype=torch.bool).scatter_(1, torch.rand(37, E, generator=g).topk(3).indices, True)
    probs = torch.where(map_, torch.rand(37, E, generator=g), 0.0).requires_grad_()
    tokens, rows = (torch.randn(n, 16, generator=g, requires_grad=True) for n in (37, 3 * 37))
    ours = moe.Dispatcher.__new__(moe.Dispatcher)
    ours.ep_size = ours.tp_size = 1
    ours.config, ours.preprocess = types.SimpleNamespace(moe_router_topk=3), lambda routing_map: routing_map.sum(0)
    *theirs, order = moe_utils.permute(tokens, map_, probs=probs, num_out_tokens=3 * 37)
    back = moe_utils.unpermute(rows, order, tokens.shape)
    pairs = [*zip(theirs, ours.dispatch_preprocess(tokens[:, None], map_, probs), (tokens, probs)),
             (back, ours.combine_postprocess(rows)[:, 0], rows)]
    for want, got, leaf in pairs:
        torch.testing.assert_close(got, want)
        aim = torch.randn(want.shape, generator=g)
        torch.testing.assert_close(*(torch.autograd.grad((x * aim).sum(), leaf)[0] for x in (got, want)))


def test_balance():
    import moe
    load = torch.tensor([[4.0, 4.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])      # the last layer is dense
    assert moe.balance(load) == {"moe_load_imbalance": 1.5, "moe_idle_experts": 0.25}


# ---- The zigzag --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cp", [2, 4])
def test_zigzag_gives_every_rank_the_same_work(cp):
    import layers
    lengths = torch.tensor([2, 1, 4]) * 2 * cp
    cu = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    seen, work_of = [], []
    for rank in range(cp):
        index, sizes, reach = layers.zigzag(cu, rank, cp)
        seen += index.tolist()
        position = torch.cat([torch.arange(n) for n in lengths])[index]
        work_of.append(int((position + 1).sum()))
        at = 0
        for size, before in zip(sizes.tolist(), reach.tolist()):             # each chunk ends where its reach ends
            assert position[at:at + size].tolist() == list(range(before - size, before))
            at += size
    assert sorted(seen) == list(range(int(lengths.sum())))
    assert len(set(work_of)) == 1


def test_lengthened_batches_compute_the_same():
    cfg_data = {"tokens": [torch.arange(5), torch.arange(9)], "response_lengths": [3, 4],
                "loss_masks": [torch.ones(3), torch.ones(4)], "loss_weights": [1.0, 1.0]}
    short = buffer.pack(cfg_data, [0, 1], 1)
    long = buffer.lengthen(short, 20)
    assert long.tokens.shape == (1, 20) and long.real.tolist() == [True] * 14 + [False] * 6
    assert long.cu_seqlens.tolist() == [0, 5, 14, 20] and long.position_ids[0, 14:].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(long.targets, short.targets) and math.isclose(float(long.weight.sum()), 7.0)


def test_each_sequence_is_padded_by_itself():
    data = {"tokens": [torch.arange(1, 6), torch.arange(1, 10)], "response_lengths": [3, 4],
            "loss_masks": [torch.ones(3), torch.ones(4)], "loss_weights": [1.0, 1.0]}
    batch = buffer.pack(data, [0, 1], 8, pad_each=4)
    assert batch.cu_seqlens.tolist() == [0, 8, 20, 24]
    assert batch.real.tolist() == [True] * 5 + [False] * 3 + [True] * 9 + [False] * 7
    assert batch.targets.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.tokens[0, batch.logit_index].tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_routes_that_name_an_expert_twice_are_refused():
    import types

    import moe
    config = types.SimpleNamespace(num_layers=2, moe_layer_freq=[0, 1])      # a dense layer's routes are zeros
    moe.check_routes(torch.tensor([[0, 0, 3, 1], [-1, -1, -1, -1]]), config)
    with pytest.raises(AssertionError, match="name an expert twice for one token"):
        moe.check_routes(torch.tensor([[0, 0, 3, 3]]), config)
