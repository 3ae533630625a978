"""
Where does the time of an optimizer step go? The trainer alone, as bench.py drives it, with one step under torch's profiler.

    python benchmarks/profile_training.py configs/bench_qwen3_4b.py --train=2048 [any other option of bench.py]

Prints the kernels by their time on the GPU (on a CPU: the operations), then bench.py's table, which that step slows down.
"""
import contextlib
import itertools

import torch
from torch.profiler import ProfilerActivity, profile

import bench
import model

STEP = 3                                     # the first ones compile


def main() -> None:
    plain, calls = model.MegatronModel.train_step, itertools.count()
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu

    def train_step(self, batches, loss_fn):
        looked_at = next(calls) == STEP
        with profile(activities=activities) if looked_at else contextlib.nullcontext() as found:
            metrics = plain(self, batches, loss_fn)                              # ends with its metrics on the host
        if looked_at:
            print(found.key_averages().table(sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=40,
                                             max_name_column_width=60))
        return metrics
    model.MegatronModel.train_step = train_step
    bench.main()


if __name__ == "__main__":
    main()
