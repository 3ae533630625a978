"""
faults.py: how does a run live through a death? Kills what inject_faults names, at the step it names, so that one can watch.

    inject_faults = dict(engine_0=3, router=[5, 9], reward_worker=7, hang_engine_1=8)        in a run file

What must follow (client.py, workers.py): engine or router are started again, have the trainers' weights, and what they were
asked is asked again; the reward is scored by a new process; no group is lost. Steps count from 0. The moment is random, drawn
from rollout_seed and the step, within as long as the step before took: it may be while samples are made, trained, or weights
sent, and where steps get shorter in a later one.

Test:  python benchmarks/soak.py            hundreds of steps with a kill every ten
Knows nothing about: how anything recovers.
"""
import os
import random
import signal
import threading
import time


class Faults:
    """begin(step) at the start of each step."""

    def __init__(self, cfg, engines, rollout, say):
        """say: where a line for people goes."""
        self.engines, self.rollout, self.say, self.seed = engines, rollout, say, cfg.rollout_seed
        self.plan = {name: when if isinstance(when, list) else [when] for name, when in cfg.inject_faults.items()}
        self.begun, self.length_s = time.monotonic(), 1.0    # of the present step; length of the last one

    def begin(self, step: int) -> None:
        self.length_s, self.begun = time.monotonic() - self.begun, time.monotonic()
        for name in (name for name, steps in self.plan.items() if step in steps):
            delay_s = random.Random(f"{self.seed} {step} {name}").uniform(0, min(self.length_s, 60.0))
            timer = threading.Timer(delay_s, self.strike, (name, step))
            timer.daemon = True
            timer.start()

    def strike(self, name: str, step: int) -> None:
        try:
            if name == "router":
                self.engines.router.child.fault("kill")
            elif name == "reward_worker":
                pids = self.rollout.rewarder.workers.pids()
                for pid in pids[:1]:
                    os.kill(pid, signal.SIGKILL)
                name += "" if pids else " (none is there: graders of one line need none)"
            else:
                kind = "hang" if name.startswith("hang_") else "kill"
                self.engines.fault(int(name.rpartition("_")[2]), kind)
            self.say(f"inject_faults: struck {name}, as planned for step {step}")
        except Exception as problem:         # what it was to strike is dead already, or not there yet
            self.say(f"inject_faults: {name}, planned for step {step}, could not be struck: {type(problem).__name__}: "
                     f"{problem}")
