"""
gloo.py: what lets Megatron run with no GPU? Its CUDA literals mean the CPU, and gloo learns what it lacks.

Run:   nothing to run; ranks.init_distributed calls it where device is "cpu".
Test:  pytest tests/test_cpu.py tests/test_families.py
Knows nothing about: the rest of nanoslime. Nothing of this file is used where there is a GPU.
"""
import functools


@functools.cache
def megatron_on_cpu() -> None:
    """Make Megatron-core's CUDA literals mean the CPU, for the rest of this process. Call it in its main thread.

    Megatron names CUDA in a few places even when told to use the CPU: `device="cuda"`, `torch.cuda.current_device()`,
    `.cuda()`, `tensor.type() == "torch.cuda.FloatTensor"`, and its random-number tracker. Nothing else is touched.
    """
    import torch
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from torch.overrides import TorchFunctionMode

    def on_cpu(device):
        return "cpu" if str(device).startswith("cuda") else device

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
            out = func(*args, **kwargs)
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return out.replace("torch.", "torch.cuda.")   # asked for its name: the optimizer sorts parameters by it
            return out

    class NoStream:
        """A stream, or an event on one: on a CPU everything has happened when it was called."""

        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def record_event(self):
            return self

        def wait_stream(self, other):
            pass

        synchronize = record_event

    CudaMeansCpu().__enter__()               # for good: this process trains and does nothing else
    nothing = NoStream()
    torch.cuda.Stream = NoStream
    for name, value in dict(current_device=lambda: torch.device("cpu"), synchronize=lambda device=None: None,
                            set_device=lambda device: None, empty_cache=lambda: None, manual_seed=torch.manual_seed,
                            get_rng_state=lambda device=None: torch.get_rng_state(),
                            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
                            current_stream=lambda device=None: nothing, stream=lambda stream: nothing).items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, record_stream=False: (
        x.numpy() if as_numpy and torch.is_tensor(x) else x)             # its own leaves out what is on the CPU already
    mappings._gather_along_first_dim = ragged_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = ragged_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def ragged_gather(gather):
    """Megatron's, also for parts of different lengths (tokens at an expert that several ranks share), which gloo lacks."""
    import torch.distributed as dist

    def gathered(x, group, sizes=None, *args):
        if sizes is None or group.size() == 1:
            return gather(x, group, sizes, *args)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        for rank, part in enumerate(out.split(list(sizes))):
            if rank == group.rank():
                part.copy_(x)
            dist.broadcast(part, dist.get_global_rank(group, rank), group)
        return out
    return gathered


def ragged_reduce_scatter(reduce_scatter):
    """The same for its gradient."""
    import torch.distributed as dist

    def scattered(x, group, sizes=None, *args):
        if sizes is None or group.size() == 1:
            return reduce_scatter(x, group, sizes, *args)
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.split(list(sizes))[group.rank()]
    return scattered
