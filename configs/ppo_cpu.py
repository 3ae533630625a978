"""
The demo by PPO: a critic, a second model with a scalar head, learns what each prefix of an answer is worth.

    python train.py configs/ppo_cpu.py          like configs/demo_cpu.py, plus a second training process
"""
from configs.demo_cpu import *  # noqa: F403  everything of the demo, but:

advantage_estimator = "ppo"
critic = dict(lr=1e-3)            # ten times the actor's; the critic begins as the policy, with V = 0
lambd = 0.95                      # GAE: between one-step errors (0) and plain returns minus values (1)
