"""
placement.py: who runs where? A Ray started or joined, and a GPU for every trainer rank and every engine.

    Ray cluster --one placement group, a bundle per GPU--> bundles node by node --> trainer ranks first, engines after them
                                                                                  (colocated: both from the first bundle on)

Test:  pytest tests/test_loop.py
Knows nothing about: what runs there. On a machine with no GPU there is nothing to place: everything runs on its CPU.
"""
import contextlib
import os
import pathlib


def start_ray(cfg, stack: contextlib.ExitStack) -> tuple[list, list] | None:
    """-> (placement of each trainer rank, placement of each engine); None on a machine with no GPU."""
    import ray
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")        # Ray's 15 would let anything else on a laptop starve us
        # Workers import our files, so the repository is on their path. More "CPUs" than there are: most actors only wait.
        path = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {"env_vars": {"PYTHONPATH": path}}
        local = {} if cfg.ray_address else dict(num_cpus=32, include_dashboard=False)
        ray.init(address=cfg.ray_address, runtime_env=env, log_to_driver=True, logging_level="warning", **local)
        stack.callback(ray.shutdown)
    if cfg.device == "cpu":
        return None
    gpus = cfg.actor_num_gpus if cfg.colocate else cfg.actor_num_gpus + cfg.rollout_num_gpus
    have = int(ray.cluster_resources().get("GPU", 0))
    if have < gpus:
        raise ValueError(f"the run needs {gpus} GPUs, the Ray cluster has {have}; set actor_num_gpus and rollout_num_gpus "
                         "lower, set colocate=True, or add nodes (ray start --address=...)")
    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK")
    stack.callback(ray.util.remove_placement_group, group)
    ray.get(group.ready(), timeout=cfg.start_timeout_s)
    bundles = sorted_bundles(group, gpus, cfg.start_timeout_s)                # [(bundle, gpu id)] node by node
    trainers = [(group, bundle) for bundle, _ in bundles[:cfg.actor_num_gpus]]
    rest = bundles if cfg.colocate else bundles[cfg.actor_num_gpus:]
    engines = [(group, *rest[i]) for i in range(0, cfg.rollout_num_gpus, cfg.rollout_num_gpus_per_engine)]
    return trainers, engines


def sorted_bundles(group, count: int, timeout_s: float) -> list[tuple[int, int]]:
    """(bundle index, GPU id on its node), sorted by node and GPU, so that one engine's GPUs lie side by side."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_gpus=1)
    def where():
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])
    places = ray.get([where.options(scheduling_strategy=PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=i)).remote() for i in range(count)], timeout=timeout_s)
    order = sorted(range(count), key=lambda i: places[i])
    return [(i, places[i][1]) for i in order]
