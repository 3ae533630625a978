"""
model.py: how does Megatron compute? Groups, GPTModel, optimizer, forward only, a train step with the loss passed in,
checkpoints.

    Hugging Face folder --convert.py--> MegatronModel: chunks (GPTModel in DDP), optimizer, scheduler
    PackedBatch --forward--> hidden states --algos--> logp, entropy [R] --loss function--> gradients --> new weights

Test:  pytest tests/test_model.py
Knows nothing about: Ray, SGLang, rewards, advantages. Every rank of the job calls each method, with its own micro-batches.
Shapes: T packed tokens, R response tokens, V vocabulary, H hidden, tp tensor-parallel ranks.
"""
import contextlib
import dataclasses
import gc
import math
import os
import pathlib
import queue
import shutil
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

import algos
import buffer
import convert
import families
import layers
import logprobs
import moe
from buffer import PackedBatch
from ranks import Grid, init_distributed  # noqa: F401  (the latter for our callers)


# ---- The model -------------------------------------------------------------------------------------------------------
class PolicyModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states: log-probs are computed from them in chunks of tokens, so
    that [T, V] logits never exist."""

    def _postprocess(self, hidden_states, *args, **kwargs):
        return hidden_states                                                     # [T, 1, H]; with SP [T/tp, 1, H]

    def output_weight(self) -> Tensor:
        """This rank's rows of the output matrix. [V/tp, H]"""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


class ValueModel(PolicyModel):
    """The same with a scalar head: a critic. V of a token is read from the state that predicts it, before it was chosen."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size)


class PutTogether(torch.autograd.Function):
    """Forward: each rank's part x [R'] at its places in [R], summed over the group. Backward: its own part of the gradient.

    The ranks compute the same loss from the same [R], so each has all of its gradient already: nothing is to be summed.
    """

    @staticmethod
    def forward(ctx, x, places, size, group):
        ctx.save_for_backward(places)
        out = x.new_zeros(size)
        out[places] = x
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None, None


class ValueHead(torch.nn.Module):
    """[R, H] -> [R]. Every tensor-parallel rank has all of it and computes the same."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight[0].float()


class MegatronModel:
    """One set of weights on this rank: built from a Hugging Face folder, trained, saved, and read by the weight sync."""

    def __init__(self, cfg, grid: Grid, hf_folder: str, total_optimizer_steps: int = 0, trainable: bool = True,
                 value_head: bool = False):
        self.cfg, self.grid, self.hf_folder, self.value_head = cfg, grid, hf_folder, value_head
        self.device = torch.device(cfg.device)
        self.hf_config = convert.load_hf_config(hf_folder)
        if value_head:
            self.hf_config = families.value_config(self.hf_config)
        families.check_tp(self.hf_config, grid.tp_size, grid.ep_size, grid.etp_size)
        self.dtype = getattr(torch, cfg.dtype)
        self.config, gpt_kwargs = self.build_config()
        inv_freq, self.rope_scale = families.rope_frequencies(self.hf_config)
        self.inv_freq = inv_freq.to(self.device)                                                  # [D/2]
        self.vocab_size = gpt_kwargs["vocab_size"]
        self.rows = families.padded_vocab_size(self.vocab_size, grid.tp_size) // grid.tp_size      # V/tp, with padding
        # This stage's modules: one, or with virtual stages several, of which the last holds the head.
        self.virtual = range(cfg.virtual_pipeline_model_parallel_size or 1)
        self.modules = self.chunks = [self.build_module(gpt_kwargs, k) for k in self.virtual]
        # NOTE: with perform_initialization=False Megatron does not mark which weights are shards, and the gradient norm would
        # count one TP rank's shards only.
        for name, param in self.named_weights():
            rule = families.find_rule(self.hf_config, name)[0]
            param.tensor_model_parallel = rule.kind not in families.WHOLE or rule.of_experts
        self.load_hf(hf_folder)
        self.away, self.host, self.loading, self.copied = {}, {}, None, set()    # see sleep()
        # Experts: how many tokens each of them got in this step [L, E]; the routes that a pass took, for the ones after it.
        self.expert_load = torch.zeros(self.config.num_layers, self.config.num_moe_experts or 0, device=self.device)
        self.routes: dict[tuple, Tensor] = {}    # a micro-batch's samples -> [T, L, k]
        self.replays = False                 # whether the present pass takes routes from there, or from the engine
        self.optimizer = self.scheduler = None
        if trainable:
            self.wrap(total_optimizer_steps)
        # One padded length for tensor-parallel matrix tiles on a GPU; sequence parallelism needs a multiple of tp anyway.
        self.pad_to = grid.tp_size * grid.cp_size * (128 if cfg.device == "cuda" else 2 if grid.cp_size > 1 else 1)
        self.pad_each = 2 * grid.cp_size if grid.cp_size > 1 else 1              # every sequence: see layers.zigzag

    # -- building
    def build_config(self) -> tuple[layers.LayerConfig, dict]:
        cfg = self.cfg
        fields, gpt_kwargs = families.megatron_config(self.hf_config)
        virtual = cfg.virtual_pipeline_model_parallel_size is not None
        fields |= dict(
            tensor_model_parallel_size=self.grid.tp_size, pipeline_model_parallel_size=self.grid.pp_size,
            virtual_pipeline_model_parallel_size=cfg.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.grid.cp_size, expert_model_parallel_size=self.grid.ep_size,
            expert_tensor_parallel_size=self.grid.etp_size,
            sequence_parallel=cfg.sequence_parallel, params_dtype=self.dtype, pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16, transformer_impl="local",      # whose layers: see layers.py
            # NOTE: virtual stages exchange activations both ways at once, with two stages both between the same ranks, where
            # Megatron confuses the lengths: so then all micro-batches get the same one, and p2p calls are not batched.
            variable_seq_lengths=not virtual, overlap_p2p_comm=virtual, batch_p2p_comm=not virtual,
            moe_token_dispatcher_type="alltoall",   # the one that allows variable lengths
            calculate_per_token_loss=True,   # Megatron must not divide by anything: all denominators are in the loss already
            use_cpu_initialization=cfg.device == "cpu", perform_initialization=False,   # every weight is loaded
            bias_activation_fusion=cfg.device == "cuda",         # SwiGLU through torch.compile
            gradient_accumulation_fusion=cfg.device == "cuda",   # see init_distributed
            persist_layer_norm=False, masked_softmax_fusion=False, apply_rope_fusion=False)
        return layers.LayerConfig(**fields | pick(layers.LayerConfig, cfg.megatron)), gpt_kwargs

    def vp_stage(self, k: int) -> int | None:
        """What Megatron calls the k-th of this stage's modules."""
        return k if self.config.virtual_pipeline_model_parallel_size else None

    def build_module(self, gpt_kwargs: dict, k: int) -> PolicyModel:
        cls = ValueModel if self.value_head else PolicyModel
        module = cls(config=self.config, transformer_layer_spec=layers.block_spec(self.config, self.vp_stage(k)),
                     pre_process=self.grid.pp_rank == 0 and k == 0, vp_stage=self.vp_stage(k),
                     post_process=self.grid.is_last_stage and k == self.virtual[-1],
                     **gpt_kwargs | {"vocab_size": self.rows * self.grid.tp_size})
        module.to(self.device, self.dtype)
        for name, buffer in module.named_buffers():
            if name.endswith(("expert_bias", "local_tokens_per_expert")):
                buffer.data = buffer.data.float()        # small steps and large counts would be lost in bf16
        return module

    def wrap(self, total_steps: int) -> None:
        """Gradient buffers, optimizer and learning-rate schedule around the loaded weights."""
        cfg = self.cfg
        ddp = dict(use_distributed_optimizer=cfg.use_distributed_optimizer, grad_reduce_in_fp32=True,
                   overlap_grad_reduce=False)
        ddp_config = DistributedDataParallelConfig(**ddp | pick(DistributedDataParallelConfig, cfg.megatron))
        self.chunks = [DistributedDataParallel(self.config, ddp_config, module) for module in self.modules]
        # One Adam, torch's: where Transformer Engine or apex is installed Megatron would take theirs, with another state, and
        # leave its step out of checkpoints.
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
        distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = False
        megatron_optimizer.Adam, megatron_optimizer.CPUAdam = torch.optim.AdamW, AdamOnCPU
        opt = dict(optimizer="adam", lr=cfg.lr, min_lr=cfg.min_lr, weight_decay=cfg.weight_decay, adam_beta1=cfg.adam_beta1,
                   adam_beta2=cfg.adam_beta2, adam_eps=cfg.adam_eps, clip_grad=cfg.clip_grad, params_dtype=self.dtype,
                   bf16=self.dtype == torch.bfloat16, use_distributed_optimizer=cfg.use_distributed_optimizer)
        # For optimizer_cpu_offload: all of it unless a fraction is given; gradients go down, weights come up while Adam works.
        opt |= dict(optimizer_offload_fraction=1.0, overlap_cpu_optimizer_d2h_h2d=True)
        config = OptimizerConfig(**opt | pick(OptimizerConfig, cfg.megatron))
        if config.optimizer_cpu_offload:
            # Main weights only where their Adam is, not on the GPU as well. NOTE: set afterwards, as the constructor would
            # look at Transformer Engine's version, also where there is none.
            config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            config.store_param_remainders = False
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        for adam in adams(self.optimizer):
            for group in adam.param_groups:
                group.update(fused=True, foreach=False)          # one pass over the state instead of ten
        for one in offloaded(self.optimizer):
            for group in one.param_groups:
                del group["cpu_optimizer_cls"], group["gpu_optimizer_cls"]       # which have no place in a checkpoint
            gc.collect()                     # Megatron builds it twice; the first, a cycle, would keep its CPU memory
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads   # sums over DP, SP norms, tied embeddings over PP
        steps = max(cfg.lr_decay_iters or total_steps, cfg.lr_warmup_iters + 1)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=cfg.lr, min_lr=min(cfg.min_lr, cfg.lr), lr_warmup_steps=cfg.lr_warmup_iters,
            lr_decay_steps=steps, lr_decay_style=cfg.lr_decay_style, start_wd=cfg.weight_decay, end_wd=cfg.weight_decay,
            wd_incr_steps=steps, wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)   # what a resumed run is told, counts

    # -- parameters by their global name
    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(name with the GLOBAL layer number, tensor) of this rank, as families.py's tables call them: all parameters, and the
        routers' biases, which no gradient moves."""
        for k, module in enumerate(self.modules):
            offset = get_transformer_layer_offset(self.config, self.vp_stage(k), self.grid.pp_rank)
            biases = [(name, buffer) for name, buffer in module.named_buffers() if name.endswith("expert_bias")]
            for name, tensor in [*module.named_parameters(), *biases]:
                if name.startswith("decoder.layers."):
                    head, tail = name.removeprefix("decoder.layers.").split(".", 1)
                    name = f"decoder.layers.{int(head) + offset}.{tail}"
                yield name, tensor

    @torch.no_grad()
    def load_hf(self, folder: str) -> None:
        """Copy a Hugging Face checkpoint into the parameters. Each parameter is found or the load fails by name; but a critic
        may begin as a policy, with a head of zeros: V = 0."""
        reader, grid = convert.HFReader(folder), self.grid
        for name, param in self.named_weights():
            if self.value_head and name == "output_layer.weight" and families.VALUE_HEAD not in reader.where:
                param.zero_()
                continue
            if families.find_rule(self.hf_config, name)[0].of_experts:
                parts = [(part.flatten(0, -2), (grid.etp_rank, grid.etp_size, grid.ep_rank * len(param) + e))
                         for e, part in enumerate(param)]                        # fc1 of an expert: [2, F, H] -> [2F, H]
            else:
                parts = [(param, (grid.tp_rank, grid.tp_size))]
            for part, where in parts:
                tensor = families.to_megatron(self.hf_config, name, reader, *where)
                assert tensor.shape == part.shape, f"{name}: checkpoint {tuple(tensor.shape)}, model {tuple(part.shape)}"
                part.copy_(tensor)

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """A copy of this rank's weights in CPU memory (pinned on a GPU machine: the copy back runs at full bus speed)."""
        pin = self.device.type == "cuda"
        return {name: torch.empty(p.shape, dtype=p.dtype, pin_memory=pin).copy_(p) for name, p in self.named_weights()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Put a snapshot's weights in place; the optimizer is not told, so put the trained ones back before it steps."""
        for name, param in self.named_weights():
            param.copy_(snapshot[name], non_blocking=True)

    # -- forward and backward
    def pack(self, data: dict[str, list], samples: list[int]) -> PackedBatch:
        """Samples at these positions -> one micro-batch for the calls below."""
        batch = buffer.pack(data, samples, self.pad_to, self.device, self.pad_each)
        if batch.experts is not None:
            moe.check_routes(batch.experts, self.config)
        return batch

    def forward_step(self, post: Callable, data_iterator, model):
        """Megatron's forward_step_func: run one micro-batch; `post(batch, own, hidden)` is called on the last
        stage only. own: which of the batch's tokens this cp rank holds."""
        batch = next(data_iterator)
        packing, own = layers.pack_for(batch.cu_seqlens, batch.max_seqlen, self.grid.cp_rank, self.grid.cp_size)
        position = batch.position_ids[:, own]                                                     # [1, T/cp]
        angle = position[0, :, None, None] * self.inv_freq                                        # [T/cp, 1, D/2]
        packing.cos, packing.sin = angle.cos() * self.rope_scale, angle.sin() * self.rope_scale
        if self.config.num_moe_experts:
            self.tell_routers(batch, packing, own)
        hidden = model(batch.tokens[:, own], position, None, packed_seq_params=packing)
        return hidden, partial(post, batch, own)

    def tell_routers(self, batch: PackedBatch, packing: layers.Packing, own) -> None:
        """Which tokens are real, where to count them; which experts to take, or where to write down which were taken."""
        def part(tokens):                    # of [T, ...], what this rank's routers see
            tokens = tokens[own]
            return tokens.chunk(self.grid.tp_size)[self.grid.tp_rank] if self.config.sequence_parallel else tokens
        packing.real, packing.load = part(batch.real), self.expert_load
        if self.cfg.use_rollout_routing_replay and self.replays:
            packing.experts = part(batch.experts).unflatten(1, (self.config.num_layers, -1))
        elif self.cfg.use_routing_replay and self.replays:
            key = tuple(batch.samples)
            if torch.is_grad_enabled():
                packing.experts = self.routes[key]
            else:
                shape = len(packing.real), self.config.num_layers, self.config.moe_router_topk
                packing.recorded = self.routes.setdefault(key, packing.real.new_full(shape, -1, dtype=torch.int16))

    def head_rows(self, batch: PackedBatch, own, hidden: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Last stage's hidden states [T/cp, 1, H] -> those that predict this cp rank's part of the response tokens [R', H],
        and which of the R these are."""
        if self.grid.cp_size == 1:
            return hidden[:, 0].index_select(0, batch.logit_index), slice(None)
        place = torch.full_like(batch.position_ids[0], -1)
        place[own] = torch.arange(len(own), device=place.device)                                  # [T] token -> row here
        row = place[batch.logit_index]                                                            # [R]
        mine = (row >= 0).nonzero()[:, 0]
        return hidden[:, 0].index_select(0, row[mine]), mine

    def whole(self, x: Tensor, mine, batch: PackedBatch) -> Tensor:
        """This cp rank's part [R'] -> all response tokens [R], on every cp rank."""
        return x if self.grid.cp_size == 1 else PutTogether.apply(x, mine, len(batch.targets), self.grid.cp_group)

    def log_probs(self, batch: PackedBatch, own, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Last stage's hidden states -> logp, entropy of the response tokens [R]."""
        # Backward of both: sum over TP ranks, each of which saw only its part of the vocabulary.
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)                 # [T/tp, 1, H] -> [T, 1, H]
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)                 # [T, 1, H]
        rows, mine = self.head_rows(batch, own, hidden)                                           # no prompts
        both = logprobs.log_probs_and_entropy(
            rows, self.modules[-1].output_weight(), batch.targets[mine],
            temperature=self.cfg.rollout_temperature if self.cfg.loss_type != "sft" else 1.0, vocab_size=self.vocab_size,
            chunk=self.cfg.log_probs_chunk_size, vocab_start=self.rows * self.grid.tp_rank, group=self.grid.tp_group,
            fp32_logits=self.cfg.true_on_policy_mode)
        return tuple(self.whole(x, mine, batch) for x in both)

    def values(self, batch: PackedBatch, own, hidden: Tensor) -> Tensor:
        """A critic's last hidden states -> V of the response tokens [R]."""
        if self.config.sequence_parallel:    # backward: each rank takes its part of a gradient that all ranks have whole
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows, mine = self.head_rows(batch, own, hidden)
        return self.whole(self.modules[-1].output_layer(rows), mine, batch)

    def run(self, batches: list[PackedBatch], post: Callable, forward_only: bool) -> list:
        """All micro-batches through Megatron's schedule (none, 1F1B, interleaved). -> post's results, on the last stage."""
        longest = max(batch.tokens.shape[1] for batch in batches)
        if not self.config.variable_seq_lengths:
            batches = [buffer.lengthen(batch, longest) for batch in batches]
        iterators = [iter(batches) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self.forward_step, post), model=self.chunks,
            data_iterator=iterators if len(iterators) > 1 else iterators[0], num_microbatches=len(batches),
            seq_length=longest, micro_batch_size=1,
            forward_only=forward_only, collect_non_loss_data=forward_only)

    @torch.no_grad()
    def forward_only(self, batches: list[PackedBatch], replays: bool = False) -> list[Tensor]:
        """logp (of a critic: values) [R] of each micro-batch under the current weights; [] but on the last pipeline stage.

        replays: these weights made the samples: with routing replay, use or keep the routes.
        """
        self.replays = replays
        for chunk in self.chunks:
            chunk.eval()

        def post(batch, own, hidden, non_loss_data=True):
            return self.values(batch, own, hidden) if self.value_head else self.log_probs(batch, own, hidden)[0]
        return self.run(batches, post, forward_only=True)

    def train_step(self, batches: list[PackedBatch], loss_fn: Callable) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches.

        loss_fn(LossInput) -> (loss, sums to log). Returns the metrics of the whole step, equal on every rank. Raises
        FloatingPointError before the weights change where the loss is not finite.
        """
        self.copied = set()                  # what start_sleep() copied is about to change
        self.replays = not self.value_head
        self.expert_load.zero_()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def post(batch, own, hidden):
            if self.value_head:
                head = {"values": self.values(batch, own, hidden)}
            else:
                head = dict(zip(("logp", "entropy"), self.log_probs(batch, own, hidden)))
            loss, sums = loss_fn(algos.LossInput(batch.weight, batch.sample, **head, **batch.per_token))
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums   # 0 tokens: divide by nothing

        sums = self.reduce_sums(self.run(batches, post, forward_only=False))
        if not math.isfinite(sums["loss"]):
            raise FloatingPointError(
                f"{'critic: ' if self.value_head else ''}the loss is {sums['loss']}: look at rewards and log-probs of this "
                "step in samples.jsonl; its weights are unchanged and the last checkpoint is good: lower its lr or clip_grad, "
                "and --resume")
        self.finish_loading()
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is None or not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm} with a finite loss ({sums['loss']:.4g}); the last "
                                     "checkpoint is good: lower lr, and --resume")
        lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        metrics = algos.reduce_metrics(sums) | {"grad_norm": float(grad_norm), "lr": lr, "tokens": sums["tokens"]}
        if self.config.num_moe_experts:
            dist.all_reduce(self.expert_load)    # every token was counted once: stages have other layers, ranks other tokens
            metrics |= moe.balance(self.expert_load)
        return metrics

    def train_flops(self, lengths: list[int]) -> float:
        """What one rank computes, forward and backward, for its replica's sequences of these lengths: 6 per weight and token,
        and 3 times the two products of causal attention, in which a token sees half of the others. Recomputation is not
        counted, so that the rate tells about work that had to be done."""
        grid, c = self.grid, self.config
        weights = 0.0                        # that a token meets on a rank; all are in matrices, but for 0.01%
        for name, p in self.named_weights():
            of_experts = families.find_rule(self.hf_config, name)[0].of_experts
            used = grid.ep_size * grid.etp_size * c.moe_router_topk / c.num_moe_experts / grid.tp_size if of_experts else 1
            weights += p.numel() * used
        if grid.pp_rank == 0 and not self.hf_config.tie_word_embeddings:
            weights -= self.rows * c.hidden_size         # the embedding is looked up, not multiplied
        attention = 12 * c.num_attention_heads * c.kv_channels * c.num_layers / 2 / (grid.tp_size * grid.pp_size)
        return sum(6 * weights * n + attention * n**2 for n in lengths) / grid.cp_size

    def reduce_sums(self, per_batch: list[dict[str, Tensor]]) -> dict[str, float]:
        """Add up over micro-batches and DP ranks, then tell every pipeline stage. Every rank must call it."""
        names, packed = [None], None
        if self.grid.is_last_stage:
            names = sorted(per_batch[0])
            rows = torch.stack([torch.stack([d[n].double() for n in names]) for d in per_batch])  # [micro-batches, names]
            sums, largest = rows.sum(0), rows.amax(0)
            if self.grid.dp_size > 1:
                dist.all_reduce(sums, group=self.grid.dp_group)
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.grid.dp_group)
            packed = {name: (largest if name.endswith("_max") else sums)[i].item() for i, name in enumerate(names)}
        if self.grid.pp_size > 1:
            box = [packed]
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(box, src=last, group=self.grid.pp_group)
            packed = box[0]
        return packed

    # -- memory hand-over (colocated): everything of training leaves the GPU while the engine generates
    def start_sleep(self) -> None:
        """Begin to copy what sleep() takes off the GPU; the weight sync goes on beside it. Nothing may change meanwhile."""
        self.finish_loading()
        self.loading = torch.cuda.Stream() if self.device.type == "cuda" else None
        with torch.cuda.stream(self.loading):
            if self.loading is not None:
                self.loading.wait_stream(torch.cuda.default_stream())
            for storage, kind in self.storages():
                if kind == "gradients" or storage._cdata in self.away:
                    continue
                if storage._cdata not in self.host:      # page-locked, so slow to get and fast to use: kept for all the run
                    self.host[storage._cdata] = torch.empty(
                        storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
                self.host[storage._cdata].copy_(as_bytes(storage), non_blocking=True)
                self.copied.add(storage._cdata)

    def sleep(self) -> None:
        """Weights and optimizer state move to CPU memory, gradients are dropped. Only wake() may follow."""
        self.optimizer.zero_grad()           # or the main weights would keep views of the gradient buffers
        if not self.copied:
            self.start_sleep()
        leaving = {storage._cdata: (storage, kind, storage.nbytes()) for storage, kind in self.storages()
                   if storage._cdata not in self.away}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for storage, _, _ in leaving.values():   # every view stays a view, of nothing until wake()
            storage.resize_(0)
        self.away |= leaving
        self.copied, self.loading = set(), None
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wake(self, *kinds: str) -> None:
        """The inverse of sleep(), for the kinds of storages() that are named, or all of them.

        Optimizer state comes in the background: forward and backward passes need none of it.
        """
        self.loading = torch.cuda.Stream() if self.device.type == "cuda" else None
        coming = [self.away.pop(key) for key, (_, kind, _) in list(self.away.items()) if not kinds or kind in kinds]
        for storage, _, size in coming:
            storage.resize_(size)
        if self.loading is not None:         # the memory may be in use by what was queued before
            self.loading.wait_stream(torch.cuda.current_stream())
        for storage, kind, _ in coming:
            if kind != "gradients":          # those are zeroed before they are added to
                with torch.cuda.stream(self.loading if kind == "state" else None):
                    as_bytes(storage).copy_(self.host[storage._cdata], non_blocking=True)

    def finish_loading(self) -> None:
        """From here on the optimizer state is there."""
        if self.loading is not None:
            torch.cuda.current_stream().wait_stream(self.loading)
            self.loading = None

    def storages(self) -> list[tuple[torch.UntypedStorage, str]]:
        """Each piece of memory of this model once, and what is in it: "weights", "state" (of the optimizer), "gradients"."""
        found = {}

        def add(kind, tensors):
            for tensor in tensors:           # those of an offloaded optimizer are in CPU memory already
                if tensor.device.type == self.device.type:
                    found.setdefault(tensor.untyped_storage()._cdata, (tensor.untyped_storage(), kind))
        add("weights", [param for module in self.modules for param in module.parameters()])
        for chunk in self.chunks:
            add("gradients", [one.grad_data for one in chunk.buffers + chunk.expert_parallel_buffers])
        for adam in adams(self.optimizer):
            add("state", [param for group in adam.param_groups for param in group["params"]])
            add("state", [x for state in adam.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()])
        return list(found.values())

    # -- checkpoints
    def save(self, folder: pathlib.Path, extra: dict) -> None:
        """Weights, optimizer, schedule, RNG and `extra` into `folder`, loadable under any other layout. Every rank calls it.

        Written beside and renamed when complete: a kill at any moment leaves the previous checkpoint as it was.
        """
        self.finish_loading()
        make_adam_state(self.optimizer)
        part = folder.with_name(folder.name + ".part")
        if self.grid.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        state = self.sharded_state(is_loading=False) | {"extra": extra, "rng": torch.get_rng_state()}
        # NOTE: Megatron passes the writer's results through a process of its own, which imports all of this again (0.7 GB a
        # rank) and outlives a kill -9. We save and wait, so they stay in this process.
        filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
        dist_checkpointing.save(state, str(part))
        dist.barrier()
        if self.grid.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
        dist.barrier()

    def load(self, folder: pathlib.Path) -> dict:
        """The inverse of save; returns `extra`. The layout may differ from the one it was saved under."""
        with torch_adam_state(self.optimizer):
            state = dist_checkpointing.load(self.sharded_state(is_loading=True), str(folder))
            missing = [name for k, module in enumerate(self.modules)
                       for name in module.load_state_dict(state[f"model{k}"], strict=False).missing_keys]
            assert all(name.endswith("_extra_state") for name in missing), (
                f"{folder} lacks {missing}: it is a checkpoint of another model; resume with that one")
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for group in self.optimizer.param_groups:        # a resumed run may have been given another learning rate
            group.update(max_lr=self.cfg.lr, min_lr=min(self.cfg.min_lr, self.cfg.lr))
        self.scheduler.step(increment=0)
        torch.set_rng_state(state["rng"])
        return state["extra"]

    def sharded_state(self, is_loading: bool) -> dict:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
                    "chained_optim_avoid_prefix": True}
        models = {}                          # without Transformer Engine's scales of FP8
        for k, module in enumerate(self.modules):
            sharded = module.sharded_state_dict(metadata=metadata)
            models[f"model{k}"] = {name: value for name, value in sharded.items() if not name.endswith("_extra_state")}
        optimizer = self.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        return models | {"scheduler": self.scheduler.state_dict(), "optimizer": optimizer}


class AdamOnCPU(torch.optim.AdamW):
    """The same Adam by another name: Megatron tells what an offloaded optimizer has on the CPU and on the GPU by class."""


def inner_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """What is inside Megatron's wrappers: torch's Adam or, with optimizer_cpu_offload, one that holds several Adams."""
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]


def offloaded(optimizer) -> list[HybridDeviceOptimizer]:
    """Those of them that keep a part on the CPU."""
    return [one for one in inner_optimizers(optimizer) if isinstance(one, HybridDeviceOptimizer)]


def adams(optimizer) -> list[torch.optim.Optimizer]:
    """Torch's own optimizers; those of an offloaded one have their parameters in CPU memory."""
    return [adam for one in inner_optimizers(optimizer) for adam in getattr(one, "sub_optimizers", [one])]


def make_adam_state(optimizer) -> None:
    """What Adam only has after its first step: Megatron asks for it at any load, and at a save before that step."""
    for adam in adams(optimizer):
        params = [p for group in adam.param_groups for p in group["params"]]
        if not params:                       # a stage with no experts: Megatron asks its second optimizer for the step too
            adam.state["no parameters"] = {"step": torch.tensor(0.0)}
        for param in params:
            if not adam.state[param]:
                adam.state[param] = {"step": torch.tensor(0.0, device=param.device), "exp_avg": torch.zeros_like(param),
                                     "exp_avg_sq": torch.zeros_like(param)}
    for one in offloaded(optimizer):
        one._sync_sub_optimizers_state_to_hdo()          # where Megatron looks for it


@contextlib.contextmanager
def torch_adam_state(optimizer):
    """Repairs of Megatron's optimizer loading for torch's Adam.

    A fresh optimizer has no state, and Megatron asks for it. It copies every entry of a parameter's state and finds no "step"
    in the file, where that is stored once. And it hands one step tensor to all parameters, which Adam would count up once for
    each of them.
    """
    make_adam_state(optimizer)
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self, param, tensors):
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, param, tensors | {"step": state["step"]} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
    for one in offloaded(optimizer):
        one._sync_hdo_state_to_sub_optimizers()          # which Megatron leaves out for this format
    for adam in adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].to(state.get("exp_avg", state["step"]).device, copy=True)


class Pieces(dict):
    """Stands for one long tensor of all parameters' state: where a parameter's part begins -> that part."""

    def __getitem__(self, part: slice) -> Tensor:
        return super().__getitem__(part.start)


def own_optimizer_state(self, *args, empty_data: bool = False, **kwargs) -> dict:
    """For a checkpoint Megatron gathers the optimizer's state from the data-parallel ranks, in new tensors several times its
    size. With one such rank everything is here already: it is written from where it is."""
    if empty_data or self.data_parallel_group.size() > 1:
        return gathered_optimizer_state(self, *args, empty_data=empty_data, **kwargs)

    def pieces(buffer, kind):
        return Pieces({begin: self._get_main_param_and_optimizer_states(param)[kind].detach().flatten()
                       for param, (begin, _, _) in buffer.param_index_map.items()})
    return {i: {dtype: {kind: pieces(self.buffers[i], kind) for kind in ("param", "exp_avg", "exp_avg_sq")}
                for dtype in ranges} for i, ranges in enumerate(self.gbuf_ranges)}


gathered_optimizer_state = DistributedOptimizer.get_parameter_state_dp_zero
DistributedOptimizer.get_parameter_state_dp_zero = own_optimizer_state


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """The same memory, seen as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pick(cls: type, values: dict) -> dict:
    """Those of the run file's `megatron` settings that are fields of this dataclass."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {k: v for k, v in values.items() if k in names}
