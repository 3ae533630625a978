"""
actor.py: which pass runs when, on which weights? One Ray actor per training rank, and the driver's handle on all of them.

    train.py: Trainers --Ray--> TrainActor (rank 0, 1, ...): MegatronModel + WeightSync + CPU copies of other weights
    one rollout:  [reference in: its log-probs] [teacher in: its] [policy back: old log-probs] -> advantages -> optimizer steps

    PPO has a second Trainers, of CriticActors:   values --> (actors: advantages, returns, optimizer steps) --> critic's steps

Test:  pytest tests/test_weights_sync.py tests/test_loop.py
Knows nothing about: prompts, engines' lives, rewards beyond one number a sample.
Left out on purpose: a second model in GPU memory for reference and teacher; their weights wait in CPU memory.
"""
import gc
import pathlib
import threading
import time

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.base import critic_config
from engines import free_port


# ---- One rank --------------------------------------------------------------------------------------------------------
class TrainActor:
    """One training rank. Its methods are called on all ranks at once, with the same arguments."""
    is_critic = False

    def __init__(self, cfg, rank: int):
        self.cfg, self.rank = cfg, rank
        self.version = 0                     # of the weights in the model: how many rollouts they have learnt from

    def address(self) -> tuple[str, int]:
        """Where rank 0 lets the others meet."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host, part=1)

    def start(self, address: tuple[str, int], hf_folder: str, others: dict[str, str], total_steps: int, disk_dir: str) -> dict:
        """Join the group, build the model, load the weights. -> what the driver should know."""
        import torch                         # heavy imports here: the driver, which imports this file, needs none of them
        if self.cfg.device == "cpu" or self.cfg.megatron.get("optimizer_cpu_offload"):
            import os
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.cfg.actor_num_gpus))
        if self.cfg.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        import layers
        import model
        import weights_sync
        torch.manual_seed(self.cfg.seed)
        self.grid = model.init_distributed(self.cfg, self.rank, self.cfg.actor_num_gpus, *address)
        self.build(hf_folder, others, total_steps)
        self.sync = weights_sync.WeightSync(self.cfg, self.model, pathlib.Path(disk_dir))
        gc.collect()
        gc.freeze()                          # see train.start
        return {"dp_size": self.grid.dp_size, "attention": layers.attention_name(self.model.config, self.model.device)}

    def build(self, hf_folder: str, others: dict[str, str], total_steps: int) -> None:
        """The model, and in CPU memory the weights of others of the same shape: "ref", "teacher" -> folder."""
        import model
        self.model = model.MegatronModel(self.cfg, self.grid, hf_folder, total_steps, value_head=self.is_critic)
        policy, self.others = self.model.snapshot() if others else None, {}
        for name, folder in others.items():
            if folder == hf_folder:
                self.others[name] = policy
                continue
            self.model.load_hf(folder)
            self.others[name] = self.model.snapshot()
            self.model.restore(policy)

    # -- training
    def train(self, step: int, data: dict, plan: list, update: bool = True) -> dict:
        """One rollout. data: to_flat(to_train_data(...)); plan: buffer.plan. -> metrics, seconds, with a critic its returns.

        update=False: the advantages only, for steps in which the critic alone learns.
        """
        import algos
        begin, times = time.perf_counter(), {}
        data, steps, own = self.own_part(data, plan)
        if self.cfg.loss_type == "sft":
            del data["rollout_log_probs"]    # rows of a file were sampled by nobody
        else:
            policy = self.model.snapshot() if self.others else None
            for name, weights in self.others.items():
                with timed(times, f"{name}_log_probs_time"):
                    self.model.restore(weights)
                    self.add_outputs(data, steps, f"{name}_log_probs")
                    self.model.restore(policy)
            if self.cfg.use_rollout_logprobs:
                data["log_probs"] = data["rollout_log_probs"]
            elif self.needs_old_log_probs(step, len(steps)):
                with timed(times, "log_probs_time"):
                    self.add_outputs(data, steps, "log_probs")
            if self.grid.is_last_stage:      # where log-probs are, and the loss
                algos.compute_advantages(self.cfg, data, self.model.device, self.grid.dp_group)
        answer = {"steps": [], "times": times, "flops": 0.0, "returns": self.told(own, data, "returns")}
        if update:
            with timed(times, "actor_train_time"):
                answer["steps"] = self.optimizer_steps(data, steps, algos.LOSSES[self.cfg.loss_type])
            answer["flops"] = self.model.train_flops([len(t) for t in data["tokens"]])
        self.after_training(step)
        times["train_time"] = time.perf_counter() - begin
        return answer

    def own_part(self, data: dict, plan: list) -> tuple[dict, list, list[int]]:
        """-> this rank's samples, its plan [optimizer step][micro-batch] in their positions, their positions in the whole."""
        import buffer
        data = buffer.from_flat(data)
        steps = [ranks[self.grid.dp_rank] for ranks in plan]     # [optimizer step][micro-batch] -> positions in the data
        own = sorted(i for batches in steps for one in batches for i in one)
        data = {key: [values[i] for i in own] for key, values in data.items()}
        local = {i: k for k, i in enumerate(own)}
        return data, [[[local[i] for i in one] for one in batches] for batches in steps], own

    def told(self, own: list[int], data: dict, key: str) -> dict:
        """{position in the whole data: [R_i]}, of the one rank that speaks for those that hold the same."""
        return dict(zip(own, data[key])) if key in data and self.grid.tp_rank == self.grid.cp_rank == 0 else {}

    def optimizer_steps(self, data: dict, steps: list, loss) -> list[dict]:
        out = []
        for micro_batches in steps:
            batches = [self.model.pack(data, one) for one in micro_batches]
            out.append(self.model.train_step(batches, lambda x: loss(self.cfg, x)))
        return out

    def after_training(self, step: int) -> None:
        import torch
        self.version = step + 1
        self.model.routes.clear()            # used up, and in the engine's way
        if self.cfg.offload_train:
            self.model.start_sleep()
        elif self.cfg.offload_rollout:
            torch.cuda.empty_cache()         # the activations' memory, to the engine
        self.leave_room()

    def leave_room(self) -> None:
        """Actor and critic on the same GPU: what one's passes needed, the other's need next."""
        import torch
        if self.cfg.critic and not self.cfg.critic_num_gpus and self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def needs_old_log_probs(self, step: int, optimizer_steps: int) -> bool:
        """With one optimizer step the old policy is the current one, so old := logp.detach() saves a whole pass, where nothing
        else reads the old log-probs. The actor's first step does not save it: that two passes over the same tokens agree
        (ppo_kl = 0) is a check of everything in between."""
        cfg = self.cfg
        reads = (cfg.kl_coef, cfg.use_opd, cfg.use_routing_replay, cfg.custom_advantage_function, cfg.custom_loss_function)
        return optimizer_steps > 1 or step == cfg.num_critic_only_steps or any(reads)

    def add_outputs(self, data: dict, steps: list, key: str) -> None:
        """data[key] = log-probs (a critic's: values) under the weights now in the model, per sample. Only the last pipeline
        stage has them."""
        batches, out = [], []
        for micro_batches in steps:          # as in optimizer_steps: with virtual stages those of one step get one length
            own = [self.model.pack(data, one) for one in micro_batches]
            batches, out = batches + own, out + self.model.forward_only(own, replays=key == "log_probs")
        if self.grid.is_last_stage:
            data[key] = [None] * len(data["tokens"])
            for batch, output in zip(batches, out):
                for sample, own in zip(batch.samples, output.split(batch.lengths)):
                    data[key][sample] = own.cpu()

    # -- weights and checkpoints
    def push(self, urls: list[str], owners: list[list[int]], check: bool) -> dict:
        return self.sync.push(self.version, urls, owners, check)

    def save(self, folder: str, extra: dict) -> None:
        self.model.save(pathlib.Path(folder), extra)

    def save_hf(self, folder: str) -> None:
        import convert
        import weights_sync
        if not weights_sync.takes_part(self.model):
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


class CriticActor(TrainActor):
    """One rank of PPO's critic: a model of its own, with a scalar head."""
    is_critic = True

    def values(self, data: dict, plan: list) -> dict:
        """V of every response token before this rollout's updates. -> {position in the data: [R_i]}"""
        data, steps, own = self.own_part(data, plan)
        self.add_outputs(data, steps, "values")
        self.leave_room()
        return self.told(own, data, "values")

    def train(self, step: int, data: dict, plan: list) -> dict:
        """The critic's optimizer steps. data: with the values from above, and the returns that the actors made of them."""
        import algos
        begin = time.perf_counter()
        data, steps, _ = self.own_part(data, plan)
        out = self.optimizer_steps(data, steps, algos.value_loss)
        self.after_training(step)
        return {"steps": out, "times": {"critic_train_time": time.perf_counter() - begin}}


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

    def __init__(self, cfg, places=None, actor_class=TrainActor):
        """places: a placement.Places; None for a CPU run."""
        self.cfg, self.actors = cfg, []
        self.dp_size = 0                     # known after start()
        self.asking = threading.Lock()
        # PPO: the critic's ranks. They sleep, wake and are saved with the actors', and train when they are told.
        critic = actor_class is TrainActor and bool(cfg.critic)
        self.critic = Trainers(critic_config(cfg), places, CriticActor) if critic else None
        # Whose weights go to which GPU of which engine, where they travel through memory: those of the trainer on that GPU. On
        # a CPU any trainer could serve any engine, so there they take turns.
        ranks, width = cfg.actor_num_gpus, cfg.rollout_num_gpus_per_engine
        self.owners = places.owners if places else [
            [(first + k) % ranks for k in range(width)] for first in range(0, cfg.rollout_num_gpus or 0, width)]
        self.syncs = 0                       # how often weights were pushed, for the cadence of checks
        self.unchecked = 0                   # parameters that no checksum could be expected of, as was printed
        for rank in range(cfg.actor_num_gpus):
            # NCCL_CUMEM_ENABLE as SGLang sets it, or the first broadcast to the engines hangs for ever. PASSIVE: on a CPU the
            # threads of a waiting trainer must not spin on the cores that the engine needs.
            options = dict(num_cpus=0, runtime_env={"env_vars": {"NCCL_CUMEM_ENABLE": "0", "OMP_WAIT_POLICY": "PASSIVE",
                                                               "CUBLAS_WORKSPACE_CONFIG": ":4096:8",   # same sums every time
                                                               "PYTHONWARNINGS": "ignore"}})   # Megatron's, about apex
            if places is not None:
                own_gpus = cfg.critic_num_gpus and actor_class is CriticActor
                group, bundle = (places.critics if own_gpus else places.trainers)[rank]
                shared = cfg.colocate or (cfg.critic and not cfg.critic_num_gpus)
                options |= dict(num_gpus=0.4 if shared else 1, scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle))
            self.actors.append(ray.remote(actor_class).options(**options).remote(cfg, rank))

    def start(self, hf_folder: str, others: dict[str, str], total_steps: int, disk_dir: str) -> dict:
        """See TrainActor.start."""
        if self.critic:
            self.critic.start(self.cfg.critic.get("hf_checkpoint", hf_folder), {}, total_steps, disk_dir)
        limit_s = self.cfg.start_timeout_s
        address = ray.get(self.actors[0].address.remote(), timeout=limit_s)
        facts = self.call("start", address, hf_folder, others, total_steps, disk_dir, timeout_s=limit_s)
        self.dp_size = facts["dp_size"]
        return facts

    def call(self, method: str, *args, timeout_s: float | None = None) -> dict:
        """The same method on every rank -> rank 0's answer."""
        return self.call_all(method, *args, timeout_s=timeout_s)[0]

    def call_all(self, method: str, *args, timeout_s: float | None = None) -> list:
        """The same method on every rank -> each rank's answer. The first rank that fails ends the wait for all."""
        limit_s = timeout_s or self.cfg.train_timeout_s
        with self.asking:                    # or two threads' calls (a restarted engine wants weights) cross on their way
            pending = [getattr(actor, method).remote(*args) for actor in self.actors]
        every, end = list(pending), time.monotonic() + limit_s
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                raise TimeoutError(f"trainers: {method}() was not done on {len(pending)} of {len(self.actors)} ranks in "
                                   f"{limit_s:.0f} s; set train_timeout_s (start: start_timeout_s) higher if the work is that "
                                   "long, else look in the Ray logs")
            ray.get(done)                    # raises what the rank raised
        return ray.get(every)

    def train(self, step: int, data: dict, plan: list, *args) -> dict:
        """All optimizer steps on one rollout. -> rank 0's metrics and times; with a critic the returns of all samples [R_i]"""
        import buffer
        answers = self.call_all("train", step, ray.put(buffer.to_flat(data)), ray.put(plan), *args)
        return answers[0] | {"returns": merged(answer.get("returns", {}) for answer in answers)}

    def values(self, data: dict, plan: list) -> list:
        """A critic's V of each response token, per sample: list of [R_i]"""
        import buffer
        return merged(self.call_all("values", ray.put(buffer.to_flat(data)), ray.put(plan)))

    def save(self, folder: pathlib.Path, extra: dict, hf_folder: pathlib.Path | None) -> None:
        """Checkpoint and Hugging Face folder; the critic's beside them, one folder deeper."""
        if self.critic:
            self.critic.save(folder.parent / "critic" / folder.name, extra,
                             hf_folder and hf_folder.parent / "critic" / hf_folder.name)
        self.call("save", str(folder), extra)
        if hf_folder:
            self.call("save_hf", str(hf_folder))

    def load(self, folder: pathlib.Path) -> dict:
        """The inverse of save. -> extra"""
        if self.critic:
            own = folder.parent / "critic" / folder.name
            if not own.exists():
                raise ValueError(f"{folder} was saved without a critic; start a new run from its Hugging Face folder: "
                                 f"--hf_checkpoint={folder.parent.parent / 'hf' / folder.name}")
            self.critic.load(own)
        return self.call("load", str(folder))

    def sleep(self) -> None:
        for side in filter(None, (self, self.critic)):
            side.call("sleep")

    def wake(self, *kinds: str) -> None:
        """kinds: of "weights", "state", "gradients"; none named is all."""
        for side in filter(None, (self, self.critic)):
            side.call("wake", *kinds)

    def push_weights(self, engines, version: int | None, only: list[int] | None = None) -> dict[str, float]:
        """pause -> flush -> buckets -> verify -> version -> continue. `only`: ranks of engines that were just restarted.

        version: what the trainers must hold; None: what they do hold, which the engines are told in any case.
        """
        interval = self.cfg.check_weight_update_interval
        check = self.syncs == 0 or only is not None or (interval > 0 and self.syncs % interval == 0)
        if check and self.cfg.sglang.get("enable_dp_attention"):
            check = False                    # its ranks hold other parts of attention than expected_checksums knows
            if self.syncs == 0:
                print("weight syncs are not compared tensor by tensor: enable_dp_attention", flush=True)
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
                left_out = weights_sync.compare_checksums(answer["expected"], have, ranks)
            if left_out > self.unchecked:
                print(f"{left_out} parameters could not be checked: an engine keeps shared experts among the others; "
                      "sglang=dict(disable_shared_experts_fusion=True) keeps them apart", flush=True)
            self.unchecked = max(left_out, self.unchecked)
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
        for actor in self.actors + (self.critic.actors if self.critic else []):
            ray.kill(actor)


def merged(parts) -> list:
    """{position in the data: tensor} of every rank -> the tensors in order."""
    whole = {position: tensor for part in parts for position, tensor in part.items()}
    return [whole[i] for i in sorted(whole)]
