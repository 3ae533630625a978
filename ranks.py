"""
ranks.py: who is who? The trainers' process group, and the groups that Megatron cuts it into.

    rank, world, address --init_distributed--> Grid: this process's place in each kind of parallelism, and its groups

Test:  pytest tests/test_model.py tests/test_families.py
Knows nothing about: models. Every rank of the job calls init_distributed.

The ranks are a grid, tensor-parallel fastest (Megatron's order "tp-cp-ep-dp-pp"), here world 8 = tp 2 * dp 2 * pp 2:

                  dp 0           dp 1
      pp 0     tp 0   tp 1    tp 0   tp 1        rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))
      pp 1     tp 0   tp 1    tp 0   tp 1        one row of one column holds one copy of half the layers

Context-parallel ranks share a micro-batch: each computes the layers for its part of every sequence (layers.zigzag). Their
log-probs are then put together, and from there on all of them do the same: masks, losses and metrics know nothing of cp.

Experts lie across another grid over the same ranks of a stage: tp * cp * dp = etp * ep * the rest, etp fastest.
"""
import datetime
import math
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

import logprobs


@dataclass
class Grid:
    """Where this process stands. Groups are None-safe: a group of one rank is skipped by whoever communicates."""
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup              # without cp: these see different samples
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup
    ep_rank: int                             # whose experts are ep_rank * e, ..., ep_rank * e + e - 1
    ep_size: int
    ep_group: dist.ProcessGroup
    etp_rank: int
    etp_size: int
    etp_group: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def init_distributed(cfg, rank: int, world_size: int, master_addr: str, master_port: int) -> Grid:
    """Join the trainers' process group and cut it into the grid. Every rank must call it; waits train_timeout_s at most."""
    if cfg.device == "cpu":
        import gloo
        gloo.megatron_on_cpu()
    else:
        torch.cuda.set_device(0)             # Ray shows this process only its own GPU
        # Megatron adds a weight's gradient to its fp32 sum inside the product, where apex's extension is installed. Torch can.
        tensor_parallel.layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda x, dy, total: logprobs.add_product(total, dy.t(), x))
        tensor_parallel.layers._grad_accum_fusion_available = True
    timeout = datetime.timedelta(seconds=cfg.train_timeout_s)
    dist.init_process_group("gloo" if cfg.device == "cpu" else "nccl", rank=rank, world_size=world_size, timeout=timeout,
                            init_method=f"tcp://{master_addr}:{master_port}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=cfg.virtual_pipeline_model_parallel_size,
        context_parallel_size=cfg.context_parallel_size,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        expert_tensor_parallel_size=cfg.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(cfg.train_timeout_s / 60)))
    tensor_parallel.model_parallel_cuda_manual_seed(cfg.seed)
    ps = parallel_state
    return Grid(rank, world_size,
                ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size(),
                ps.get_tensor_model_parallel_group(),
                ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size(),
                ps.get_pipeline_model_parallel_group(),
                ps.get_data_parallel_rank(), ps.get_data_parallel_world_size(), ps.get_data_parallel_group(),
                ps.get_context_parallel_rank(), ps.get_context_parallel_world_size(), ps.get_context_parallel_group(),
                ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size(),
                ps.get_expert_model_parallel_group(),
                ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size(),
                ps.get_expert_tensor_parallel_group())
