"""
rollout.py: how are samples made? Prompts go to the engines, answers are scored, groups are filtered until the batch is full.

    DataSource --groups--> client.generate, or a hook's conversation --> engines
                              |  tokens in, tokens and log-probs out; never text
                              v
                           Rewarder --> dynamic filter --> trained | filtered | put back | failed   (all counted, sum checked)

The life of a group (P groups of n samples make a step):
 1. get_samples makes n copies of a prompt, or takes a group that waited in the buffer, with the tokens it has so far.
 2. n requests run at once; an engine that dies under one is replaced, gets the current weights, and the request is repeated.
 3. Rewards are scored as soon as a sample, or with group_rm the group, is finished.
 4. The dynamic filter keeps or drops the group; what is dropped is replaced by new prompts until P groups are kept.
 5. The rest is aborted and put back into the buffer, to be asked again. With partial_rollout it keeps its tokens; without,
    it begins anew, finished or not: in the next step its tokens would be one weight update old.

Test:  pytest tests/test_rollout.py
Knows nothing about: trainers, losses, HTTP (client.py).
"""
import asyncio
import concurrent.futures
import copy
import inspect
import json
import pathlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import agent
import algos
import hookdata
import hooks
from buffer import DataSource, to_train_data
from client import Client, owner
from configs.base import Config
from engines import EngineError
from hooks import Args, DynamicFilterOutput
from rewards import RewardError, Rewarder
from rollout_metrics import mean, of_evaluation, of_step
from sample import Sample, Status


@dataclass
class RolloutResult:
    samples: list[Sample]                    # P * n of them (more with hooks, fewer where the data ends), sorted by group
    rewards: list[float]                     # one per sample, normalised within its group
    metrics: dict[str, float] = field(default_factory=dict)
    examples: list[Sample] = field(default_factory=list)         # sft_batch_size rows of sft_data
    data: dict[str, list] | None = None      # of custom_convert_samples_to_train_data, in the place of buffer.to_train_data


class Rollout:
    """Generation, rewards and evaluation for one run, in the client's event loop."""

    def __init__(self, cfg: Config, engines, data: DataSource, eval_data: dict[str, DataSource], run_dir: pathlib.Path,
                 on_progress: Callable = lambda done, total: None):
        """eval_data: of each held-out set, made with its own Config (base.eval_config)."""
        self.cfg, self.engines, self.data, self.eval_data, self.run_dir = cfg, engines, data, eval_data, run_dir
        self.rewarder = Rewarder(cfg.reward_workers)
        self.on_progress = on_progress       # (finished, wanted) groups, from the event loop's thread
        self.restarted = 0                   # samples begun anew in this step, for staleness
        self.continues = cfg.partial_rollout     # what is put back goes on later, from the tokens that it has
        self.generating: set[int] = set()    # samples that a hook has now, by id(): training and evaluation number their own
        self.client = client = Client(cfg, engines, data.tokenizer, data.context_len, run_dir)
        # What hooks get as `args`: every setting, in evaluation the held-out set's, and what upstream has besides.
        host, port = engines.router_url.removeprefix("http://").split(":")
        folder, room = str(run_dir / "checkpoints"), client.context_len
        self.more = dict(sglang_router_ip=host, sglang_router_port=int(port), hf_checkpoint=engines.model_path, save=folder,
                         load=folder, rollout_max_context_len=room, eval_max_context_len=room, rollout_global_dataset=True,
                         rollout=self, tokenizer=client.tokenizer, context_len=room, end_ids=client.end_ids,
                         generate=client.generate, workers=self.rewarder.workers)
        views = {id(one): (one, Args(**vars(one) | self.more)) for one in [cfg, *(data.cfg for data in eval_data.values())]}
        self.args = views[id(cfg)][1]
        self.rewarder.view = lambda one: views[id(one)][1]       # a held-out set has settings of its own

    # -- the driver's side: plain blocking calls
    def start(self, step: int) -> concurrent.futures.Future:
        """Begin to generate a step's samples; the Future's result() has them."""
        return self.client.start(self.generate_async(step))

    def generate(self, step: int) -> RolloutResult:
        return self.start(step).result()

    def evaluate(self, step: int) -> dict[str, float]:
        return self.client.run(self.evaluate_async(step))

    def sync(self, push: Callable[[], dict], version: int) -> dict:
        """push() the trainers' weights to the engines, see Client.sync."""
        return self.client.sync(push, version)

    def state_dict(self) -> dict:
        """Of the data: position, and every group that is not trained yet."""
        return self.data.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.data.load_state_dict(state.get("data", state))
        groups = [*state.get("ready", ()), *state.get("under_way", ())]          # of a run that was fully_async until now
        if groups:
            self.put_back([[Sample.from_dict(d) for d in group] for group in groups])

    def close(self) -> None:
        if self.client.loop.is_running():    # else it has been closed
            self.client.close()
            self.rewarder.close()

    # ---- One step ------------------------------------------------------------------------------------------------------
    async def generate_async(self, step: int) -> RolloutResult:
        """rollout_batch_size groups to train on. Raises where the filter leaves nothing, or nothing can be generated."""
        hooks.running.set(self)
        self.restarted = 0
        if self.cfg.rollout_function is not None:
            begin, version = time.perf_counter(), self.client.weight_version
            out = await self.call_whole("rollout_function", step)
            groups, metrics, failed = hookdata.train_output(out, self.cfg, version)
            return self.finish(step, groups, Counter(failed=failed), Counter(), time.perf_counter() - begin, metrics)
        async with self.client.watching() as monitor:
            return await self.fill_batch(step, monitor)

    async def call_whole(self, key: str, step: int, **evaluation):
        """rollout_function or eval_function, with the engines watched meanwhile."""
        limit_s = self.cfg.generate_timeout_s
        async with self.client.watching() as monitor:
            work = asyncio.create_task(hooks.call(getattr(self.cfg, key), self.args, step, self.data, **evaluation))
            try:
                await asyncio.wait([work, monitor], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and not monitor.done():
                    raise TimeoutError(f"step {step}: {key} was not done in {limit_s:.0f} s; what does it wait for? Else set "
                                       "generate_timeout_s higher")
                return work.result() if work.done() else monitor.result()
            finally:
                work.cancel()

    async def fill_batch(self, step: int, monitor: asyncio.Task) -> RolloutResult:
        cfg, begin = self.cfg, time.perf_counter()
        outcomes, drops = Counter(), Counter()
        kept: list[list[Sample]] = []
        pending: dict[asyncio.Task, list[Sample]] = {}
        try:
            while len(kept) < cfg.rollout_batch_size:
                while len(kept) + len(pending) < cfg.rollout_batch_size:
                    if not self.ask(cfg.over_sampling_batch_size, pending, outcomes, drops):
                        break                # the data has ended
                if not pending:
                    break
                done, _ = await asyncio.wait([*pending, monitor], return_when=asyncio.FIRST_COMPLETED)
                if monitor in done:
                    monitor.result()         # it only ends by raising
                for task in sorted(done, key=lambda t: pending[t][0].group_index):
                    group, result = pending.pop(task), task.result()
                    surplus = len(kept) == cfg.rollout_batch_size
                    outcome = "put_back" if surplus and result is not None else self.outcome(
                        result, drops, len(kept) + len(pending) >= cfg.rollout_batch_size)
                    if outcome == "put_back":
                        self.put_back([group])
                    elif outcome == "kept":
                        kept.append(result)
                        self.on_progress(len(kept), cfg.rollout_batch_size)
                        continue             # counted as trained when the batch is full
                    outcomes[outcome] += 1
            self.client.enough = True        # who waits for a tool now is in no engine, and would miss the abort
            outcomes["put_back"] += await self.abort(pending)
        finally:
            self.client.enough = False
            for task in pending:             # after an error: nothing may go on behind our back
                task.cancel()
        asked = outcomes.pop("asked")
        accounted = outcomes.total() + len(kept)
        assert asked == accounted, f"{asked} groups asked for, {len(kept)} kept, {dict(outcomes)}: a group was lost"
        return self.finish(step, kept, outcomes, drops, time.perf_counter() - begin)

    def outcome(self, result: list[Sample] | None, drops: Counter, spare: bool = False) -> str:
        """What becomes of a group whose generation has ended; the reason of a filter is counted in drops. spare: there are
        more groups than the batch needs, so this one can be left out without asking for another."""
        if result is None:
            return "failed"
        if any(s.status == Status.ABORTED for s in result):
            return "put_back"                # by a hook or an engine: it is asked again
        if self.cfg.dynamic_sampling_filter is not None:
            out = self.cfg.dynamic_sampling_filter(self.args, result)
            out = out if isinstance(out, DynamicFilterOutput) else DynamicFilterOutput(bool(out))
            if not out.keep and (spare or not out.keep_when_insufficient):
                drops[out.reason or "filter"] += 1
                return "filtered"
        return "kept"

    def finish(self, step: int, kept: list[list[Sample]], outcomes: Counter, drops: Counter, seconds: float,
               metrics: dict | None = None) -> RolloutResult:
        """The groups of one step -> what is trained, compared within groups and counted."""
        cfg = self.cfg
        if not kept:
            raise RuntimeError(f"step {step} has no group to train on: {dict(outcomes)}, dropped {dict(drops)}; has the data "
                               "source ended? Set num_rollout lower, or let get_samples begin anew")
        kept.sort(key=lambda group: group[0].group_index)
        numbers = [group[0].group_index for group in kept]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"step {step} has two groups with the same group_index, of {numbers}: their rewards would be "
                             "compared with each other; give each a number of its own, or leave group_index to us (None)")
        if cfg.rollout_sample_filter is not None:
            cfg.rollout_sample_filter(self.args, kept)           # sets remove_sample
        samples = [sample for group in kept for sample in group]
        metrics = self.client.metrics() | of_step(cfg, samples, seconds, self.client.weight_version) | (metrics or {})
        metrics |= {"rollout/restarted_stale": self.restarted, "rollout/reward_restarts": self.rewarder.workers.restarts,
                    "rollout/waiting_groups": len(self.data.buffer), "rollout/buffer_dropped": self.data.buffer_dropped}
        metrics |= {f"rollout/groups_{k}": outcomes[k] for k in ("filtered", "put_back", "failed")}
        metrics |= {"rollout/groups_trained": len(kept)}
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in drops.items()}
        self.write_samples(step, samples, "train")
        penalties = [algos.length_penalty(cfg, s.response_length) for s in samples]
        if cfg.overlong_buffer_len:
            metrics["rollout/length_penalty"] = mean(penalties)
        if cfg.custom_reward_post_process is not None:
            _, rewards = cfg.custom_reward_post_process(self.args, samples)
            rewards = hookdata.checked_rewards(rewards, samples)
        else:
            rewards = algos.group_rewards(cfg, [s.get_reward_value(cfg.reward_key) + p for s, p in zip(samples, penalties)],
                                          [s.group_index for s in samples], [s.rollout for s in samples])
        examples = self.data.get_examples() if step >= cfg.num_critic_only_steps else []
        data = None
        if cfg.custom_convert_samples_to_train_data is not None:
            own = to_train_data(cfg, samples, rewards)
            data = hookdata.train_data(cfg.custom_convert_samples_to_train_data(self.args, samples), own)
        return RolloutResult(samples, rewards, metrics, examples, data)

    def ask(self, count: int, pending: dict, outcomes: Counter, drops: Counter) -> int:
        """Start `count` more groups -> how many there were; a data source may end."""
        if outcomes["asked"] >= self.cfg.max_batches_asked * self.cfg.rollout_batch_size:
            raise RuntimeError(f"{outcomes['asked']} groups were asked for and still there are not "
                               f"{self.cfg.rollout_batch_size} to train on: failed {outcomes['failed']}, aborted "
                               f"{outcomes['put_back']}, dropped {dict(drops)}; the task is too hard, too easy, or broken: "
                               "change the prompts or the dynamic_sampling_filter, or set max_batches_asked higher")
        groups = self.data.get_samples(count)
        for group in groups:
            pending[asyncio.create_task(self.generate_group(self.cfg, group))] = group
        outcomes["asked"] += len(groups)
        return len(groups)

    async def abort(self, pending: dict) -> int:
        """Stop what is still running and put it back into the buffer. -> groups put back"""
        groups = [pending[task] for task in pending]
        end = time.monotonic() + self.cfg.request_timeout_s
        while pending:
            # A request that was on its way when the engines were told comes too late for it, so tell them again.
            try:
                async with self.client.mending:                  # not while one is being replaced
                    await asyncio.to_thread(self.engines.abort_all)
            except EngineError:
                await self.client.recover()  # it died with its requests; they are repeated on another, and aborted there
            # Only engines are waited for, which have tokens for us; not a tool or a reward of what is not wanted now.
            waiting = [task for task, group in pending.items() if any(self.client.busy[s.index] for s in group)]
            if not waiting:
                break
            done, _ = await asyncio.wait(waiting, timeout=1.0)
            for task in done:
                pending.pop(task)
                if task.exception():
                    print(f"a surplus group ended with an error, and will be asked again: {task.exception()!r}", flush=True)
            if time.monotonic() > end:
                raise TimeoutError(f"{len(pending)} groups did not end {self.cfg.request_timeout_s:.0f} s after the abort; "
                                   "see the engines' logs in the run folder")
        for task in pending:
            task.cancel()
        _, deaf = await asyncio.wait(pending, timeout=60.0) if pending else ((), ())
        if deaf:
            raise TimeoutError(f"{len(deaf)} groups did not end 60 s after they were cancelled; let CancelledError pass in "
                               "your hooks and tools")
        pending.clear()
        self.put_back(sorted(groups, key=lambda group: group[0].group_index))
        return len(groups)

    def put_back(self, groups: list[list[Sample]]) -> None:
        """Samples keep their tokens and go on later, or start again. No prompt is lost."""
        for group in groups:
            for sample in group:
                if not self.continues or sample.status == Status.FAILED:
                    start_over(sample)
                elif sample.status == Status.ABORTED:
                    sample.status = Status.PENDING
                sample.reward = None
        self.data.add_samples(groups)

    # ---- One group -----------------------------------------------------------------------------------------------------
    async def generate_group(self, cfg: Config, group: list[Sample], evaluation: bool = False,
                             own_params: dict | None = None) -> list[Sample] | None:
        """Generate and score; None where a sample failed and the config says to go on without its group. own_params: sampling
        parameters that are not as the settings say."""
        results = await asyncio.gather(*(self.generate_and_score(cfg, s, evaluation, own_params) for s in group),
                                       return_exceptions=True)
        errors = [one for one in results if isinstance(one, BaseException)]      # all siblings have ended: now one may raise
        for error in sorted(errors, key=lambda error: isinstance(error, RewardError)):
            if isinstance(error, asyncio.CancelledError):        # we ourselves cancel the group, never one sample
                raise RuntimeError(f"group {group[0].group_index}: a hook, tool or reward ended with CancelledError; catch it "
                                   "where something of yours is cancelled") from error
            if not isinstance(error, RewardError) or cfg.on_reward_error == "raise":
                raise error
            return None
        samples = [s for result in results for s in result]
        if any(s.status == Status.ABORTED for s in samples):
            return samples
        if cfg.group_rm and not evaluation:
            try:
                for sample, reward in zip(samples, await self.rewarder.score(cfg, samples)):
                    sample.reward = reward
            except RewardError:
                if cfg.on_reward_error == "raise":
                    raise
                return None
        return samples

    async def generate_and_score(self, cfg: Config, sample: Sample, evaluation: bool,
                                 own_params: dict | None = None) -> list[Sample]:
        """One sample, or its siblings where a custom generate returns several."""
        owner.set(sample.index)
        params = self.sampling_params(cfg, sample, evaluation) | (own_params or {})
        # Older weights' tokens: context, not trained. (FullyAsyncRollout.take says which of its own are too old.)
        if cfg.mask_offpolicy_in_partial_rollout and sample.response_length and not cfg.fully_async:
            versions = sample.weight_versions or [-1] * sample.response_length
            sample.loss_mask = [m if v == self.client.weight_version else 0 for m, v in zip(sample.loss_mask, versions)]
        trained = sample.trained_versions()
        if trained and self.client.weight_version + cfg.async_mode - min(trained) > cfg.max_staleness:
            start_over(sample)
            self.restarted += 1
        if sample.status in (Status.COMPLETED, Status.TRUNCATED):
            samples = [sample]               # finished before its group was aborted
        else:
            samples = await self.generate_one(cfg, sample, params, evaluation)
        scored = [one for one in samples if one.status != Status.ABORTED]
        if cfg.opd_teacher_url and not evaluation:
            await asyncio.gather(*(self.client.ask_teacher(one) for one in scored))
        if cfg.use_opd and not evaluation and not (cfg.rm_type or cfg.custom_rm or sample.metadata.get("rm_type")):
            for one in scored:               # distillation alone: the teacher is the only judge, or the hook has judged
                one.reward = 0.0 if one.reward is None else one.reward
        if evaluation or not cfg.group_rm:
            for one in scored:
                if one.reward is None:
                    try:
                        one.reward = await self.rewarder.score(cfg, one, cfg.eval_reward_key if evaluation else cfg.reward_key)
                    except RewardError:
                        one.status = Status.FAILED
                        raise
        return samples

    async def generate_one(self, cfg: Config, sample: Sample, params: dict, evaluation: bool) -> list[Sample]:
        """By the engines alone, by turns with tools, or by a hook, which may return several siblings."""
        hook = cfg.custom_generate_function or (agent.converse if cfg.tools else None)
        if hook is None:
            return [await self.client.generate(sample, params)]
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(hook).parameters else {}
        version = self.client.weight_version
        self.generating.add(id(sample))
        try:
            async with asyncio.timeout(cfg.generate_timeout_s) as limit:
                out = await hook(self.rewarder.view(cfg), sample, params, **extra)
        except asyncio.CancelledError:       # not wanted any more: between two turns it looks finished, and is not
            sample.status = Status.ABORTED
            raise
        except TimeoutError as error:
            if not limit.expired():          # the hook's own
                raise
            raise TimeoutError(f"sample {sample.index}: {getattr(hook, '__qualname__', hook)} was not done in "
                               f"{cfg.generate_timeout_s:.0f} s; does a tool hang? Else set generate_timeout_s "
                               "higher") from error
        finally:
            self.generating.discard(id(sample))
        key = cfg.eval_reward_key if evaluation else cfg.reward_key
        made = hookdata.siblings(out, sample, version, key, cfg.partial_rollout)
        if len(made) > 1:                    # where the group is put back, `sample` alone must not stand for all of them
            made = [copy.copy(one) if one is sample else one for one in made]
            start_over(sample)
        return made

    # FORK POINT: sampling. One request's sampling_params, as SGLang's /generate takes them.
    def sampling_params(self, cfg: Config, sample: Sample, evaluation: bool) -> dict:
        def choose(for_evaluation, for_training):
            return for_evaluation if evaluation and for_evaluation is not None else for_training
        params = {"temperature": choose(cfg.eval_temperature, cfg.rollout_temperature),
                  "top_p": choose(cfg.eval_top_p, cfg.rollout_top_p), "top_k": cfg.rollout_top_k,
                  "max_new_tokens": choose(cfg.eval_max_response_len, cfg.rollout_max_response_len),
                  "skip_special_tokens": cfg.rollout_skip_special_tokens, "spaces_between_special_tokens": False,
                  "no_stop_trim": True}
        if cfg.rollout_stop:
            params["stop"] = cfg.rollout_stop
        if cfg.rollout_stop_token_ids:
            params["stop_token_ids"] = cfg.rollout_stop_token_ids
        if cfg.deterministic:                # its own random numbers, whatever else is in the batch
            params["sampling_seed"] = cfg.rollout_seed + sample.index
        return params

    # ---- Evaluation ------------------------------------------------------------------------------------------------------
    async def evaluate_async(self, step: int) -> dict[str, float]:
        """Every held-out set, with its own settings: mean reward, truncation, length and, if asked, pass@k."""
        metrics = {}
        hooks.running.set(self)
        if self.cfg.eval_function is not None:
            metrics, sets = hookdata.eval_output(await self.call_whole("eval_function", step, evaluation=True))
            for name, samples in sets.items():
                self.write_samples(step, samples, name)
            return metrics
        for name, data in self.eval_data.items():
            cfg, begin, groups = data.cfg, time.perf_counter(), []
            for i, prompt in enumerate(data.prompts):
                group = []
                for j in range(cfg.n_samples_per_eval_prompt):
                    index = i * cfg.n_samples_per_eval_prompt + j
                    group.append(prompt.copy(group_index=i, index=index))
                groups.append(group)
            async with self.client.watching() as monitor:
                tasks = [asyncio.create_task(self.generate_group(cfg, group, evaluation=True)) for group in groups]
                try:
                    work = asyncio.gather(*tasks)
                    await asyncio.wait([work, monitor], return_when=asyncio.FIRST_COMPLETED)
                    results = work.result() if work.done() else monitor.result()
                finally:
                    for task in tasks:       # after one has raised, gather's own cancel() would leave the others
                        task.cancel()
            results = [group for group in results if group is not None]
            if any(s.status == Status.ABORTED for group in results for s in group):
                raise RuntimeError(f"evaluation {name}: custom_generate_function aborted a sample, which has no second try "
                                   "there; return it as COMPLETED or TRUNCATED where evaluation=True")
            if not results:
                raise RuntimeError(f"evaluation {name}: every reward failed; the first messages are in the log above")
            metrics |= of_evaluation(cfg, name, results) | {f"eval/{name}-failed": len(groups) - len(results)}
            metrics[f"perf/eval_{name}_time"] = time.perf_counter() - begin
            self.write_samples(step, [s for group in results for s in group], name)
        return metrics

    # ---- Records -----------------------------------------------------------------------------------------------------
    def write_samples(self, step: int, samples: list[Sample], kind: str) -> None:
        """samples.jsonl: what a person wants to look at, one line a sample."""
        with open(self.run_dir / "samples.jsonl", "a", encoding="utf-8") as f:
            for s in samples:
                row = {"step": step, "set": kind, "group_index": s.group_index, "index": s.index, "prompt": s.prompt,
                       "response": s.response, "label": s.label, "reward": s.reward, "status": s.status.value,
                       "response_length": s.response_length, "weight_versions": sorted(set(s.weight_versions))}
                f.write(json.dumps(row, default=str) + "\n")


class FileRollout:
    """loss_type="sft": the rows' own answers are the samples; nothing is generated, no engine is needed."""

    def __init__(self, cfg: Config, data: DataSource):
        self.cfg, self.data = cfg, data

    def generate(self, step: int) -> RolloutResult:
        samples = [s for group in self.data.get_samples(self.cfg.rollout_batch_size) for s in group]
        return RolloutResult(samples, [0.0] * len(samples), {
            "rollout/response_len/mean": mean(s.response_length for s in samples), "rollout/epoch": self.data.epoch})

    def state_dict(self) -> dict:
        return self.data.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.data.load_state_dict(state)

    def close(self) -> None:
        pass


def start_over(sample: Sample) -> None:
    """Back to the bare prompt. Metadata stays: the data has written to it too."""
    sample.tokens = sample.tokens[:len(sample.tokens) - sample.response_length]
    sample.response, sample.response_length, sample.status, sample.reward = "", 0, Status.PENDING, None
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions, sample.teacher_log_probs = [], [], [], []
    sample.remove_sample, sample.rollout_id, sample.rollout_routed_experts, sample.turns = False, None, [], []
