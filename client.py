"""
client.py: how are the engines asked, and kept alive while they answer?

    Sample --generate()--> {input_ids} --router--> engine --> token ids, log-probs, weight version --> appended to the Sample
    watch() --health--> an engine is silent --mend()--> restarted --resync()--> the trainers' weights --> router

An answer in flight while the weights change (fully_async):

    generate()  |--request, old weights--|  "abort"  .........  |--the rest of it, new weights--|
    sync()                    hold: abort, wait till none is in flight | push | release
    versions     4 4 4 4 4 4 4 4 4 4 4 4                         5 5 5 5 5 5 5 5 5 5 5 5

Test:  pytest tests/test_rollout.py tests/test_fully_async.py
Knows nothing about: groups, rewards, trainers. `resync` and the `push` given to sync() are train.py's.
"""
import asyncio
import bisect
import concurrent.futures
import contextlib
import contextvars
import json
import pathlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from buffer import ENGINE_RESERVE
from configs.base import Config
from engines import EngineError
from sample import FINISHED, Sample, Status

COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "spec_num_correct_drafts", "spec_num_proposed_drafts",
           "spec_verify_ct")                 # of SGLang's meta_info
# Index of the sample for which something runs; Rollout sets it, and what hooks start inherits it.
owner: contextvars.ContextVar[int | None] = contextvars.ContextVar("owner", default=None)


class Client:
    """One run's conversation with its engines. Has an event loop in a thread of the driver; `run` is how others enter it."""

    def __init__(self, cfg: Config, engines, tokenizer, context_len: int, run_dir: pathlib.Path):
        self.cfg, self.engines, self.tokenizer, self.context_len, self.run_dir = cfg, engines, tokenizer, context_len, run_dir
        self.end_ids = end_ids(engines.model_path, tokenizer) | {*(cfg.rollout_stop_token_ids or ())}
        self.resync: Callable[[list[int]], None] = lambda ranks: None    # gives restarted engines the trainers' weights
        self.weight_version = 0              # of the engines
        self.counts = Counter()              # of this step: retries, and what the engines say of each answer
        self.routers = engines.router_restarts   # until the last step
        self.in_flight = 0                   # requests that an engine has now
        self.busy = Counter()                # sample's index -> its requests that are not answered yet
        self.holds = 0                       # how often sync() has stopped the engines
        self.enough = False                  # the step has its groups: no conversation gets another turn
        self.replacing: asyncio.Task | None = None
        self.endpoint = None                 # endpoint.py's server, from the first session on
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollout", daemon=True)
        self.thread.start()
        self.start(self.open()).result()

    def run(self, coroutine) -> Any:
        """From any thread but the loop's own. What it waits for has limits of its own."""
        assert self.loop.is_running(), "the client is closed"
        return self.start(coroutine).result()

    def start(self, coroutine) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def open(self) -> None:
        limit = self.cfg.sglang_server_concurrency
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False,
                                             timeout=aiohttp.ClientTimeout(total=self.cfg.request_timeout_s))
        self.slots = asyncio.Semaphore(limit * max(1, self.engines.num_engines))     # requests in flight
        self.teacher_slots = asyncio.Semaphore(limit)
        self.mending, self.mends = asyncio.Lock(), 0
        self.serving = asyncio.Event()       # set: requests may be sent
        self.serving.set()

    def close(self) -> None:
        if self.endpoint:
            self.run(self.endpoint.close())
        self.run(self.session.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    # ---- Generating ----------------------------------------------------------------------------------------------------
    async def generate(self, sample: Sample, params: dict) -> Sample:
        """Token ids in, token ids and log-probs out, appended to the sample, whose status says why it ended.

        params: sampling_params of SGLang's /generate; max_new_tokens is for the whole response, tool output included.
        ABORTED is returned where the answer is not wanted any more; a sync of the weights only interrupts it.
        """
        begin = len(sample.tokens)           # where this answer begins; one that was put back goes on
        if sample.status == Status.PENDING:  # what others said has the version -1
            begin -= next((i for i, version in enumerate(reversed(sample.weight_versions)) if version < 0),
                          len(sample.weight_versions))
        while True:
            if self.enough:
                sample.status = Status.ABORTED
                return sample
            left = self.context_len - len(sample.tokens)
            room = min(params["max_new_tokens"] - sample.response_length, left)
            if room <= 0 or left < ENGINE_RESERVE:
                sample.status = Status.TRUNCATED
                return sample
            holds = self.holds
            out = await self.request({"input_ids": sample.tokens, "sampling_params": params | {"max_new_tokens": room},
                                      "return_logprob": True})
            self.take(sample, out["meta_info"], params, begin)
            if sample.status != Status.ABORTED or self.holds == holds:
                return sample

    def take(self, sample: Sample, meta: dict, params: dict, begin: int) -> None:
        """What an engine has answered -> at the end of the sample, and why it stopped -> its status.

        begin: where in sample.tokens this answer begins; earlier pieces of it may be there."""
        pairs = meta["output_token_logprobs"]                    # [(log-prob, token id, text), ...]
        before = len(sample.tokens)
        sample.append([pair[1] for pair in pairs], [pair[0] for pair in pairs], version=int(meta.get("weight_version") or 0))
        if self.cfg.use_rollout_routing_replay:
            keep_routes(sample, meta)
        sample.status = FINISHED[meta["finish_reason"]["type"]]
        if sample.status != Status.COMPLETED:
            end = self.end_of(sample.tokens[begin:], before - begin, params)
            if end is not None:
                sample.drop(len(sample.tokens) - begin - end)
                sample.status = Status.COMPLETED
        ids = sample.response_ids()
        if sample.status == Status.COMPLETED and ids and ids[-1] in self.ends(params):
            ids = ids[:-1]                   # the end token: it is trained, but no part of the answer
        sample.response = self.tokenizer.decode(ids, skip_special_tokens=self.cfg.rollout_skip_special_tokens)

    def end_of(self, ids: list[int], new: int, params: dict) -> int | None:
        """Where an answer ended although the engine gives another reason; None where it did not. new: where the last piece is.

        NOTE: SGLang looks at the length, and at aborts, before it looks at the token: the last one may be the end token. And a
        stop string of which an abort has cut off the second half is seen by no engine.
        """
        for i, token in enumerate(ids[new:], new + 1):
            if token in self.ends(params) and not params.get("ignore_eos"):
                return i
        stops = params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops

        def stopped(n: int) -> bool:         # once true, it stays so for every larger n
            return any(s in self.tokenizer.decode(ids[:n]) for s in stops)
        if not stops or not stopped(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids) + 1), True, lo=new + 1, key=stopped)      # earlier pieces had none

    def ends(self, params: dict) -> set[int]:
        return self.end_ids | set(params.get("stop_token_ids") or ())

    async def request(self, payload: dict) -> dict:
        """One /generate through the router; repeated after an engine died under it."""
        who = owner.get()
        self.busy[who] += 1
        try:
            return await self.request_when_served(payload, who)
        finally:
            self.busy -= Counter([who])      # and forgets who has none left

    async def request_when_served(self, payload: dict, who: int | None) -> dict:
        problem = "none"
        async with self.slots:
            for attempt in range(self.cfg.request_retries + 1):
                await self.serving.wait()
                self.in_flight += 1
                try:
                    async with self.session.post(self.engines.router_url + "/generate", json=payload) as answer:
                        if answer.status == 200:
                            out = await answer.json()
                            self.counts.update({key: out["meta_info"].get(key, 0) for key in COUNTED})
                            return out
                        problem = f"status {answer.status}: {(await answer.text())[:500]}"
                        if answer.status in (400, 422):          # our own mistake: no repetition helps
                            raise ValueError(f"sample {who}: the engine refused the request ({problem}); "
                                             "check prompt length, sampling settings and stop strings")
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    problem = f"{type(error).__name__}: {error}"
                finally:
                    self.in_flight -= 1
                self.counts["retries"] += 1
                await self.recover()
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        raise EngineError(f"sample {who}: no answer from {self.engines.router_url} in {self.cfg.request_retries + 1} tries, "
                          f"last {problem}; the engines' logs are in {self.run_dir}/logs, set request_retries or "
                          "request_timeout_s higher if they only were slow")

    async def post(self, url: str, payload: dict, headers: dict | None = None) -> dict:
        """Upstream's way to ask: the router's /generate, whole also where a sync of the weights cuts it; or another server."""
        if url != self.engines.router_url + "/generate":
            return await self.post_elsewhere(url, payload, headers)
        params = {"max_new_tokens": 128} | payload.get("sampling_params", {})    # SGLang's default
        ids = payload["input_ids"] if "input_ids" in payload else self.tokenizer(payload["text"])["input_ids"]
        rest = {k: v for k, v in payload.items() if k not in ("text", "input_ids", "sampling_params")}
        done, pairs, version = [], [], None  # of the answer so far; of several versions the oldest is told
        while True:
            holds = self.holds
            own = params | {"max_new_tokens": params["max_new_tokens"] - len(done)}
            out = await self.request(rest | {"input_ids": list(ids) + done, "sampling_params": own})
            new, meta = len(done), out["meta_info"]
            version = meta["weight_version"] = version or meta.get("weight_version")
            done, pairs = done + out["output_ids"], pairs + (meta.get("output_token_logprobs") or [])
            if meta["finish_reason"]["type"] == "abort" and (end := self.end_of(done, new, params)) is not None:
                done, pairs, meta["finish_reason"] = done[:end], pairs[:end], {"type": "stop", "matched": done[end - 1]}
            if meta["finish_reason"]["type"] != "abort" or self.holds == holds or len(done) >= params["max_new_tokens"]:
                break
        if done != out["output_ids"]:        # of several pieces, or cut
            out["text"] = self.tokenizer.decode(done, skip_special_tokens=params.get("skip_special_tokens", True))
            out["meta_info"] |= {"completion_tokens": len(done)} | ({"output_token_logprobs": pairs} if pairs else {})
        return out | {"output_ids": done}

    async def post_elsewhere(self, url: str, payload: dict, headers: dict | None = None) -> Any:
        """Another server's JSON answer; repeated where it is busy or away, not where it says no."""
        problem = "none"
        for attempt in range(self.cfg.request_retries + 1):
            try:
                async with self.session.post(url, json=payload, headers=headers) as answer:
                    if answer.status < 400:
                        return await answer.json(content_type=None)
                    problem = f"status {answer.status}: {(await answer.text())[:500]}"
                    if answer.status < 500 and answer.status != 429:
                        raise ValueError(f"{url} refused the request ({problem}); check what is sent")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        raise EngineError(f"{url}: no answer in {self.cfg.request_retries + 1} tries, last {problem}; is the server alive? "
                          "Else raise request_retries or request_timeout_s")

    async def ask_teacher(self, sample: Sample) -> None:
        """sample.teacher_log_probs, by an SGLang server that reads the sample and adds nothing."""
        n, first = sample.response_length, len(sample.tokens) - sample.response_length
        if len(sample.teacher_log_probs) == n:   # it waited in the buffer, finished
            return
        payload = {"input_ids": sample.tokens, "return_logprob": True, "logprob_start_len": first - 1,
                   "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        try:
            async with self.teacher_slots:
                out = await self.post_elsewhere(f"{self.cfg.opd_teacher_url}/generate", payload)
        except EngineError as error:
            raise EngineError(f"sample {sample.index}: the teacher gave no log-probs; an SGLang server? {error}") from error
        pairs = out["meta_info"]["input_token_logprobs"][-n:]    # [(log-prob, token id, text)]
        # NOTE: SGLang 0.5.17 reports the vocabulary's last id as 0 there, with the right log-prob.
        assert len(pairs) == n and all(pair[1] in (token, 0) for pair, token in zip(pairs, sample.tokens[first:])), (
            f"sample {sample.index}: the teacher's log-probs are of other tokens than those asked for; is its tokenizer ours?")
        sample.teacher_log_probs = [pair[0] for pair in pairs]

    # ---- Weights that change -------------------------------------------------------------------------------------------
    def sync(self, push: Callable[[], dict], version: int) -> dict:
        """push() -> its answer, while no engine computes; an engine that dies meanwhile is replaced, and all are sent again.

        For the driver's thread. Answers in flight stop where they are and go on with the new weights.
        """
        self.run(self.hold())
        try:
            while True:
                try:
                    answer = self.watched(push)
                    break
                except EngineError as error:
                    print(f"the weight sync failed: {str(error).splitlines()[-1]}", flush=True)
                    if not self.run(self.mend()):
                        raise                # all live, so another try would fail as well
            self.weight_version = version
        finally:
            self.run(self.release())
        return answer

    def watched(self, push: Callable[[], dict]) -> dict:
        """push(); an engine that hangs meanwhile is killed: so push() has an error, and need not wait for its time limit."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(push)
            while not concurrent.futures.wait([answer], self.cfg.health_check_interval_s).done:
                self.engines.kill(self.engines.check())
            return answer.result()

    async def hold(self) -> None:
        """From here to release() nothing is sent, nothing is in flight, and nobody else replaces engines."""
        await self.mending.acquire()
        self.serving.clear()
        self.holds += 1
        end = self.loop.time() + self.cfg.request_timeout_s
        while self.in_flight:
            # A request that was on its way when the engines were told comes too late for it, so tell them again.
            try:
                await asyncio.to_thread(self.engines.abort_all)
            except EngineError:
                await self.mend()            # it died with its requests
            for _ in range(20):
                if self.in_flight:
                    await asyncio.sleep(0.01)
            if self.loop.time() > end:
                raise TimeoutError(f"{self.in_flight} requests did not end {self.cfg.request_timeout_s:.0f} s after they were "
                                   "aborted for a weight sync; see the engines' logs in the run folder")

    async def release(self) -> None:
        self.serving.set()
        self.mending.release()

    # ---- Engines that die ----------------------------------------------------------------------------------------------
    async def watch(self) -> None:
        """Runs beside generation: an engine that hangs keeps its connections open, so nobody else would notice."""
        while True:
            await asyncio.sleep(self.cfg.health_check_interval_s)
            await self.recover()

    @contextlib.asynccontextmanager
    async def watching(self):
        """-> the watch as a task, which only ends by raising; it lasts as long as the block."""
        monitor = asyncio.create_task(self.watch())
        try:
            yield monitor
        finally:
            monitor.cancel()
            if self.replacing:               # a new engine gets its weights before anything goes on
                await asyncio.shield(self.replacing)             # and raises, where it could not be replaced

    async def recover(self) -> None:
        """Replace what is dead. Callers that were waiting when a check began share it."""
        begun = self.mends
        async with self.mending:
            if self.mends == begun:
                await self.mend()

    async def mend(self) -> list[int]:
        """Restart a dead router, replace dead engines, give those the trainers' weights -> their ranks. Under `mending`."""
        self.mends += 1
        if self.replacing and not self.replacing.done():         # who began it was cancelled: the new engine is still starting
            await asyncio.shield(self.replacing)
        dead = await asyncio.to_thread(self.engines.check)
        await asyncio.to_thread(self.engines.check_router, dead)
        for rank in dead:
            self.replacing = asyncio.create_task(self.replace(rank))
            await asyncio.shield(self.replacing)                 # goes on, and is waited for, where its caller is cancelled
        return dead

    async def replace(self, rank: int) -> None:
        print(f"engine {rank} is down; restart {self.engines.restarts + 1} of {self.cfg.max_engine_restarts}", flush=True)
        await asyncio.to_thread(self.engines.restart, rank)
        await asyncio.to_thread(self.resync, [rank])
        await asyncio.to_thread(self.engines.admit, rank)        # only now does the router send to it
        print(f"engine {rank} is back, with the trainers' weights", flush=True)

    def metrics(self) -> dict[str, float]:
        """Of the answers since the last call; the spec_ ones only with speculative decoding."""
        counts, self.counts = self.counts, Counter()
        routers, self.routers = self.engines.router_restarts - self.routers, self.engines.router_restarts
        out = {"perf/generated_tokens": counts["completion_tokens"], "rollout/request_retries": counts["retries"],
               "rollout/engine_restarts": self.engines.restarts, "rollout/router_restarts": routers}
        if counts["prompt_tokens"]:
            out["perf/prefix_cache_hit_rate"] = counts["cached_tokens"] / counts["prompt_tokens"]
        if counts["spec_num_proposed_drafts"]:
            out["rollout/spec_accept_rate"] = counts["spec_num_correct_drafts"] / counts["spec_num_proposed_drafts"]
            out["rollout/spec_accept_length"] = counts["completion_tokens"] / counts["spec_verify_ct"]
        return out


def end_ids(model_path: str, tokenizer) -> set[int]:
    """Every token that ends an answer, as SGLang collects them."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        file = pathlib.Path(model_path) / name
        own = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        ids |= set(own) if isinstance(own, list) else {own}
    return ids - {None}


def keep_routes(sample: Sample, meta: dict) -> None:
    """Which experts the engine took, after the tokens of its answer were appended. It knows all tokens but the last."""
    if meta.get("routed_experts"):           # none where the request was aborted before its first token
        sample.rollout_routed_experts = [len(sample.tokens) - 1, meta["routed_experts"]]
