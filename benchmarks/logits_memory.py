"""
logits_memory.py: how much memory do log-probs and their gradient need? 4,096 tokens, a vocabulary of 151,936.

    python benchmarks/logits_memory.py [cpu | cuda]

Counted: the peak above what was there before, less what must be there after (gradients of hidden states and output matrix).
"""
import sys

import torch

from logprobs import log_probs_and_entropy

TOKENS, VOCAB, HIDDEN, CHUNK = 4096, 151936, 1024, 512


class Peak:
    """with Peak(device) as peak: ...; peak.bytes: the most that was in use above the beginning."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.begin = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")              # forget the highest resident size so far
            self.begin = self.resident("VmRSS")
        return self

    def __exit__(self, *error):
        self.bytes = (torch.cuda.max_memory_allocated() if self.cuda else self.resident("VmHWM")) - self.begin

    @staticmethod
    def resident(key: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / HIDDEN**0.5).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), device=device)

    def forward():
        return log_probs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, chunk=CHUNK)
    forward()[0].sum().backward()            # kernels are compiled, libraries have their workspaces
    hidden.grad = weight.grad = None
    with torch.no_grad(), Peak(device) as evaluate:
        forward()
    with Peak(device) as train:
        logp, entropy = forward()
        (logp + 0.01 * entropy).sum().backward()
    one = CHUNK * VOCAB * 4
    kept = weight.numel() * (4 + weight.element_size() * (dtype != torch.float32)) + hidden.numel() * hidden.element_size()
    print(f"{device}, {TOKENS} tokens x {VOCAB}, {dtype}, chunks of {CHUNK}: all logits in fp32 would be "
          f"{TOKENS * VOCAB * 4 / 1e9:.2f} GB, a chunk is {one / 1e9:.2f} GB")
    print(f"log-probs alone             {evaluate.bytes / 1e9:.2f} GB = {evaluate.bytes / one:.2f} chunks")
    print(f"with gradients              {train.bytes / 1e9:.2f} GB, of which {kept / 1e9:.2f} are the gradients (the weight's summed in "
          f"fp32): the rest is {(train.bytes - kept) / one:.2f} chunks")


if __name__ == "__main__":
    main()
