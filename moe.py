"""
moe.py: what is a layer with experts made of? The router's hooks, the dispatcher and the experts; what goes between ranks is
Megatron's.

    hidden [T, H] --Router--> k experts a token, their weights --Dispatcher--> copies sorted by expert, through an all-to-all
    --GroupedExperts--> each copy through its expert, times its weight --Dispatcher--> back, summed over k [T, H]

    Router: counts each expert's tokens (train/moe_*), and can be told which experts to take (routing replay)

Test:  pytest tests/test_families.py tests/test_moe.py
Knows nothing about: which tokens these are. What it must know of a micro-batch comes in its layers.Packing.
Shapes: T tokens on this rank (with sequence parallelism its part), N copies of tokens at this rank's experts, L layers, E
        experts of a layer, e of this rank, k experts a token, F ffn of one expert, H hidden; etp ranks share an expert.
Shared experts, which every token goes through, are Megatron's own MLP beside these.
Left out on purpose: auxiliary and z losses (the pretrained balance is to stay; refused in layers.check), token dropping.
"""
import types

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

import logprobs


def spec(config) -> ModuleSpec:
    """Megatron's MoELayer with our router, dispatcher and experts."""
    layer = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer.submodules.router, layer.submodules.experts = Router, GroupedExperts
    moe_layer.MoEAlltoAllTokenDispatcher = Dispatcher    # MoELayer builds the one that has this name, and asks no spec
    return layer


# ---- Router ------------------------------------------------------------------------------------------------------------
class Router(TopKRouter):
    """Megatron's router, which sees the micro-batch it routes.

    Routing replay. Rounding makes trainer and engine (or two passes of the trainer) choose other experts for some tokens, and
    those tokens' log-probs differ by far more than rounding. So a choice is made once and used again: the engine's in every
    pass of the policy (R3, 2510.11370; a reference chooses for itself), or that of the old log-probs' pass in training (R2,
    2507.18071 sec. 5.3). The weights of the chosen are computed anew, with their gradient.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.packing = None                  # layers.Packing of the micro-batch, set by layers.LayerWithExperts
        self.router_replay = types.SimpleNamespace(get_replay_topk=self.choose)      # whom Megatron asks for the experts

    def gating(self, hidden: Tensor) -> Tensor:
        """Logits in fp32: two experts of nearly the same score must not swap places by rounding. [T, 1, H] -> [T, 1, E]"""
        return F.linear(hidden.float(), self.weight.float())     # Megatron's own needs Transformer Engine

    def choose(self, scores: Tensor, topk: int, num_groups, group_topk, top) -> tuple[Tensor, Tensor]:
        """-> scores of the chosen experts and their numbers [T, k]. top: Megatron's top-k, limited to groups where it has
        them; scores [T, E]: with the bias added, where there is one."""
        values, experts = top(scores, topk, num_groups, group_topk)
        packing, layer = self.packing, self.layer_number - 1
        if packing.experts is not None:      # [T, L, k]; -1: nobody chose (padding, the last token): our own stands
            told = packing.experts[:, layer].long()
            experts = torch.where(told >= 0, told, experts)
            values = scores.gather(1, experts)
        if packing.recorded is not None:
            packing.recorded[:, layer] = experts.to(torch.int16)
        return values, experts

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask=None) -> None:
        """Counts tokens; Megatron, which moves the bias by them, calls it so. Its own counts padding. routing_map [T, E]"""
        if not torch.is_grad_enabled():      # a pass for log-probs; or the first of a layer that will be computed again
            return
        tokens = (routing_map & self.packing.real[:, None]).sum(0).float()                        # [E]
        if self.enable_expert_bias:
            self.local_tokens_per_expert += tokens
        self.packing.load[self.layer_number - 1] += tokens


def check_routes(experts: Tensor, config) -> None:
    """AssertionError where the engine's routes name an expert twice for a token in a layer. experts [T, L * k], -1: unknown"""
    layers = [i for i, has in enumerate(config.moe_layer_freq) if has]
    told = experts.unflatten(1, (config.num_layers, -1))[:, layers].sort(-1).values               # [T, layers, k]
    twice = (told.diff(dim=-1) == 0) & (told[..., 1:] >= 0)
    assert not twice.any(), ("the engine's routes name an expert twice for one token: its kernels do not report them; set "
                             "sglang=dict(moe_runner_backend='triton'), or use_rollout_routing_replay=False")


def balance(load: Tensor) -> dict[str, float]:
    """Tokens of each expert of each layer [L, E] -> metrics over layers that have experts.

    moe_load_imbalance: tokens of the busiest expert / mean, averaged over layers; 1 is perfect balance, E / k collapse.
    moe_idle_experts: the share of experts that saw no token.
    """
    load = load[load.sum(1) > 0]
    return {"moe_load_imbalance": (load.amax(1) / load.mean(1)).mean().item(),
            "moe_idle_experts": (load == 0).float().mean().item()}


# ---- Dispatcher ----------------------------------------------------------------------------------------------------------
class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's, but for how a rank copies its own tokens. Megatron adds a token's k results (and in the backward pass the
    gradients of its k copies) to the same row by atomic adds in bf16. Here each token fetches its k rows and sums them in
    fp32: faster (benchmarks/h200.md), more exact, and the same bits every time. And with all experts on this rank, nobody
    waits for the GPU to tell how many tokens each of them got."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, E] -> copies sorted by expert [T * k, H], their weights [T * k]"""
        self.hidden_shape, self.probs, self.tokens_per_expert = hidden.shape, probs, self.preprocess(routing_map)
        self.alone = self.ep_size * self.tp_size == 1            # Megatron's tp_size is etp here
        if not self.alone:                   # an all-to-all wants the numbers on the CPU
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        experts = routing_map.byte().topk(self.config.moe_router_topk, dim=1).indices             # [T, k]: no row has fewer
        sorted_place = routing_map.T.flatten().cumsum(0).view(routing_map.T.shape).T - 1          # [T, E] row, where True
        self.row = sorted_place.gather(1, experts)                                                # [T, k]
        self.copy = torch.empty_like(self.row.flatten())                                          # [T * k] row -> t * k + j
        self.copy[self.row.flatten()] = torch.arange(self.row.numel(), device=hidden.device)
        weights = probs.gather(1, experts).flatten().index_select(0, self.copy)
        return Spread.apply(hidden.flatten(0, 1), self.row, self.copy), weights

    def dispatch_postprocess(self, copies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (copies, self.tokens_per_expert, weights) if self.alone else super().dispatch_postprocess(copies, weights)

    def combine_preprocess(self, copies: Tensor) -> Tensor:
        return copies if self.alone else super().combine_preprocess(copies)

    def combine_postprocess(self, copies: Tensor) -> Tensor:
        return Collect.apply(copies, self.row, self.copy).view(self.hidden_shape)


@logprobs.fused
def sum_of_copies(copies: Tensor, row: Tensor) -> Tensor:
    """copies [T * k, H], row [T, k] of each token's -> [T, H], summed in fp32"""
    total = copies[row[:, 0]].float()
    for j in range(1, row.shape[1]):
        total = total + copies[row[:, j]].float()
    return total.to(copies.dtype)


class Spread(torch.autograd.Function):
    """[T, H] -> each token's k copies, at their rows [T * k, H]"""

    @staticmethod
    def forward(ctx, tokens, row, copy):
        ctx.save_for_backward(row)
        return tokens.index_select(0, copy // row.shape[1])

    @staticmethod
    def backward(ctx, grad):
        return sum_of_copies(grad, *ctx.saved_tensors), None, None


class Collect(torch.autograd.Function):
    """The other way: [T * k, H] -> the sum of each token's copies [T, H]"""

    @staticmethod
    def forward(ctx, copies, row, copy):
        ctx.save_for_backward(row, copy)
        return sum_of_copies(copies, row)

    @staticmethod
    def backward(ctx, grad):
        row, copy = ctx.saved_tensors
        return grad.index_select(0, copy // row.shape[1]), None, None


# ---- Experts -----------------------------------------------------------------------------------------------------------
@logprobs.fused
def weighted_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight, in fp32. x [N, 2F] gate beside up, weight [N] -> [N, F]"""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).to(x.dtype)


class GroupedExperts(MegatronModule):
    """This rank's experts in two parameters, under Megatron's constructor: fc1 [e, 2, F/etp, H], gate above up, and
    fc2 [e, H, F/etp]. On a GPU all experts are computed by one grouped product; on a CPU one after the other."""

    def __init__(self, num_local_experts: int, config, submodules=None, pg_collection=None):
        super().__init__(config)
        self.ep_group, self.etp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        ffn = config.moe_ffn_hidden_size // self.etp_group.size()
        empty = dict(dtype=config.params_dtype, device="cpu" if config.use_cpu_initialization else "cuda")
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, 2, ffn, config.hidden_size, **empty))
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size, ffn, **empty))
        for param in (self.fc1, self.fc2):
            param.allreduce = False          # gradients are summed over the ranks that hold these experts, not over dp

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """tokens [N, H] sorted by expert, tokens_per_expert [e], weights [N] -> [N, H]"""
        fc1 = self.fc1.flatten(1, 2)                                                              # [e, 2F/etp, H]
        if tokens.is_cuda and tokens.dtype == torch.bfloat16:
            ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)                  # [e]
            hidden = torch._grouped_mm(tokens, fc1.transpose(1, 2), offs=ends)                    # [N, 2F/etp]
            return torch._grouped_mm(weighted_swiglu(hidden, weights), self.fc2.transpose(1, 2), offs=ends), None
        parts = zip(tokens.split(tokens_per_expert.tolist()), weights.split(tokens_per_expert.tolist()), fc1, self.fc2)
        return torch.cat([weighted_swiglu(x @ up.T, w) @ down.T for x, w, up, down in parts]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """For checkpoints: which part of the layer's [E, 2, F, H] and [E, H, F] this rank has."""
        ep, etp = ((group.rank(), group.size()) for group in (self.ep_group, self.etp_group))
        first = len(sharded_offsets)         # axes that Megatron puts in front
        return {prefix + name: ShardedTensor.from_rank_offsets(
            prefix + name, param, *sharded_offsets, (first, *ep), (first + 2, *etp), replica_id=(0, 0, self.dp_group.rank()),
            prepend_axis_num=first) for name, param in self.named_parameters()}
