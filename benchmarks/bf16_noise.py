"""
How far is bf16 from fp32? Log-probs of the same tokens through the same weights: our trainer and transformers in bf16, and
transformers in fp32. What two bf16 implementations differ by, here, trainer and engine will differ by in a run.

    python benchmarks/bf16_noise.py FOLDER [cpu]     FOLDER: a Hugging Face model

Prints the mean |difference| of each pair, over 16 sequences of 384 tokens.
"""
import dataclasses
import sys

import torch
from transformers import AutoModelForCausalLM

import bench
import buffer
import layers
import model
from configs import base
from engines import free_port

COUNT, LENGTH = 16, 384


def ours(folder: str, device: str, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """With each attention kernel that there is. -> name, log-probs [COUNT * (LENGTH - 1)]"""
    cfg = base.load("configs/bench_qwen3_4b.py", [f"--hf_checkpoint={folder}", "--device=cuda"])
    cfg = dataclasses.replace(cfg, device=device, global_batch_size=COUNT)
    grid = model.init_distributed(cfg, 0, 1, "127.0.0.1", free_port("127.0.0.1"))
    trainer = model.MegatronModel(cfg, grid, folder, 0, trainable=False)
    data = bench.made_up_data(cfg, sequences)
    buffer.plan(cfg, data, 1)
    batch = buffer.pack(data, list(range(COUNT)), trainer.pad_to, trainer.device)
    results = {}
    if device == "cuda" and layers.has_flash4():
        results["ours, FlashAttention-4"] = torch.cat(trainer.forward_only([batch])).float().cpu()
        layers.has_flash4 = lambda: False
    results["ours, torch's attention"] = torch.cat(trainer.forward_only([batch])).float().cpu()
    return results


@torch.no_grad()
def theirs(folder: str, device: str, sequences: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    out = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=device)
        logp = hf(ids).logits[0, :-1].float().log_softmax(-1)
        out.append(logp.gather(-1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(out)


def main() -> None:
    folder, device = sys.argv[1], (sys.argv[2:] or ["cuda"])[0]
    torch.manual_seed(0)
    sequences = torch.randint(2, 97, (COUNT, LENGTH)).tolist()
    results = ours(folder, device, sequences)
    for dtype in (torch.bfloat16, torch.float32):
        results[f"transformers, {str(dtype).removeprefix('torch.')}"] = theirs(folder, device, sequences, dtype)
    for name, own in results.items():
        print(f"{name:26}", " ".join(f"{(own - other).abs().mean():.4f}" for other in results.values()))


if __name__ == "__main__":
    main()
