"""
placement.py: who runs where? A Ray started or joined, and a GPU for every trainer rank and every engine.

    Ray cluster --one placement group, a bundle per GPU--> bundles node by node --> trainers on the first GPUs, engines
                                                                  on the last ones; colocated, both sides have all

Test:  pytest tests/test_placement.py tests/test_loop.py
Knows nothing about: what runs there. A CPU run has nothing to place: everything is on this machine.
"""
import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import socket


@dataclasses.dataclass
class Places:
    trainers: list[tuple]                    # of each rank: (placement group, its bundle)
    critics: list[tuple]                     # the same for a critic with GPUs of its own
    engines: list[list[tuple]]               # of each engine, for each of its nodes: (group, first bundle, its GPUs there)
    owners: list[list[int]]                  # colocated: the trainer rank on each GPU of each engine
    gpu_bytes: int                           # colocated: of the smallest GPU


def start_ray(cfg, stack: contextlib.ExitStack) -> Places | None:
    """A Ray of our own, or the cluster at cfg.ray_address, and a place there for everybody; None with device="cpu"."""
    import ray
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")        # Ray's 15 would let anything else on a laptop starve us
        # Workers import our files, so the repository is on their path.
        path = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {"env_vars": {"PYTHONPATH": path}}
        # `ray job submit` sets RAY_ADDRESS. NOTE: with no address at all, Ray joins whatever cluster this machine has.
        address = cfg.ray_address or os.environ.get("RAY_ADDRESS") or "local"
        # More "CPUs" than there are: most actors only wait.
        local = dict(num_cpus=32, include_dashboard=False) if address == "local" else {}
        try:
            if address.count(":") == 1:                          # ray.init would try for four minutes
                socket.create_connection(address.split(":"), 10).close()
            ray.init(address=address, runtime_env=env, log_to_driver=True, logging_level="warning", **local)
        except (OSError, ray.exceptions.RayError) as error:
            raise ValueError(f"no Ray cluster at ray_address={address!r} ({error}); run `ray start --head` there, or leave "
                             "ray_address and RAY_ADDRESS unset for a Ray of this run's own") from error
        stack.callback(ray.shutdown)
    if cfg.device == "cpu":
        if sum(node["Alive"] for node in ray.nodes()) > 1:
            raise ValueError("a CPU run is for one machine, its weights travel through memory; leave ray_address unset, or "
                             "set device='cuda' if only this machine of the cluster has no GPU")
        return None
    engine_gpus = 0 if cfg.loss_type == "sft" or cfg.debug_train_only else cfg.rollout_num_gpus
    actors, critics = (0, 0) if cfg.debug_rollout_only else (cfg.actor_num_gpus, cfg.critic_num_gpus or 0)
    ranks = actors + critics
    gpus = ranks + (0 if cfg.colocate else engine_gpus)
    have = int(ray.cluster_resources().get("GPU", 0))
    if have < gpus:
        raise ValueError(f"the run needs {gpus} GPUs, the Ray cluster has {have}; set actor_num_gpus and rollout_num_gpus "
                         "lower, set colocate=True, or add nodes (ray start --address=...)")
    # PACK: on as few nodes as possible, so that most collectives stay within a node.
    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK")
    stack.callback(ray.util.remove_placement_group, group)
    try:
        ray.get(group.ready(), timeout=cfg.start_timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"{gpus} GPUs were not free in {cfg.start_timeout_s:.0f} s (start_timeout_s); Ray has {have}, of "
                           f"which free now: {ray.available_resources().get('GPU', 0):g}. Is another run on them?") from None
    places = ask_bundles(group, gpus, where, cfg.start_timeout_s)
    width = cfg.rollout_num_gpus_per_engine
    trainers, engines = assign(places, ranks, engine_gpus // width, width, cfg.colocate)
    owners, gpu_bytes = [], 0
    if cfg.colocate:
        owners = [[trainers.index(bundle) for part in engine for bundle in part] for engine in engines]
        gpu_bytes = min(ask_bundles(group, gpus, total_memory, cfg.start_timeout_s))
    return Places(
        trainers=[(group, bundle) for bundle in trainers[:actors]],
        critics=[(group, bundle) for bundle in trainers[actors:]],
        engines=[[(group, part[0], [places[bundle][1] for bundle in part]) for part in engine] for engine in engines],
        owners=owners, gpu_bytes=gpu_bytes)


def where() -> tuple[str, str]:
    """This bundle's node, and its GPU there as CUDA_VISIBLE_DEVICES would name it."""
    import ray
    return ray.util.get_node_ip_address() + " " + ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


def total_memory() -> int:
    """Bytes of this bundle's GPU."""
    import pynvml
    pynvml.nvmlInit()
    gpu = where()[1]
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
    return pynvml.nvmlDeviceGetMemoryInfo(handle).total


def ask_bundles(group, count: int, question, timeout_s: float) -> list:
    """question() run on each bundle's GPU -> the answers, in the bundles' order."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    ask = ray.remote(num_gpus=1)(question)
    bundles = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(count)]
    try:
        return ray.get([ask.options(scheduling_strategy=bundle).remote() for bundle in bundles], timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"Ray has {count} GPUs for us, but a worker there did not answer in {timeout_s:.0f} s "
                           "(start_timeout_s); see /tmp/ray/session_latest/logs on each machine") from None


def assign(places: list[tuple[str, str]], ranks: int, engines: int, width: int, colocate: bool) -> tuple[list, list]:
    """places: (node, GPU there) of each bundle -> (bundle of each trainer rank, bundles on each node of each engine).

    An engine's GPUs are on one node; only where no node has as many, on several, equally many on each. Engines choose first,
    from the last node backwards; trainers take what is left, node by node: a tensor-parallel group lies on two nodes only
    where a node has an odd rest. Colocated, each side has all of them.
    """
    order = sorted(range(len(places)), key=lambda i: (places[i][0], len(places[i][1]), places[i][1]))     # "9" before "10"
    widest = max(collections.Counter(node for node, _ in places).values())
    taken, found = set(), []
    for start in reversed(range(len(order) - width + 1)):
        window = order[start:start + width]
        parts = [list(part) for _, part in itertools.groupby(window, key=lambda i: places[i][0])]
        fits = len(parts) == 1 or (width > widest and len({len(part) for part in parts}) == 1)
        if len(found) < engines and fits and not taken & set(window):
            found.append(parts)
            taken |= set(window)
    if len(found) < engines:
        raise ValueError(f"only {len(found)} of {engines} engines find {width} GPUs on one node, or equally many on each of "
                         f"several, in {sorted(places)}; set rollout_num_gpus_per_engine lower, or give Ray whole nodes")
    rest = order if colocate else [i for i in order if i not in taken]
    return rest[:ranks], found[::-1]
