"""
memory.py: who leaves a GPU while the other works? What trainer and engine need of one that they share.

    what a rank keeps, what it needs while it trains (plan.py) --share_memory--> offload_train, offload_rollout,
                                                                                 mem_fraction_static
Test:  pytest tests/test_memory.py
Knows nothing about: which GPUs, and whose; how many bytes anything has (plan.py). The moves are in model.py (sleep, wake)
       and engines.py.
"""
import dataclasses

import plan

USEFUL_ENGINE = 0.3                          # share of a GPU's memory: weights and a KV cache that is worth having


def share_memory(cfg, hf_config, gpu_bytes: int):
    """The Config with offload_train, offload_rollout and the engine's memory settled, where it leaves them open.

    A rank keeps weights and fp32 gradients (2 + 4 bytes a parameter), fp32 weights and Adam's two moments (12, split over
    data-parallel ranks). While it trains it needs activations and a chunk of logits too. From what moves least to what moves
    most, and what it costs in each step of a 4B model:

        what fits beside a useful engine                        who leaves the GPU              seconds
        all that training needs                                 nobody                          0
        what a rank keeps                                       the engine, while they train    0.1
        neither                                                 both, to the other              1.5

    NOTE: an engine takes its share of the memory that it finds free. One that is restarted beside a trainer that stays finds
    less, and has a smaller KV cache until the run is started anew.
    """
    if not cfg.colocate or cfg.device == "cpu":
        return dataclasses.replace(cfg, offload_train=False, offload_rollout=False)
    rank = plan.trainer(cfg, hf_config)      # a critic beside the actor counted in
    weights, kept, training = (size / gpu_bytes for size in (rank.weights, rank.kept, rank.total))
    share = 1 - plan.SLACK - plan.CUDA       # of both sides
    room = share - cfg.sglang.get("mem_fraction_static", USEFUL_ENGINE)        # for the trainer, beside an engine
    new = dict(offload_rollout=training > room, offload_train=kept > room)
    new = {key: value for key, value in new.items() if getattr(cfg, key) is None}
    cfg = dataclasses.replace(cfg, **new)
    beside = training                        # what the engine must leave free while it generates
    if cfg.offload_rollout:                  # weights also where the trainer left: a restarted engine gets them in mid-rollout
        beside = (weights if cfg.offload_train else kept) + 3 * cfg.update_weight_buffer_size / gpu_bytes
    return dataclasses.replace(cfg, sglang={"mem_fraction_static": round(max(share - beside, 0.1), 2)} | cfg.sglang)
