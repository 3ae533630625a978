"""
test_layouts.py: does a method compute the same however the work is split? Every estimator and modifier under every layout.

    fixed samples --actor.TrainActor, CriticActor--> loss, grad norm of 2 optimizer steps    1 process == any other layout

Run:   make layouts   (pytest -q -s tests/test_layouts.py)     CPU only, about 3 minutes; prints the README's table

The actors are run as they are, without Ray: this file does the driver's part. The second step starts from weights that the
first one changed, so clips, importance weights and off-policy masks are at work there.
"""
import pytest
import torch

import algos
import buffer
from actor import CriticActor, TrainActor, merged
from configs.base import critic_config
from helpers import make_cfg, run_workers
from test_model import write_model

GRIDS = [                                    # processes, name -> settings of layouts that these can run one after the other
    (1, {"1 process": dict(), "packed by 48": dict(max_tokens_per_gpu=48), "unpacked": dict(max_tokens_per_gpu=1)}),
    (2, {"dp 2": dict()}),
    (2, {"tp 2": dict(tensor_model_parallel_size=2, sequence_parallel=True)}),
    (2, {"pp 2": dict(pipeline_model_parallel_size=2)}),
    (2, {"cp 2": dict(context_parallel_size=2)}),
    (4, {"tp 2 x dp 2": dict(tensor_model_parallel_size=2)})]
KL = dict(use_kl_loss=True, kl_loss_coef=0.1)
METHODS = {                                  # name -> settings
    "grpo": dict(), "dr_grpo": dict(grpo_std_normalization=False, fixed_loss_length=12),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.02), "cispo": dict(advantage_estimator="cispo"),
    "rloo": dict(advantage_estimator="rloo", calculate_per_token_loss=True),
    "reinforce_plus_plus": dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.05, gamma=0.97),
    "reinforce_plus_plus_baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.05),
    "ppo": dict(advantage_estimator="ppo", critic=dict(lr=1e-2), kl_coef=0.05, gamma=0.99, lambd=0.9, value_clip=0.005),
    "opd": dict(use_opd=True, opd_teacher_load="teacher", rewards_normalization=False),
    "k3, entropy, dual clip, TIS": KL | dict(kl_loss_type="k3", entropy_coef=0.02, eps_clip_c=1.5, eps_clip_high=0.3,
                                             use_tis=True, tis_clip=1.1),
    "unbiased KL, MIS, OPSM": KL | dict(use_unbiased_kl=True, use_tis=True, tis_level="sequence", tis_mode="mask",
                                        tis_clip=1.2, tis_clip_low=0.8, use_opsm=True),
    "rollout log-probs, k2": KL | dict(use_rollout_logprobs=True, kl_loss_type="k2"),
    "sft beside grpo": dict(sft_loss_coef=0.5),
}
COMMON = dict(num_steps_per_rollout=2, lr=3e-3, log_probs_chunk_size=7, train_timeout_s=300.0, clip_grad=0.5, adam_eps=1e-5)


def make_samples(folder: str) -> tuple[list[buffer.Sample], list[buffer.Sample]]:
    """4 groups of 3 samples and 3 examples. One sample of each group is not trained, or normalised advantages would add up
    to a loss of 0; one has a tool's tokens in its middle; lengths from 1 to 40."""
    import transformers
    g = torch.Generator().manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = []
    for i in range(15):
        sample = buffer.Sample(group_index=i // 3, index=i, tokens=torch.randint(0, 101, (3 + i % 4,), generator=g).tolist())
        response = torch.randint(0, 101, ([1, 40, 7, 12][i % 4],), generator=g)
        ids = torch.cat([torch.tensor(sample.tokens), response])
        logits = model(ids[None]).logits[0, -len(response) - 1:-1]
        logp = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0].detach()               # the engine differs a little
        logp = (logp + 0.2 * torch.randn(len(response), generator=g)).tolist()
        for lo, hi, train in ((0, 2, True), (2, 5, i % 4 != 3), (5, 99, True)):
            part = response.tolist()[lo:hi]
            sample.append(part, logp[lo:hi] if train else None, trainable=train)
        sample.remove_sample = i % 3 == 1 and i < 12
        sample.reward = float(torch.rand((), generator=g))
        samples.append(sample)
    return samples[:12], samples[12:]


def gathered(answer: dict) -> list:
    """What the driver does with the ranks' answers."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, answer)
    return merged(parts)


def work(rank, world, port, layouts, folders):
    """-> layout -> method -> metrics of its optimizer steps. All layouts have the same grid."""
    import model
    settings = next(iter(layouts.values()))
    grid = model.init_distributed(make_cfg(**settings), rank, world, "127.0.0.1", port)
    samples, examples = make_samples(folders["policy"])
    out = {}
    for name, own in layouts.items():
        own = own | dict(actor_num_gpus=world)
        out[name] = every_method(grid, own, samples, examples, folders)
        out[name]["reward model"] = reward_model_as_critic(grid, name, own, samples, folders)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return out


def every_method(grid, settings, samples, examples, folders) -> dict[str, list[dict]]:
    out = {}
    for name, changes in METHODS.items():
        cfg = make_cfg(**COMMON | settings | changes)
        rewards = algos.group_rewards(cfg, [s.reward for s in samples], [s.group_index for s in samples], [s.rollout for s in samples])
        data = buffer.to_train_data(cfg, samples, rewards, examples if "sft" in name else ())
        plan = buffer.plan(cfg, data, grid.dp_size)
        actor, critic = TrainActor(cfg, grid.rank), CriticActor(critic_config(cfg), grid.rank)
        actor.grid = critic.grid = grid
        others = {"ref": folders["ref"]} if cfg.use_kl_loss or cfg.kl_coef else {}
        actor.build(folders["policy"], others | ({"teacher": folders["ref"]} if cfg.use_opd else {}), 10)
        if cfg.critic:
            critic.build(folders["policy"], {}, 10)
            data["values"] = gathered(critic.values(buffer.to_flat(data), plan))
        answer = actor.train(0, buffer.to_flat(data), plan)
        out[name] = answer["steps"]
        if cfg.critic:
            data["returns"] = gathered(answer["returns"])
            out[f"{name}'s critic"] = critic.train(0, buffer.to_flat(data), plan)["steps"]
    return out


def reward_model_as_critic(grid, layout, settings, samples, folders) -> dict:
    """Its values; what it learns after a checkpoint that one process wrote; and it writes itself as a Hugging Face folder."""
    cfg = make_cfg(**COMMON | settings | METHODS["ppo"])
    data = buffer.to_train_data(cfg, samples, [0.0] * len(samples))
    plan = buffer.plan(cfg, data, grid.dp_size)

    def critic():
        one = CriticActor(critic_config(cfg), grid.rank)
        one.grid = grid
        one.build(folders["reward model"], {}, 10)
        return one
    first, out = critic(), {}
    out["values"] = data["values"] = gathered(first.values(buffer.to_flat(data), plan))
    data["returns"] = [v.sin() for v in data["values"]]
    first.save_hf(f"{folders['root']}/{layout}")
    first.train(0, buffer.to_flat(data), plan)
    first.save(f"{folders['root']}/checkpoint of {layout}", {"step": 1})
    second = critic()
    second.load(f"{folders['root']}/checkpoint of 1 process")
    out["first"], out["second"] = (one.train(1, buffer.to_flat(data), plan)["steps"] for one in (first, second))
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import transformers
    root = tmp_path_factory.mktemp("layouts")
    folders = {"policy": write_model("qwen3", root / "policy"), "ref": perturbed(write_model("qwen3", root / "ref"))}
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders["ref"], num_labels=1, dtype=torch.float32)
    model.save_pretrained(root / "reward model")
    return folders | {"reward model": str(root / "reward model"), "root": str(root)}


def perturbed(folder: str) -> str:
    """Another model of the same shape, so that no KL is 0."""
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(folders):
    """layout -> method -> metrics of its optimizer steps, of each rank"""
    out = {}
    for world, layouts in GRIDS:
        ranks = run_workers(work, world, layouts, folders, limit_s=600)
        out |= {name: [rank[name] for rank in ranks] for name in layouts}
    return out


def difference(got: list[dict], want: list[dict]) -> float:
    """Largest relative difference in loss and grad norm over the optimizer steps."""
    return max(abs(a[key] / b[key] - 1) for a, b in zip(got, want, strict=True) for key in ("loss", "grad_norm"))


def test_every_method_under_every_layout(results):
    want = {name: steps for name, steps in results["1 process"][0].items() if name != "reward model"}
    others = [name for name in results if name != "1 process"]
    print("\n\n| loss and grad norm, relative to 1 process | " + " | ".join(others) + " |")
    print("|---" * (len(others) + 1) + "|")
    worst = 0.0
    for method in want:
        row = [max(difference(rank[method], want[method]) for rank in results[layout]) for layout in others]
        print(f"| {method} | " + " | ".join(f"{x:.0e}" for x in row) + " |")
        worst = max(worst, *row)
    assert worst < 1e-5


def test_a_reward_model_becomes_a_critic(results, folders):
    """Its values are transformers'; under each layout it is written and read again, bit for bit, and learns alike."""
    import transformers
    samples, _ = make_samples(folders["policy"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders["reward model"], dtype=torch.float32)
    want = []
    for s in samples:                        # V of a token is read before it: at the token that stands left of it
        hidden = model.model(torch.tensor([s.tokens])).last_hidden_state[0, len(s.tokens) - s.response_length - 1:-1]
        want.append((hidden @ model.score.weight[0]).detach())
    assert torch.cat(want).std() > 0.1
    steps = results["1 process"][0]["reward model"]["first"]
    for layout, ranks in results.items():
        for rank in ranks:
            torch.testing.assert_close(torch.cat(rank["reward model"]["values"]), torch.cat(want), atol=1e-4, rtol=1e-4)
            for got in (rank["reward model"]["first"], rank["reward model"]["second"]):
                assert difference(got, steps) < 1e-5, layout
        written = transformers.AutoModelForSequenceClassification.from_pretrained(f"{folders['root']}/{layout}").state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, written[name]), (layout, name)


def test_the_table_compares_something(results):
    """Losses that are not 0, and that differ from method to method; clips and masks that are hit."""
    want = {name: steps for name, steps in results["1 process"][0].items() if name != "reward model"}
    losses = [round(step["loss"], 6) for steps in want.values() for step in steps]
    assert min(map(abs, losses)) > 1e-3
    assert len({tuple(step["loss"] for step in steps) for steps in want.values()}) == len(want)
    for method, metric in [("grpo", "pg_clipfrac"), ("gspo", "pg_clipfrac"), ("cispo", "pg_clipfrac"),
                           ("ppo's critic", "value_clipfrac"),
                           ("k3, entropy, dual clip, TIS", "tis_clipfrac"), ("unbiased KL, MIS, OPSM", "tis_clipfrac"),
                           ("unbiased KL, MIS, OPSM", "opsm_clipfrac"), ("sft beside grpo", "sft_loss")]:
        assert 0 < want[method][1][metric], (method, metric)
