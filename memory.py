"""
memory.py: who leaves a GPU while the other works? What trainer and engine need of one that they share.

    model, layout, tokens a micro-batch --estimate--> what a rank keeps, what it needs while it trains
                                        --share_memory--> offload_train, offload_rollout, mem_fraction_static

Test:  pytest tests/test_memory.py     (the estimate against what was measured on an H200)
Knows nothing about: which GPUs, and whose. The moves themselves are in model.py (sleep, wake) and engines.py.
"""
import dataclasses

# Shares of a GPU's memory.
USEFUL_ENGINE = 0.3                          # weights and a KV cache that is worth having
SLACK = 0.1                                  # that an engine leaves free of its own: CUDA graphs, activations, fragmentation
CUDA = 0.05                                  # contexts and kernels of both sides


def share_memory(cfg, hf_config, parameters: int, gpu_bytes: int):
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
    tp, pp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    dp = cfg.actor_num_gpus // (tp * pp) if cfg.use_distributed_optimizer else 1
    own = parameters / (tp * pp)
    models = 2 if cfg.critic and not cfg.critic_num_gpus else 1              # a critic beside the actor, of the same size
    weights, kept = 2 * own * models, own * (6 + 12 / dp) * models
    logits = 8 * cfg.log_probs_chunk_size * hf_config.vocab_size / tp        # in bf16 and fp32, and their gradient
    training = kept + activations(cfg, hf_config) + logits
    weights, kept, training = (size / gpu_bytes for size in (weights, kept, training))
    if training + CUDA > 1:
        print(f"training may need {(training + CUDA) * gpu_bytes / 1e9:.0f} GB of a GPU's {gpu_bytes / 1e9:.0f}; if it runs "
              "out, set max_tokens_per_gpu lower, megatron=dict(recompute_granularity='full', recompute_method='uniform', "
              "recompute_num_layers=1), or use more GPUs", flush=True)
    room = 1 - USEFUL_ENGINE - SLACK - CUDA  # for the trainer, beside an engine
    new = dict(offload_rollout=training > room, offload_train=kept > room)
    new = {key: value for key, value in new.items() if getattr(cfg, key) is None}
    cfg = dataclasses.replace(cfg, **new)
    beside = training                        # what the engine must leave free while it generates
    if cfg.offload_rollout:                  # weights also where the trainer left: a restarted engine gets them in mid-rollout
        beside = (weights if cfg.offload_train else kept) + 3 * cfg.update_weight_buffer_size / gpu_bytes
    return dataclasses.replace(cfg, sglang={"mem_fraction_static": round(max(1 - SLACK - CUDA - beside, 0.1), 2)} | cfg.sglang)


def activations(cfg, hf_config) -> float:
    """Bytes that one rank keeps for the backward pass, about: 36 for each token, layer and hidden unit (2205.05198, sec. 4,
    without attention scores), of which 10 are split by sequence parallelism only; 2 where the layer is computed again.

    Not divided by pipeline stages: the first of them holds as many micro-batches as there are stages.
    """
    tp, pp, layers = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, hf_config.num_hidden_layers
    split = tp if cfg.sequence_parallel else 1
    again = 0                                # layers whose input alone is kept
    if cfg.megatron.get("recompute_granularity") == "full":
        again = layers
        if cfg.megatron.get("recompute_method") == "block":      # so many of each stage
            again = min(layers, pp * cfg.megatron.get("recompute_num_layers", 0))
    bytes_each = (layers - again) * (10 / split + 26 / tp) + again * 2 / split
    return cfg.max_tokens_per_gpu * hf_config.hidden_size * bytes_each
