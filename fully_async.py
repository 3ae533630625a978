"""
fully_async.py: how does generation run on while training goes on? A pool of groups under way; a step takes what is ready.

    trainers   |........| train 0 |sync| train 1 |sync| train 2 |sync|         version 0 -> 1 -> 2 -> 3
    engines    generate generate generate generate generate generate           (each sync interrupts every answer for a moment)
    admit()    as many groups as may still be trained in time -> under way -> ready -> take() -> one step's batch

How staleness stays within max_staleness (h below), in weight updates between a sample's oldest token and its training. Batch s
is trained at version s, so a group begun at version v must be in a batch up to v + h: its last one.
 1. A group is only begun while fewer than (v + h + 1) * P groups are trained, ready or under way (P = rollout_batch_size;
    AReaL 2505.24298, 5.1). So never more of them have their last batch up to d than the batches up to d have room for.
 2. A batch takes those first whose last batch is nearest, and is not taken before so many of them are ready that the others
    still have room. So a slow group is waited for, and nothing is thrown away for its age. With
    mask_offpolicy_in_partial_rollout nobody is waited for; tokens too old are context then, not trained.

Test:  pytest tests/test_fully_async.py
Knows nothing about: how a group is made (rollout.py), how weights change in the middle of an answer (client.py).
Source: upstream's fully_async_rollout, which has no bound; the two rules are ours.
"""
import asyncio
import math
import time
from collections import Counter

import hooks
from rollout import Rollout, RolloutResult, start_over
from sample import Sample, Status


class FullyAsyncRollout(Rollout):
    """A Rollout whose groups are begun ahead of the step that trains them. The event loop's, once a step has begun."""

    def __init__(self, *args, **kw):
        self.under_way: dict[int, list[Sample]] = {}         # group_index -> group, in the order in which they were begun
        self.ready: dict[int, list[Sample]] = {}             # group_index -> finished samples of the group
        self.born: dict[int, int] = {}                       # group_index -> weight version, of those two
        self.outcomes, self.drops = Counter(), Counter()     # since the last step
        self.taken = 0                                       # groups given to training, in the whole run
        self.held = 0                                        # ready + under_way, counted a second time, for take()'s assert
        self.since = time.perf_counter()                     # when the last batch was taken
        self.tasks: set[asyncio.Task] = set()
        self.changed = asyncio.Event()                       # set: something has finished
        self.error: BaseException | None = None              # what ended a group, or the watch over the engines
        super().__init__(*args, **kw)
        # Groups that a resumed run finds under way go on from their tokens; a hook's only where partial_rollout says it can.
        self.continues |= self.cfg.custom_generate_function is None

    # ---- Beginning -----------------------------------------------------------------------------------------------------
    def admit(self) -> None:
        """Begin as many groups as rule 1 allows. Called whenever that may have changed."""
        cfg = self.cfg
        hooks.running.set(self)              # for the tasks that are begun here
        steps = min(self.client.weight_version + cfg.max_staleness + 1, cfg.num_rollout or math.inf)
        limit = steps * cfg.rollout_batch_size
        while self.error is None and self.taken + len(self.ready) + len(self.under_way) < limit:
            if self.outcomes["asked"] >= cfg.max_batches_asked * cfg.rollout_batch_size:
                return                       # take() says so, if it still misses groups then
            for group in (groups := self.data.get_samples(1)):
                number = group[0].group_index
                if number in self.under_way or number in self.ready:
                    raise ValueError(f"data_source gave the group_index {number} twice; give each group its own, or None")
                self.under_way[number], self.born[number] = group, self.birth(group)
                self.outcomes["asked"] += 1
                self.held += 1
                self.begin(self.make(group))
            if not groups:                   # the data has ended
                return

    def birth(self, group: list[Sample]) -> int:
        """Of a group that was put back the version of its oldest token; where its last batch has no room it begins anew."""
        version = oldest_version(group, self.client.weight_version)
        room = (version + self.cfg.max_staleness + 1) * self.cfg.rollout_batch_size - self.taken
        if version == self.client.weight_version or sum(born <= version for born in self.born.values()) < room:
            return version
        for sample in group:
            start_over(sample)
        self.restarted += len(group)
        return self.client.weight_version

    def begin(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)                 # the loop itself would forget it

        def ended(task):
            self.tasks.discard(task)
            if not task.cancelled() and task.exception():
                self.error = self.error or task.exception()
            self.changed.set()
        task.add_done_callback(ended)

    async def make(self, group: list[Sample]) -> None:
        result = await self.generate_group(self.cfg, group)
        spare = len(self.ready) + len(self.under_way) > self.cfg.rollout_batch_size
        outcome = self.outcome(result, self.drops, spare)
        del self.under_way[group[0].group_index]
        if outcome == "kept":
            self.ready[group[0].group_index] = result
        else:
            del self.born[group[0].group_index]
            self.outcomes[outcome] += 1
            self.held -= 1
        if outcome == "put_back":
            self.put_back([group])
        self.admit()

    # ---- Taking --------------------------------------------------------------------------------------------------------
    async def generate_async(self, step: int) -> RolloutResult:
        """The next batch: those that must be trained now, then those that were begun first."""
        cfg = self.cfg
        hooks.running.set(self)
        if not self.tasks:                   # the first step of this process
            self.taken, self.since = step * cfg.rollout_batch_size, time.perf_counter()
            self.begin(self.client.watch())
        self.admit()
        while (waiting := self.waits_for(step)) is not None:
            self.on_progress(len(self.ready), cfg.rollout_batch_size)
            self.changed.clear()
            if self.error is not None:
                raise self.error
            if not self.under_way:
                if self.outcomes["asked"] >= cfg.max_batches_asked * cfg.rollout_batch_size:
                    raise RuntimeError(f"{waiting}; since the last one {dict(self.outcomes)}, dropped {dict(self.drops)}; the "
                                       "task is too hard, too easy, or broken: change the prompts or the "
                                       "dynamic_sampling_filter, or set max_batches_asked higher")
                break                        # the data has ended
            await self.changed.wait()
        kept = self.take(step)
        outcomes, drops = self.outcomes, self.drops
        self.outcomes, self.drops = Counter(), Counter()
        result = self.finish(step, kept, outcomes, drops, time.perf_counter() - self.since)
        self.restarted, self.since = 0, time.perf_counter()
        return result

    def waits_for(self, step: int) -> str | None:
        """What is missing to take batch `step`; None: nothing."""
        size, h = self.cfg.rollout_batch_size, self.cfg.max_staleness
        if len(self.ready) < size:
            return f"step {step} has {len(self.ready)} of {size} groups"
        for last in range(step, step + h) if not self.cfg.mask_offpolicy_in_partial_rollout else ():
            due = [g for g, born in self.born.items() if born + h <= last]
            late = [g for g in due if g not in self.ready]
            if len(late) > (last - step) * size:                 # more than the later batches have room for
                return f"step {step} waits for some of groups {late}, due by step {last}"
        return None

    def take(self, step: int) -> list[list[Sample]]:
        order = sorted(self.ready, key=lambda g: (self.born[g], g))[:self.cfg.rollout_batch_size]
        kept = [self.ready.pop(g) for g in order]
        for g in order:
            del self.born[g]
        if self.cfg.mask_offpolicy_in_partial_rollout:
            for sample in (s for group in kept for s in group):
                oldest = step - self.cfg.max_staleness
                sample.loss_mask = [m * (v >= oldest) for m, v in zip(sample.loss_mask, sample.weight_versions)]
        self.taken, self.held = self.taken + len(kept), self.held - len(kept)
        there = len(self.ready) + len(self.under_way)
        assert self.held == there, f"{self.held} groups should be ready or under way, {there} are: one was lost or doubled"
        return kept

    # ---- Weights and state ---------------------------------------------------------------------------------------------
    def sync(self, push, version: int) -> dict:
        answer = super().sync(push, version)
        if self.tasks:                       # none before the first step
            self.client.loop.call_soon_threadsafe(self.admit)
        return answer

    def state_dict(self) -> dict:
        """At one moment: the data, and the groups that are ready or under way, which a resumed run has first."""
        async def snapshot():
            ready = [[s.to_dict() for s in group] for group in self.ready.values()]
            under_way = [[self.interrupted(s) for s in group] for group in self.under_way.values()]
            return {"data": self.data.state_dict(), "ready": ready, "under_way": under_way}
        return self.client.run(snapshot())

    def interrupted(self, sample: Sample) -> dict:
        """Between two turns of a conversation a sample looks finished."""
        return sample.to_dict() | ({"status": Status.ABORTED.value} if id(sample) in self.generating else {})

    def load_state_dict(self, state: dict) -> None:
        if "ready" not in state:             # of a run that was not fully_async until now
            state = dict(data=state, ready=[], under_way=[])
        self.data.load_state_dict(state["data"])
        for group in state["ready"]:
            number, samples = group[0]["group_index"], [Sample.from_dict(d) for d in group]
            self.ready[number], self.born[number] = samples, oldest_version(samples, self.client.weight_version)
            self.held += 1
        self.put_back([[Sample.from_dict(d) for d in group] for group in state["under_way"]])

    def close(self) -> None:
        async def cancel():
            for task in (tasks := list(self.tasks)):
                task.cancel()
            if tasks:                        # with a limit: a hook may catch its cancellation
                await asyncio.wait(tasks, timeout=10.0)
        if self.client.loop.is_running():
            self.client.run(cancel())
        super().close()


def oldest_version(group: list[Sample], default: int) -> int:
    return min((v for s in group for v in s.trained_versions()), default=default)
