"""
actor.py: which pass runs when, on which weights? One Ray actor per training rank, and the driver's handle on all of them.

    train.py: Trainers --Ray--> TrainActor (rank 0, 1, ...): MegatronModel + WeightSync + CPU copies of other weights
    one rollout:  [ref weights in] ref log-probs [policy back] -> old log-probs -> advantages -> optimizer steps

Test:  pytest tests/test_weights_sync.py tests/test_loop.py
Knows nothing about: prompts, engines' lives, rewards beyond one number a sample.
Left out on purpose: a second model in GPU memory for the reference; its weights wait in CPU memory and are swapped in.
"""
import gc
import pathlib
import time

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engines import free_port


# ---- One rank --------------------------------------------------------------------------------------------------------
class TrainActor:
    """One training rank. Its methods are called on all ranks at once, with the same arguments."""

    def __init__(self, cfg, rank: int):
        self.cfg, self.rank = cfg, rank
        self.version = 0                     # of the weights in the model: how many rollouts they have learnt from

    def address(self) -> tuple[str, int]:
        """Where rank 0 lets the others meet."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host, part=1)

    def start(self, address: tuple[str, int], hf_folder: str, ref_folder: str | None, total_steps: int, disk_dir: str) -> dict:
        """Join the group, build the model, load the weights. -> what the driver should know."""
        import torch                         # heavy imports here: the driver, which imports this file, needs none of them
        if self.cfg.device == "cpu":
            import os
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.cfg.actor_num_gpus))
        if self.cfg.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        import layers
        import model
        import weights_sync
        torch.manual_seed(self.cfg.seed)
        self.grid = model.init_distributed(self.cfg, self.rank, self.cfg.actor_num_gpus, *address)
        self.model = model.MegatronModel(self.cfg, self.grid, hf_folder, total_steps)
        self.reference = None
        if ref_folder is not None:
            # With the folder that was just loaded the reference is a copy; else load it, keep it, and load ours again.
            if ref_folder != hf_folder:
                policy = self.model.snapshot()
                self.model.load_hf(ref_folder)
                self.reference = self.model.snapshot()
                self.model.restore(policy)
            else:
                self.reference = self.model.snapshot()
        self.sync = weights_sync.WeightSync(self.cfg, self.model, pathlib.Path(disk_dir))
        gc.collect()
        gc.freeze()                          # see train.start
        return {"dp_size": self.grid.dp_size, "attention": layers.attention_name(self.model.config, self.model.device)}

    # -- training
    def train(self, step: int, data: dict, plan: list) -> dict:
        """All optimizer steps on one rollout. data: to_flat(to_train_data(...)); plan: buffer.plan. -> metrics, seconds."""
        import torch

        import algos
        import buffer
        begin, times = time.perf_counter(), {}
        data = buffer.from_flat(data)
        steps = [ranks[self.grid.dp_rank] for ranks in plan]     # [optimizer step][micro-batch] -> positions in the data
        own = sorted(i for batches in steps for one in batches for i in one)
        data = {key: [values[i] for i in own] for key, values in data.items()}       # this rank's samples only
        local = {i: k for k, i in enumerate(own)}                # position in the whole data -> in this rank's
        steps = [[[local[i] for i in one] for one in batches] for batches in steps]

        loss = algos.LOSSES[self.cfg.loss_type]
        if self.cfg.loss_type == "policy":
            if self.reference is not None:
                with timed(times, "ref_log_probs_time"):
                    policy = self.model.snapshot()
                    self.model.restore(self.reference)
                    self.add_log_probs(data, steps, "ref_log_probs")
                    self.model.restore(policy)
            if self.needs_old_log_probs(step, len(steps)):
                with timed(times, "log_probs_time"):
                    self.add_log_probs(data, steps, "log_probs")
            data["advantages"] = algos.ADVANTAGES[self.cfg.advantage_estimator].advantages(self.cfg, data)
        else:
            del data["rollout_log_probs"]    # rows of a file were sampled by nobody

        per_step = []
        with timed(times, "actor_train_time"):
            for micro_batches in steps:
                batches = [buffer.pack(data, one, self.model.pad_to, self.model.device) for one in micro_batches]
                per_step.append(self.model.train_step(batches, lambda x: loss(self.cfg, x)))
        self.version = step + 1
        if self.cfg.offload_train:
            self.model.start_sleep()
        elif self.cfg.offload_rollout:
            torch.cuda.empty_cache()         # the activations' memory, to the engine
        times["train_time"] = time.perf_counter() - begin
        return {"steps": per_step, "times": times, "flops": self.model.train_flops([len(t) for t in data["tokens"]])}

    def needs_old_log_probs(self, step: int, optimizer_steps: int) -> bool:
        """With one optimizer step the old policy is the current one, so old := logp.detach() saves a whole pass. Step 0 does
        not save it: that two passes over the same tokens agree (ppo_kl = 0) is a check of everything in between."""
        return optimizer_steps > 1 or step == 0

    def add_log_probs(self, data: dict, steps: list, key: str) -> None:
        """data[key] = log-probs under the weights now in the model, per sample. Only the last pipeline stage has them."""
        import buffer
        flat = [one for batches in steps for one in batches]
        batches = [buffer.pack(data, one, self.model.pad_to, self.model.device) for one in flat]
        out = self.model.forward_log_probs(batches)
        if self.grid.is_last_stage:
            data[key] = [None] * len(data["tokens"])
            for batch, logp in zip(batches, out):
                for sample, own in zip(batch.samples, logp.split(batch.lengths)):
                    data[key][sample] = own.cpu()

    # -- weights and checkpoints
    def push(self, urls: list[str], owners: list[list[int]], check: bool) -> dict:
        return self.sync.push(self.version, urls, owners, check)

    def save(self, folder: str, extra: dict) -> None:
        self.model.save(pathlib.Path(folder), extra)

    def save_hf(self, folder: str) -> None:
        import convert
        import weights_sync
        if self.grid.dp_rank != 0:
            return
        stream = weights_sync.buckets(self.model, self.cfg.update_weight_buffer_size)
        if self.rank == 0:
            convert.save_hf(folder, self.model.hf_folder, self.model.hf_config,
                            ((name, tensor) for bucket in stream for name, tensor in bucket.tensors()))
        else:
            for _ in stream:                 # take part in the gathering
                pass

    def sleep(self) -> None:
        self.model.sleep()

    def wake(self, *kinds: str) -> None:
        self.model.wake(*kinds)

    def load(self, folder: str) -> dict:
        extra = self.model.load(pathlib.Path(folder))
        self.version = extra["step"]
        return extra


class timed:
    """with timed(times, "name"): adds the seconds of the block to times["name"]."""

    def __init__(self, times: dict, name: str):
        self.times, self.name = times, name

    def __enter__(self):
        self.begin = time.perf_counter()

    def __exit__(self, *error):
        self.times[self.name] = self.times.get(self.name, 0.0) + time.perf_counter() - self.begin


# ---- All ranks, seen from the driver -----------------------------------------------------------------------------------
class Trainers:
    """The trainers as one object. Every call waits for all ranks, with a limit that says who was waited for."""

    def __init__(self, cfg, places=None):
        """places: a placement.Places; None for a CPU run."""
        self.cfg, self.actors = cfg, []
        # Whose weights go to which GPU of which engine, where they travel through memory: those of the trainer on that GPU. On
        # a CPU any trainer could serve any engine, so there they take turns.
        ranks, width = cfg.actor_num_gpus, cfg.rollout_num_gpus_per_engine
        self.owners = places.owners if places else [
            [(first + k) % ranks for k in range(width)] for first in range(0, cfg.rollout_num_gpus or 0, width)]
        self.syncs = 0                       # how often weights were pushed, for the cadence of checks
        for rank in range(cfg.actor_num_gpus):
            # NCCL_CUMEM_ENABLE as SGLang sets it, or the first broadcast to the engines hangs for ever. PASSIVE: on a CPU the
            # threads of a waiting trainer must not spin on the cores that the engine needs.
            options = dict(num_cpus=0, runtime_env={"env_vars": {"NCCL_CUMEM_ENABLE": "0", "OMP_WAIT_POLICY": "PASSIVE",
                                                               "CUBLAS_WORKSPACE_CONFIG": ":4096:8",   # same sums every time
                                                               "PYTHONWARNINGS": "ignore"}})   # Megatron's, about apex
            if places is not None:
                group, bundle = places.trainers[rank]
                options |= dict(num_gpus=0.4 if cfg.colocate else 1, scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle))
            self.actors.append(ray.remote(TrainActor).options(**options).remote(cfg, rank))

    def start(self, hf_folder: str, ref_folder: str | None, total_steps: int, disk_dir: str) -> dict:
        limit_s = self.cfg.start_timeout_s
        address = ray.get(self.actors[0].address.remote(), timeout=limit_s)
        return self.call("start", address, hf_folder, ref_folder, total_steps, disk_dir, timeout_s=limit_s)

    def call(self, method: str, *args, timeout_s: float | None = None) -> dict:
        """The same method on every rank -> rank 0's answer. The first rank that fails ends the wait for all."""
        limit_s = timeout_s or self.cfg.train_timeout_s
        pending = [getattr(actor, method).remote(*args) for actor in self.actors]
        first, end = pending[0], time.monotonic() + limit_s
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                raise TimeoutError(f"trainers: {method}() was not done on {len(pending)} of {len(self.actors)} ranks in "
                                   f"{limit_s:.0f} s; set train_timeout_s (start: start_timeout_s) higher if the work is that "
                                   "long, else look in the Ray logs")
            ray.get(done)                    # raises what the rank raised
        return ray.get(first)

    def train(self, step: int, data: dict, plan: list) -> dict:
        import buffer
        return self.call("train", step, ray.put(buffer.to_flat(data)), ray.put(plan))

    def sleep(self) -> None:
        self.call("sleep")

    def wake(self, *kinds: str) -> None:
        """kinds: of "weights", "state", "gradients"; none named is all."""
        self.call("wake", *kinds)

    def push_weights(self, engines, version: int | None, only: list[int] | None = None) -> dict[str, float]:
        """pause -> flush -> buckets -> verify -> version -> continue. `only`: ranks of engines that were just restarted.

        version: what the trainers must hold; None: what they do hold, which the engines are told in any case.
        """
        interval = self.cfg.check_weight_update_interval
        check = self.syncs == 0 or only is not None or (interval > 0 and self.syncs % interval == 0)
        ranks = range(len(engines.urls)) if only is None else only
        urls, owners = [engines.urls[rank] for rank in ranks], [self.owners[rank] for rank in ranks] if self.owners else []
        times = {}
        if only is None:
            with timed(times, "pause"):
                engines.pause()
                engines.flush_cache()
        with timed(times, "send"):
            answer = self.call("push", urls, owners, check)
            assert version in (None, answer["version"]), (
                f"the trainers pushed weights of version {answer['version']}, the loop is at {version}: a training step or a "
                "checkpoint was counted twice or not at all; restart with --resume")
            version = answer["version"]
        if check:
            with timed(times, "check"):
                import weights_sync
                have = engines.post("/weights_checker", {"action": "checksum"}, only=only)
                weights_sync.compare_checksums(answer["expected"], have, ranks)
        with timed(times, "resume"):
            engines.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, only=only)
            if only is None:
                engines.resume()
                self.syncs += 1
            versions = engines.weight_versions() if only is None else [str(version)]
        assert set(versions) == {str(version)}, (
            f"engines hold weight versions {versions}, the trainer pushed {version}: a sync was lost; restart with --resume")
        return {"perf/update_weights_bytes": answer["bytes"]} | {f"perf/update_weights/{k}_time": v for k, v in times.items()}

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
