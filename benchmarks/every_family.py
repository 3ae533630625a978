"""
every_family.py: does each model family work from end to end? A table of checks; every cell is one that ran.

    tiny random model --> log-probs | round trip | sync | fp8 --> | family | 2e-06 | 57 of 57 tensors | ... |

Run:   python benchmarks/every_family.py [FAMILY ...]        all ten: about 15 minutes on 2 cores; 1 is returned if a cell fails

    log-probs    our model against transformers on 64 tokens: largest |a - b|
    round trip   Hugging Face folder -> Megatron checkpoint -> Hugging Face folder: how many tensors are the same, bit for bit
    sync         python train.py, 2 steps on one trainer and one engine. Every sync is checked by checksums; here the largest
                 |logp - rollout_logp| of the tokens of step 2, which the engine computed with the weights of step 1; experts
                 as the engine chose them. The folder that the run wrote is checked as by convert.py check
    fp8          the folder in fp8 and back: the largest |a - b| / |a| of a quantised tensor; the others bit for bit the same

Left out on purpose: layouts of several processes (tests/test_families.py has them all), GPUs.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
LOG_PROB, FP8 = 1e-4, 0.03                   # bounds; fp8: 3 mantissa bits, see tests/test_fp8.py
FOR_ENGINE = dict(vocab_size=64, max_position_embeddings=512, pad_token_id=0)    # the tokenizer has an id for each character
FOR_ENGINE_TOO = {                           # config class -> what else SGLang needs
    "DeepseekV3Config": dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid"),  # transformers knows none
    "Qwen3MoeConfig": dict(mlp_only_layers=[])}  # it gives every layer experts, whatever this says
# What a MiMo checkpoint brings along; SGLang executes it when it may (trust_remote_code).
MIMO = "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"
RUN = """
num_rollout = 2
check_weight_update_interval = 1
"""


# ---- Cells: each returns what the table shows, or raises -----------------------------------------------------------------
def log_probs(family: str, folder: pathlib.Path) -> str:
    import convert
    try:
        report = convert.check(folder) and convert.check_log_probs(folder, None, num_tokens=64)
    finally:
        leave_groups()
    return within(float(report.split("largest ")[1]), LOG_PROB)


def round_trip(family: str, folder: pathlib.Path) -> str:
    import convert
    checkpoint, back = folder.with_name("checkpoint"), folder.with_name("back")
    try:
        convert.hf_to_megatron(folder, checkpoint)
    finally:
        leave_groups()
    convert.megatron_to_hf(checkpoint, back, folder)
    report = convert.compare(folder, back)
    total, differ = report.split()[1], report.split()[3]
    assert differ == "0", report
    return f"{total} of {total} tensors"


def sync(family: str, folder: pathlib.Path) -> str:
    import convert
    from helpers import RUN_FILE
    from test_families import EXPERTS
    run_file, log = folder.with_name("run.py"), folder.with_name("train.log")
    run_file.write_text(RUN_FILE.format(model=str(folder)) + RUN + "use_rollout_routing_replay = True\n" * (family in EXPERTS)
                        + "sglang = dict(trust_remote_code=True)\n" * (family == "mimo"))
    with open(log, "w") as out:
        done = subprocess.run([sys.executable, "train.py", run_file, f"--output_dir={folder.parent}", "--run_name=run"],
                              cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, f"train.py ended with {done.returncode}:\n{log.read_text()[-3000:]}"
    run = folder.with_name("run")
    convert.check(run / "hf" / "iter_0000002")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if row["step"] == 1 and "train/loss" in row]
    assert rows[0]["train/grad_norm"] > 0, "nothing was learned, so step 2 shows nothing"
    return within(row["train/train_rollout_logprob_abs_diff_max"], LOG_PROB)


def fp8(family: str, folder: pathlib.Path) -> str:
    import torch

    import convert
    from fp8 import is_quantized
    small, back = folder.with_name("fp8"), folder.with_name("fp8_back")
    convert.requantize(folder, small, to_fp8=True)
    convert.requantize(small, back, to_fp8=False)
    worst, a, b = 0.0, convert.HFReader(folder), convert.HFReader(back)
    for name in a.names():
        x, y = a(name), b(name)
        if is_quantized(name, x):
            worst = max(worst, ((x - y).norm() / x.norm()).item())
        else:
            assert torch.equal(x, y), f"{name} is not quantised, and another after the way there and back"
    assert worst > 0, "nothing was quantised"
    return within(worst, FP8)


CELLS = {"log-probs": log_probs, "round trip": round_trip, "sync": sync, "fp8": fp8}


def within(value: float, bound: float) -> str:
    assert value < bound, f"{value:.2e}, the bound is {bound}"
    return f"{value:.1e}"


def leave_groups() -> None:
    """Megatron's groups are made once in a process, and the next model makes its own."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


# ---- Models and the table ------------------------------------------------------------------------------------------------
def write_model(family: str, folder: pathlib.Path) -> None:
    from conftest import write_char_tokenizer
    from test_families import FAMILIES, PUBLISHED, SIZES
    from test_model import write_random
    cls, extra = FAMILIES[family]
    published = dict(PUBLISHED.get(family, {}))
    if family == "mimo":
        published["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    write_random(cls, SIZES | FOR_ENGINE | extra | FOR_ENGINE_TOO.get(cls, {}), folder, published)
    write_char_tokenizer(str(folder))
    if family == "mimo":
        (folder / "configuration_mimo.py").write_text(MIMO)


def one_family(family: str, folder: pathlib.Path) -> dict[str, str]:
    """-> cell -> what the table shows"""
    write_model(family, folder / "model")
    cells = {}
    for name, cell in CELLS.items():
        begin = time.perf_counter()
        try:
            cells[name] = cell(family, folder / "model")
        except Exception as e:               # whatever it is, it is this cell's, and the other cells are to be seen too
            print(f"{family}, {name}: {type(e).__name__}: {e}", file=sys.stderr)
            cells[name] = "FAIL " + ([line for line in str(e).split("\n") if "Error: " in line] or [str(e)])[-1][:80]
        print(f"{family:12} {name:12} {cells[name]:24} {time.perf_counter() - begin:6.1f} s", flush=True)
    return cells


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both this process and train.py compute on the CPU
    from test_families import FAMILIES
    if unknown := sys.argv[1:] and set(sys.argv[1:]) - FAMILIES.keys():
        sys.exit(f"error: {', '.join(sorted(unknown))}: no such family; there is: {', '.join(FAMILIES)}")
    rows = {}
    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory(prefix=f"families_{family}_") as folder:
            rows[family] = one_family(family, pathlib.Path(folder))
    print("\n| | " + " | ".join(CELLS) + " |\n" + "|---" * (len(CELLS) + 1) + "|")
    for family, cells in rows.items():
        print(f"| {family} | " + " | ".join(cells.values()) + " |")
    sys.exit(any("FAIL" in cell for cells in rows.values() for cell in cells.values()))


if __name__ == "__main__":
    main()
