"""
rollout.py: how are samples made? Prompts go to the engines, answers are scored, groups are filtered until the batch is full.

    DataSource --groups--> generate_sample --/generate--> router --> engines
                              |  tokens in, tokens and log-probs out; never text
                              v
                           Rewarder --> dynamic filter --> trained | filtered | put back | failed   (all counted, sum checked)

The life of a group (P groups of n samples make a step):
 1. get_samples makes n copies of a prompt, or takes a group that waited in the buffer, with the tokens it has so far.
 2. n requests run at once; an engine that dies under one is replaced, gets the current weights, and the request is repeated.
    (Here and in evaluation only: an engine that dies during a weight sync ends the run.)
 3. Rewards are scored as soon as a sample, or with group_rm the group, is finished.
 4. The dynamic filter keeps or drops the group; what is dropped is replaced by new prompts until P groups are kept.
 5. The rest is aborted and put back: with what it has under partial_rollout, else as if it had not been asked, finished or
    not: in the next step its tokens would be one weight update old.

Test:  pytest tests/test_rollout.py
Knows nothing about: trainers, losses. After a restart it asks `resync` (train.py's) to push the weights again.
"""
import asyncio
import concurrent.futures
import inspect
import json
import pathlib
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

import algos
from buffer import ENGINE_RESERVE, DataSource, Sample, Status
from configs.base import Config
from engines import EngineError
from rewards import RewardError, Rewarder


@dataclass
class DynamicFilterOutput:
    """What a dynamic_sampling_filter may return instead of a bool."""
    keep: bool
    reason: str | None = None                # counted as rollout/dynamic_filter/drop_<reason>


def check_reward_nonzero_std(args, samples: list[Sample], **kw) -> DynamicFilterOutput:
    """DAPO's filter (2503.14476, sec. 3.2): a group whose rewards are all equal has advantage 0 and teaches nothing."""
    rewards = [s.get_reward_value(args.reward_key) for s in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{rewards[0]:.1f}")


@dataclass
class RolloutResult:
    samples: list[Sample]                    # P * n of them (a hook may return more), sorted by group and index
    rewards: list[float]                     # one per sample, normalised within its group
    metrics: dict[str, float] = field(default_factory=dict)
    examples: list[Sample] = field(default_factory=list)         # sft_batch_size rows of sft_data


class Rollout:
    """Generation, rewards and evaluation for one run. Runs its event loop in a thread of the driver."""

    def __init__(self, cfg: Config, engines, data: DataSource, eval_data: dict[str, DataSource], run_dir: pathlib.Path,
                 on_progress: Callable = lambda done, total: None):
        """eval_data: of each held-out set, made with its own Config (base.eval_config)."""
        self.cfg, self.engines, self.data, self.eval_data, self.run_dir = cfg, engines, data, eval_data, run_dir
        self.tokenizer, self.context_len = data.tokenizer, data.context_len
        self.end_ids = {self.tokenizer.eos_token_id, *(cfg.rollout_stop_token_ids or ())}
        self.rewarder = Rewarder(cfg.reward_workers)
        self.on_progress = on_progress       # (finished, wanted) groups, from the event loop's thread
        self.resync: Callable[[list[int]], None] = lambda ranks: None
        self.weight_version = 0
        self.retries, self.restarted = 0, 0  # in this step: requests repeated, samples begun anew
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rollout", daemon=True).start()
        self.session: aiohttp.ClientSession | None = None
        self.run(self.open())

    # -- the driver's side: plain blocking calls
    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def start(self, step: int) -> concurrent.futures.Future:
        """Begin to generate a step's samples; the Future's result() has them."""
        return asyncio.run_coroutine_threadsafe(self.generate_async(step), self.loop)

    def generate(self, step: int) -> RolloutResult:
        return self.start(step).result()

    def evaluate(self, step: int) -> dict[str, float]:
        return self.run(self.evaluate_async(step))

    def close(self) -> None:
        self.run(self.session.close())
        self.rewarder.close()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def open(self) -> None:
        limit = self.cfg.sglang_server_concurrency * max(1, self.engines.num_engines)
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False,
                                             timeout=aiohttp.ClientTimeout(total=self.cfg.request_timeout_s))
        self.slots = asyncio.Semaphore(limit)    # requests in flight
        self.teacher_slots = asyncio.Semaphore(self.cfg.sglang_server_concurrency)
        self.recovering, self.recoveries = asyncio.Lock(), 0
        self.replacing: asyncio.Task | None = None
        # Set: requests may be sent. Cleared while a restarted engine still has the weights of hf_checkpoint.
        # NOTE: a hook that posts to the router itself does not wait for this.
        self.serving = asyncio.Event()
        self.serving.set()
        # What hooks get as `args`: every setting of the run, also in evaluation, and upstream's way to reach the engines.
        host, port = self.engines.router_url.removeprefix("http://").split(":")
        self.args = types.SimpleNamespace(**vars(self.cfg), sglang_router_ip=host, sglang_router_port=int(port),
                                          tokenizer=self.tokenizer, generate=self.generate_sample)

    # ---- One step ------------------------------------------------------------------------------------------------------
    async def generate_async(self, step: int) -> RolloutResult:
        """rollout_batch_size groups to train on. Raises where the filter leaves nothing, or nothing can be generated."""
        cfg, begin, self.retries, self.restarted = self.cfg, time.perf_counter(), 0, 0
        outcomes, drops = Counter(), Counter()
        kept: list[list[Sample]] = []
        pending: dict[asyncio.Task, list[Sample]] = {}
        monitor = asyncio.create_task(self.watch_engines())
        try:
            while len(kept) < cfg.rollout_batch_size:
                while len(kept) + len(pending) < cfg.rollout_batch_size:
                    self.ask(cfg.over_sampling_batch_size, pending, outcomes, drops)
                done, _ = await asyncio.wait([*pending, monitor], return_when=asyncio.FIRST_COMPLETED)
                if monitor in done:
                    monitor.result()         # it only ends by raising
                for task in sorted(done, key=lambda t: pending[t][0].group_index):
                    group, result = pending.pop(task), task.result()
                    if result is None:
                        outcomes["failed"] += 1
                    elif len(kept) == cfg.rollout_batch_size or any(s.status == Status.ABORTED for s in result):
                        outcomes["put_back"] += 1            # surplus, or aborted by a hook or an engine: asked again
                        self.put_back([group])
                    elif (reason := self.drop_reason(result)) is not None:
                        outcomes["filtered"] += 1
                        drops[reason] += 1
                    else:
                        kept.append(result)
                        self.on_progress(len(kept), cfg.rollout_batch_size)
            outcomes["put_back"] += await self.abort(pending)
        finally:
            for task in pending:             # after an error: nothing may go on behind our back
                task.cancel()
            await self.end_watch(monitor)
        outcomes["trained"] = len(kept)
        asked = outcomes.pop("asked")
        assert asked == sum(outcomes.values()), f"{asked} groups asked for, accounted for {dict(outcomes)}: a group was lost"
        kept.sort(key=lambda group: group[0].group_index)
        samples = [sample for group in kept for sample in group]
        metrics = self.step_metrics(samples, time.perf_counter() - begin)
        metrics |= {f"rollout/groups_{k}": outcomes[k] for k in ("trained", "filtered", "put_back", "failed")}
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in drops.items()}
        self.write_samples(step, samples, "train")
        penalties = [algos.length_penalty(cfg, s.response_length) for s in samples]
        if cfg.overlong_buffer_len:
            metrics["rollout/length_penalty"] = mean(penalties)
        rewards = algos.group_rewards(cfg, [s.get_reward_value(cfg.reward_key) + p for s, p in zip(samples, penalties)],
                                      [s.group_index for s in samples])
        examples = self.data.get_examples() if step >= cfg.num_critic_only_steps else []
        return RolloutResult(samples, rewards, metrics, examples)

    def ask(self, count: int, pending: dict, outcomes: Counter, drops: Counter) -> None:
        """Start `count` more groups."""
        if outcomes["asked"] >= self.cfg.max_batches_asked * self.cfg.rollout_batch_size:
            raise RuntimeError(f"{outcomes['asked']} groups were asked for and still there are not "
                               f"{self.cfg.rollout_batch_size} to train on: failed {outcomes['failed']}, aborted "
                               f"{outcomes['put_back']}, dropped {dict(drops)}; the task is too hard, too easy, or broken: "
                               "change the prompts or the dynamic_sampling_filter, or set max_batches_asked higher")
        for group in self.data.get_samples(count):
            outcomes["asked"] += 1
            pending[asyncio.create_task(self.generate_group(self.cfg, group))] = group

    def drop_reason(self, group: list[Sample]) -> str | None:
        if self.cfg.dynamic_sampling_filter is None:
            return None
        out = self.cfg.dynamic_sampling_filter(self.args, group)
        out = out if isinstance(out, DynamicFilterOutput) else DynamicFilterOutput(bool(out))
        return None if out.keep else out.reason or "filter"

    async def abort(self, pending: dict) -> int:
        """Stop what is still running and put it back into the buffer. -> groups put back"""
        groups = [pending[task] for task in pending]
        end = time.monotonic() + self.cfg.request_timeout_s
        while pending:
            # A request that was on its way when the engines were told comes too late for it, so tell them again.
            try:
                async with self.recovering:  # not while one is being replaced
                    await asyncio.to_thread(self.engines.abort_all)
            except EngineError:
                await self.recover()         # it died with its requests; they are repeated on another, and aborted there
            # A slow reward of a thrown-away group is not waited for.
            waiting = [task for task, group in pending.items() if any(s.status == Status.PENDING for s in group)]
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
        await asyncio.gather(*pending, return_exceptions=True)
        pending.clear()
        self.put_back(sorted(groups, key=lambda group: group[0].group_index))
        return len(groups)

    def put_back(self, groups: list[list[Sample]]) -> None:
        """With partial_rollout samples keep their tokens and go on later; else they start again. No prompt is lost."""
        for group in groups:
            for sample in group:
                if not self.cfg.partial_rollout or sample.status == Status.FAILED:
                    start_over(sample)
                elif sample.status == Status.ABORTED:
                    sample.status = Status.PENDING
                sample.reward = None
        self.data.add_samples(groups)

    # ---- One group -----------------------------------------------------------------------------------------------------
    async def generate_group(self, cfg: Config, group: list[Sample], evaluation: bool = False) -> list[Sample] | None:
        """Generate and score; None where a sample failed and the config says to go on without its group."""
        results = await asyncio.gather(*(self.generate_and_score(cfg, s, evaluation) for s in group), return_exceptions=True)
        for error in results:                # all siblings have ended: only now may one of them raise
            if isinstance(error, RewardError) and cfg.on_reward_error == "skip":
                return None
            if isinstance(error, BaseException):
                raise error
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

    async def generate_and_score(self, cfg: Config, sample: Sample, evaluation: bool) -> list[Sample]:
        """One sample, or its siblings where a custom generate returns several."""
        params = self.sampling_params(cfg, sample, evaluation)
        if cfg.mask_offpolicy_in_partial_rollout and sample.response_length:     # older weights' tokens: context, not trained
            versions = sample.weight_versions or [-1] * sample.response_length
            sample.loss_mask = [m if v == self.weight_version else 0 for m, v in zip(sample.loss_mask, versions)]
        trained = sample.trained_versions()
        if trained and self.weight_version + cfg.async_mode - min(trained) > cfg.max_staleness:
            start_over(sample)
            self.restarted += 1
        if sample.status in (Status.COMPLETED, Status.TRUNCATED):
            samples = [sample]               # finished before its group was aborted
        elif cfg.custom_generate_function is not None:
            hook = cfg.custom_generate_function
            extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(hook).parameters else {}
            try:
                async with asyncio.timeout(cfg.generate_timeout_s) as limit:
                    out = await hook(self.args, sample, params, **extra)
            except TimeoutError as error:
                if not limit.expired():      # the hook's own
                    raise
                raise TimeoutError(f"sample {sample.index}: {getattr(hook, '__qualname__', hook)} was not done in "
                                   f"{cfg.generate_timeout_s:.0f} s; does a tool hang? Else set generate_timeout_s "
                                   "higher") from error
            samples = out if isinstance(out, list) else [out]
            for one in samples:
                one.check()
        else:
            samples = [await self.generate_sample(sample, params)]
        scored = [one for one in samples if one.status != Status.ABORTED]
        if cfg.opd_teacher_url and not evaluation:
            await asyncio.gather(*(self.ask_teacher(one) for one in scored))
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

    async def generate_sample(self, sample: Sample, params: dict) -> Sample:
        """The default generation: token ids in, token ids and log-probs out, appended to the sample."""
        left = self.context_len - len(sample.tokens)
        room = min(params["max_new_tokens"] - sample.response_length, left)
        if room <= 0 or left < ENGINE_RESERVE:
            sample.status = Status.TRUNCATED
            return sample
        payload = {"input_ids": sample.tokens, "sampling_params": params | {"max_new_tokens": room}, "return_logprob": True}
        out = await self.request(payload, sample)
        meta = out["meta_info"]
        pairs = meta["output_token_logprobs"]                    # [(log-prob, token id, text), ...]
        sample.append([pair[1] for pair in pairs], [pair[0] for pair in pairs], version=int(meta.get("weight_version") or 0))
        if self.cfg.use_rollout_routing_replay:
            keep_routes(sample, meta)
        finish = meta["finish_reason"]
        sample.status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}[finish["type"]]
        ids = sample.tokens[len(sample.tokens) - sample.response_length:]
        end = finish.get("matched")
        if finish["type"] == "length" and ids and ids[-1] in self.end_ids and not params.get("ignore_eos"):
            sample.status, end = Status.COMPLETED, ids[-1]       # SGLang looks at the length before the token
        if ids and ids[-1] == end:           # the end token: it is trained, but no part of the answer
            ids = ids[:-1]
        sample.response = self.tokenizer.decode(ids, skip_special_tokens=self.cfg.rollout_skip_special_tokens)
        return sample

    async def request(self, payload: dict, sample: Sample) -> dict:
        """One /generate through the router; repeated after an engine died under it."""
        async with self.slots:
            for attempt in range(self.cfg.request_retries + 1):
                await self.serving.wait()
                try:
                    async with self.session.post(self.engines.router_url + "/generate", json=payload) as answer:
                        if answer.status == 200:
                            return await answer.json()
                        problem = f"status {answer.status}: {(await answer.text())[:500]}"
                        if answer.status in (400, 422):          # our own mistake: no repetition helps
                            raise ValueError(f"sample {sample.index}: the engine refused the request ({problem}); "
                                             "check prompt length, sampling settings and stop strings")
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    problem = f"{type(error).__name__}: {error}"
                self.retries += 1
                await self.recover()
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        raise EngineError(f"sample {sample.index}: no answer from {self.engines.router_url} in "
                          f"{self.cfg.request_retries + 1} tries, "
                          f"last {problem}; the engines' logs are in {self.run_dir}/logs, set request_retries or "
                          "request_timeout_s higher if they only were slow")

    async def ask_teacher(self, sample: Sample) -> None:
        """sample.teacher_log_probs, by an SGLang server that reads the sample and adds nothing."""
        n, first = sample.response_length, len(sample.tokens) - sample.response_length
        if len(sample.teacher_log_probs) == n:   # it waited in the buffer, finished
            return
        payload = {"input_ids": sample.tokens, "return_logprob": True, "logprob_start_len": first - 1,
                   "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        for attempt in range(self.cfg.request_retries + 1):
            try:
                url = f"{self.cfg.opd_teacher_url}/generate"
                async with self.teacher_slots, self.session.post(url, json=payload) as answer:
                    if answer.status == 200:
                        pairs = (await answer.json())["meta_info"]["input_token_logprobs"][-n:]  # [(log-prob, token id, text)]
                        break
                    problem = f"status {answer.status}: {(await answer.text())[:500]}"
                    if answer.status in (400, 422):
                        raise ValueError(f"sample {sample.index}: the teacher refused it ({problem}); too long for it?")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        else:
            raise EngineError(f"sample {sample.index}: the teacher at {self.cfg.opd_teacher_url} gave no log-probs in "
                              f"{self.cfg.request_retries + 1} tries, last {problem}; is it an SGLang server, and alive?")
        # NOTE: SGLang 0.5.17 reports the vocabulary's last id as 0 there, with the right log-prob.
        assert len(pairs) == n and all(pair[1] in (token, 0) for pair, token in zip(pairs, sample.tokens[first:])), (
            f"sample {sample.index}: the teacher's log-probs are of other tokens than those asked for; is its tokenizer ours?")
        sample.teacher_log_probs = [pair[0] for pair in pairs]

    # ---- Engines that die ------------------------------------------------------------------------------------------------
    async def watch_engines(self) -> None:
        """Runs beside generation: an engine that hangs keeps its connections open, so nobody else would notice."""
        while True:
            await asyncio.sleep(self.cfg.health_check_interval_s)
            await self.recover()

    async def end_watch(self, monitor: asyncio.Task) -> None:
        monitor.cancel()
        if self.replacing:                   # a new engine gets its weights before anything goes on
            await asyncio.shield(self.replacing)                 # and raises, where it could not be replaced

    async def recover(self) -> None:
        """Replace dead engines and give them the current weights. Callers that were waiting when a check began share it."""
        begun = self.recoveries
        async with self.recovering:
            if self.recoveries > begun:
                return
            self.recoveries += 1
            await asyncio.to_thread(self.engines.check_router)
            for rank in await asyncio.to_thread(self.engines.check):
                self.replacing = asyncio.create_task(self.replace(rank))
                await asyncio.shield(self.replacing)             # goes on, and is waited for, where its caller is cancelled

    async def replace(self, rank: int) -> None:
        print(f"engine {rank} is down; restart {self.engines.restarts + 1} of {self.cfg.max_engine_restarts}", flush=True)
        self.serving.clear()                 # NOTE: the router sends to a new engine before it has the current weights
        try:
            await asyncio.to_thread(self.engines.restart, rank)
            await asyncio.to_thread(self.resync, [rank])
        finally:
            self.serving.set()
        print(f"engine {rank} is back, with the trainers' weights", flush=True)

    # ---- Evaluation ------------------------------------------------------------------------------------------------------
    async def evaluate_async(self, step: int) -> dict[str, float]:
        """Every held-out set, with its own settings: mean reward, truncation, length and, if asked, pass@k."""
        metrics = {}
        for name, data in self.eval_data.items():
            cfg, begin, groups = data.cfg, time.perf_counter(), []
            for i, prompt in enumerate(data.prompts):
                group = []
                for j in range(cfg.n_samples_per_eval_prompt):
                    index = i * cfg.n_samples_per_eval_prompt + j
                    own = {"metadata": dict(prompt.metadata), "group_index": i, "index": index}
                    group.append(Sample(**vars(prompt) | own))
                groups.append(group)
            monitor = asyncio.create_task(self.watch_engines())
            tasks = [asyncio.create_task(self.generate_group(cfg, group, evaluation=True)) for group in groups]
            try:
                work = asyncio.gather(*tasks)
                await asyncio.wait([work, monitor], return_when=asyncio.FIRST_COMPLETED)
                results = work.result() if work.done() else monitor.result()     # the monitor only ends by raising
            finally:
                for task in tasks:
                    task.cancel()
                await self.end_watch(monitor)
            results = [group for group in results if group is not None]
            if any(s.status == Status.ABORTED for group in results for s in group):
                raise RuntimeError(f"evaluation {name}: custom_generate_function aborted a sample, which has no second try "
                                   "there; return it as COMPLETED or TRUNCATED where evaluation=True")
            rewards = [[s.get_reward_value(cfg.eval_reward_key) for s in group] for group in results]
            flat, samples = [r for group in rewards for r in group], [s for group in results for s in group]
            if not flat:
                raise RuntimeError(f"evaluation {name}: every reward failed; the first messages are in the log above")
            metrics[f"eval/{name}"] = sum(flat) / len(flat)
            metrics[f"eval/{name}-truncated_ratio"] = mean(s.status == Status.TRUNCATED for s in samples)
            metrics[f"eval/{name}-response_len"] = mean(s.response_length for s in samples)
            metrics[f"eval/{name}-failed"] = len(groups) - len(results)
            if cfg.log_passrate:
                metrics |= {f"eval/{name}-pass@{k}": v for k, v in pass_at_k(rewards).items()}
            metrics[f"perf/eval_{name}_time"] = time.perf_counter() - begin
            self.write_samples(step, samples, name)
        return metrics

    # ---- Numbers and records -----------------------------------------------------------------------------------------------
    def step_metrics(self, samples: list[Sample], seconds: float) -> dict[str, float]:
        lengths = [s.response_length for s in samples]
        rewards = [s.get_reward_value(self.cfg.reward_key) for s in samples]
        groups = defaultdict(list)
        for sample, reward in zip(samples, rewards):
            groups[sample.group_index].append(reward)
        metrics = {
            "rollout/raw_reward": mean(rewards), "rollout/response_len/mean": mean(lengths),
            "rollout/response_len/min": min(lengths), "rollout/response_len/max": max(lengths),
            "rollout/response_len/median": sorted(lengths)[len(lengths) // 2],
            "rollout/truncated_ratio": mean(s.status == Status.TRUNCATED for s in samples),
            "rollout/stale_tokens": mean(v < self.weight_version for s in samples for v in s.trained_versions()),
            "rollout/restarted_stale": self.restarted,
            "rollout/request_retries": self.retries, "rollout/engine_restarts": self.engines.restarts,
            "rollout/waiting_groups": len(self.data.buffer),
            "perf/generate_time": seconds, "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds / self.cfg.rollout_num_gpus}
        constant = Counter(round(g[0], 2) for g in groups.values() if max(g) == min(g))
        return metrics | {f"rollout/zero_std/count_{reward}": n for reward, n in constant.items()}

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

    def close(self) -> None:
        pass


def keep_routes(sample: Sample, meta: dict) -> None:
    """Which experts the engine took, after the tokens of its answer were appended. It knows all tokens but the last."""
    if meta.get("routed_experts"):           # none where the request was aborted before its first token
        sample.rollout_routed_experts = [len(sample.tokens) - 1, meta["routed_experts"]]


def start_over(sample: Sample) -> None:
    """Back to the bare prompt. Metadata stays: the data has written to it too."""
    sample.tokens = sample.tokens[:len(sample.tokens) - sample.response_length]
    sample.response, sample.response_length, sample.status, sample.reward = "", 0, Status.PENDING, None
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions, sample.teacher_log_probs = [], [], [], []
    sample.remove_sample, sample.rollout_id, sample.rollout_routed_experts = False, None, []


def mean(values) -> float:
    values = [float(v) for v in values]
    return sum(values) / len(values) if values else 0.0


def pass_at_k(rewards: list[list[float]]) -> dict[int, float]:
    """Probability that at least one of k samples is right (reward > 0.5), k = 1, 2, 4, ...: 1 - C(n - c, k) / C(n, k),
    averaged over prompts (Codex 2107.03374, eq. 1: unbiased, unlike 1 - (1 - p)^k)."""
    from math import comb
    n = min(len(group) for group in rewards)
    out, k = {}, 1
    while k <= n:
        out[k] = mean(1 - comb(len(g) - sum(r > 0.5 for r in g), k) / comb(len(g), k) for g in rewards)
        k *= 2
    return out
