"""
rewards.py: how is an answer scored? A finished sample goes in, a finite float comes out, or a dict that holds one.

    Sample --score()--+-- async hook, remote_rm: awaited on the event loop, at most reward_timeout_s --+--> float | dict
                      +-- workers.py: plain hook or grader, in another process, same limit ------------+--> RewardError
Use:   rewarder = Rewarder(cfg.reward_workers); await rewarder.score(cfg, sample)    Test:  pytest tests/test_rewards.py
Knows nothing about: Ray, SGLang, tensors; of a Sample only prompt, response, label, metadata, index, and only to read.
Left out on purpose: turning an exception into 0.0, because a broken grader would look like a bad policy (rollout.py
decides by on_reward_error); a guard for an `async def` that blocks or ignores its cancellation (use a `def`).
What is right, say the graders of graders.py.
"""
import asyncio
import functools
import math
from types import SimpleNamespace

from graders import GRADERS, INLINE, NEEDS_LABEL, SETTINGS, SLOW_IMPORTS, check_rm_type, grader_view
from workers import WorkerError, Workers, describe


class RewardError(RuntimeError):
    """A score that could not be made; the message names sample, reward function, cause and remedy."""


# ---- What rollout.py uses --------------------------------------------------------------------------------------------
class Rewarder:
    """Scores with cfg.custom_rm, else with the grader that sample.metadata["rm_type"] or else cfg.rm_type names.
    A plain `def` hook runs in another process on copies of cfg and sample: what it writes to them is lost, and what it
    keeps (a cache, a counter) is per process. An `async def` hook runs here, on the originals.
    """

    def __init__(self, workers: int):
        self.workers = Workers(workers)
        self.view = lambda cfg: cfg  # what an async hook gets as args; Rollout says
        self.scorers = {}  # (grader's name, id(cfg)) -> (cfg, function that makes the scorer)

    async def score(self, cfg, sample, reward_key=None, **kw) -> float | dict | list:
        """The reward of a sample; with group_rm also of a list of samples, in one call. RewardError if there is none.
        reward_key (default cfg.reward_key) names the entry of a dict that counts; kw goes to custom_rm."""
        hook, n = cfg.custom_rm, len(sample) if isinstance(sample, list) else None
        if hook and cfg.group_rm and n is None:  # evaluation scores one at a time
            return (await self.score(cfg, [sample], reward_key, **kw))[0]
        rm = getattr(hook, "__qualname__", repr(hook)) if hook else sample.metadata.get("rm_type") or cfg.rm_type
        index = sample.index if n is None else [one.index for one in sample]
        key, limit_s = reward_key or cfg.reward_key, cfg.reward_timeout_s * (n or 1)
        try:
            if rm is None:
                raise ValueError("whoever made this sample gave it none (sample.reward, an agent's talk.reward), and neither "
                                 "custom_rm nor rm_type is set to judge it")
            name = None if hook else check_rm_type(rm)
            fn, sample, kw = (hook, sample, kw) if hook else (GRADERS[name], grader_view(sample, boxed=rm != name), {})
            if name in NEEDS_LABEL and not sample.gold:
                raise ValueError("the label is empty; check label_key and this line of the data")
            if asyncio.iscoroutinefunction(fn) or asyncio.iscoroutinefunction(getattr(fn, "__call__", None)):
                args = self.view(cfg) if hook else cfg
                return to_reward(await asyncio.wait_for(fn(args, sample, **kw), limit_s), n, key)
            if name in INLINE and len(sample.response) < 100_000:
                return to_reward(fn(cfg, sample), n, key)
            settings = SimpleNamespace(**{field: getattr(cfg, field) for field in SETTINGS.get(name, ())})
            which = (name, id(cfg) if hook else None)
            if which not in self.scorers:
                self.scorers[which] = cfg, functools.partial(scorer, name, cfg if hook else None, hook)
            arguments = dict(sample=sample, settings=settings, n=n, key=key, kw=kw)
            return await self.workers.call(self.scorers[which][1], arguments, limit_s, make=True)
        except Exception as error:  # user code and HTTP, so any kind; our own cancellation is no Exception and passes
            cause = error if isinstance(error, WorkerError) else describe(error)
            raise RewardError(f"no reward for sample {index} from {rm} (limit {limit_s:g} s): {cause}; fix function or "
                              "data, raise reward_timeout_s, or skip and count with on_reward_error='skip'") from error

    def close(self):
        self.workers.close()


# ---- In a worker process ---------------------------------------------------------------------------------------------
def scorer(name, cfg, hook):
    """What a process keeps: the hook, or a grader, with what it is slow to import."""
    if hook is None:
        __import__(SLOW_IMPORTS.get(name, "math"))               # 0.4 s, 1.3 s; or nothing new

    def score(sample, settings, n, key, kw):
        return to_reward(hook(cfg, sample, **kw) if hook else GRADERS[name](settings, sample), n, key)
    return score


def to_reward(value, n, key):
    """float, or dict with a float at key, or (n not None) a list of n of these; else ValueError."""
    if n is not None:
        if not isinstance(value, (list, tuple)) or len(value) != n:
            raise ValueError(f"group_rm must return a list of {n} rewards, not {value!r:.200}")
        return [to_reward(one, None, key) for one in value]
    if isinstance(value, dict):
        if key not in value:
            raise ValueError(f"reward_key {key!r} is not in the dict; set it to one of {list(value)}")
        return {**value, key: to_reward(value[key], None, None)}
    number = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number or a dict, not {number!r:.200}")
    return float(number)

