"""
debug.py: what did that rollout hold, and what does training make of it?

    rollout --dump--> 3.pt --Replay--> trainers, and no engine: the losses of the run that wrote it, bit for bit
                       +------show---> a sample token by token: log-prob, mask, weight version

    python train.py RUN.py --save_debug_rollout_data=dumps/{rollout_id}.pt                 in the run folder, one file a step
    python train.py RUN.py --load_debug_rollout_data=outputs/.../dumps/{rollout_id}.pt     trainers only, on these files
    python train.py RUN.py --debug_rollout_only            engines and rewards only, with the weights of hf_checkpoint
    python debug.py outputs/.../dumps/3.pt [--index 17 | --group 3] [--limit 5] [--tokens]

A replay run saves, resumes and ends like any other. Its checkpoints hold the data position of the run that wrote the dumps, so
--resume without load_debug_rollout_data goes on from there with engines.

Test:  pytest tests/test_debug.py
Knows nothing about: engines, trainers. train.py leaves out the side that debug_rollout_only and debug_train_only name.
Left out on purpose: another batch size than the dump's. A part of a dump is a dump: read it, shorten the lists, torch.save.
"""
import argparse
import math
import numbers
import os
import pathlib
import sys

import torch
from rich.console import Console
from rich.text import Text

import algos
import buffer
import checks
from configs.base import Config, need, samples_per_group
from rollout import RolloutResult
from sample import Sample

# Of a sample, per token. As tensors: weights_only=True takes a microsecond for each number of a list.
INTEGERS, FLOATS = ("tokens", "loss_mask", "weight_versions"), ("rollout_log_probs", "teacher_log_probs")


# ---- Writing and reading -----------------------------------------------------------------------------------------------
def dump(cfg: Config, run_dir: pathlib.Path, step: int, result: RolloutResult, data: buffer.DataSource,
         position: dict) -> None:
    """Everything that training takes from one rollout -> a file. position: data.state_dict() after these samples were made."""
    content = {
        "rollout_id": step, "weight_version": 0 if cfg.debug_rollout_only else step,     # of those who learn from it next
        "samples": [pack(s) for s in result.samples], "rewards": result.rewards,         # compared within groups
        "examples": [pack(s) for s in result.examples], "metrics": result.metrics, "position": position,
        "tokenizer": data.tokenizer.name_or_path}                                        # a folder, for show()
    path = run_dir / cfg.save_debug_rollout_data.replace("{rollout_id}", str(step))      # an absolute path stays what it is
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")                   # never half a dump under the final name
    torch.save(plain(content), part)
    os.replace(part, path)


def read(path: pathlib.Path) -> dict:
    """A dump's content, its samples as Samples. Nothing in the file is executed."""
    try:
        content = torch.load(path, weights_only=True)
        content["samples"], content["examples"] = ([unpack(d) for d in content[key]] for key in ("samples", "examples"))
    except Exception as error:               # torch.load may raise anything on a file of another kind, IndexError on a text
        raise ValueError(f"{path} is no dump that can be read ({type(error).__name__}: {str(error).partition('.')[0][:200]}); "
                         "name one that save_debug_rollout_data has written") from error
    return content


def pack(sample: Sample) -> dict:
    own = sample.to_dict()
    return own | {key: torch.tensor(own[key], dtype=torch.int64) for key in INTEGERS} | {
        key: torch.tensor(own[key], dtype=torch.float64) for key in FLOATS}              # a Python float, to the last bit


def unpack(d: dict) -> Sample:
    return Sample.from_dict(d | {key: d[key].tolist() for key in INTEGERS + FLOATS})


def plain(value):
    """Only what weights_only=True loads. What a hook or a data row brings besides (an object, an array) becomes its text: no
    part of training reads it."""
    if value is None or isinstance(value, (bool, torch.Tensor)):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Real):      # numpy's too
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return str.__str__(value) if isinstance(value, str) else repr(value)


# ---- Training on dumps -------------------------------------------------------------------------------------------------
class Replay:
    """What the loop of train.py needs of a rollout. Every dump is read and checked before anything is started."""

    def __init__(self, cfg: Config, data: buffer.DataSource, vocab_size: int, steps: range):
        self.cfg, self.data, anew = cfg, data, 0
        for step in steps:
            if not self.path(step).is_file():
                decays = cfg.lr_decay_style != "constant" and cfg.lr_decay_iters is None
                raise ValueError(
                    f"load_debug_rollout_data: step {step} of {steps.stop} has no {self.path(step)}; "
                    + (f"set num_rollout={step}" + decays * f" and lr_decay_iters={steps.stop * cfg.num_steps_per_rollout}"
                       if step > steps.start else "give the path that save_debug_rollout_data wrote"))
            content = read(self.path(step))
            try:
                self.check(content, vocab_size, step)
                anew += self.rewards(content) != content["rewards"]
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{self.path(step)}: {error}") from error
        print(f"training on {len(steps)} dumps, without engines and evaluation" + (anew > 0) *
              f"; {anew} have other rewards now: they are shaped and compared by this run's settings", flush=True)

    def path(self, step: int) -> pathlib.Path:
        return pathlib.Path(self.cfg.load_debug_rollout_data.replace("{rollout_id}", str(step))).expanduser()

    def generate(self, step: int) -> RolloutResult:
        content = read(self.path(step))
        self.position = content["position"]
        metrics = {key: value for key, value in content["metrics"].items() if key.startswith("rollout/")}    # not perf/
        return RolloutResult(content["samples"], self.rewards(content), metrics, content["examples"])

    def state_dict(self) -> dict:
        return self.position                 # of the run that wrote the dumps

    def load_state_dict(self, state: dict) -> None:
        self.position = state

    def close(self) -> None:
        pass

    def rewards(self, content: dict) -> list[float]:
        """As Rollout.finish makes them of raw ones: so another estimator can be tried on the same samples."""
        cfg, samples = self.cfg, content["samples"]
        if cfg.loss_type == "sft" or cfg.custom_reward_post_process:
            return content["rewards"]
        need(all(s.reward is not None for s in samples), "it has samples without a reward, as loss_type='sft' makes them; "
             "replay it with loss_type='sft'")
        return algos.group_rewards(cfg, [s.get_reward_value(cfg.reward_key) + algos.length_penalty(cfg, s.response_length)
                                         for s in samples], [s.group_index for s in samples], [s.rollout for s in samples])

    def check(self, content: dict, vocab_size: int, step: int) -> None:
        """ValueError for a dump that this run cannot train on."""
        cfg, samples, groups = self.cfg, content["samples"], {}
        need(content["rollout_id"] == step, f"it is step {content['rollout_id']}'s, not step {step}'s; was it renamed?")
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        need(len(groups) == cfg.rollout_batch_size, f"it has {len(groups)} groups; set rollout_batch_size={len(groups)}, and "
             "a global_batch_size that goes with it")
        sizes, n = {len(group) for group in groups.values()}, samples_per_group(cfg)
        need(sizes == {n} or cfg.custom_generate_function, f"its groups have {', '.join(map(str, sorted(sizes)))} samples, "
             f"the run's {n}; set n_samples_per_prompt={max(sizes)}")
        rows = cfg.sft_batch_size if step >= cfg.num_critic_only_steps else 0
        need(len(content["examples"]) == rows, f"it has {len(content['examples'])} rows of sft_data, this run wants {rows}; "
             "set sft_data, sft_batch_size and num_critic_only_steps as in the run that wrote it")
        highest = max(max(sample.tokens) for sample in samples + content["examples"])
        need(highest < vocab_size, f"it holds token id {highest}, the model knows {vocab_size} of them: another one made it; "
             f"set hf_checkpoint to that (its tokenizer was in {content['tokenizer']})")
        need(not cfg.opd_teacher_url or all(s.teacher_log_probs or not s.response_length for s in samples),
             "it has no teacher's log-probs; use opd_teacher_load, or a dump of a run with opd_teacher_url")
        buffer.to_train_data(cfg, samples, self.rewards(content), content["examples"])   # raises what training would
        checks.staleness(cfg, step, samples)
        self.data.load_state_dict(content["position"].get("data", content["position"]))      # of fully_async there is more


# ---- Looking at samples ------------------------------------------------------------------------------------------------
# Probability below which a trained token has a colour; below MARKED a pipe has its log-prob in {}.
COLOURS = [(0.01, "bold white on red"), (0.1, "red"), (0.5, "yellow"), (2.0, "")]
MARKED = math.log(0.1)


def show(content: dict, console: Console, tokenizer, index: int | None, group: int | None, limit: int, every: bool) -> None:
    """Samples of a dump for people. index, group: which; every: a line for each token."""
    samples, rewards = content["samples"], content["rewards"]
    chosen = [(s, r) for s, r in zip(samples, rewards) if index in (None, s.index) and group in (None, s.group_index)]
    indices, groups = (sorted({getattr(s, name) for s in samples}) for name in ("index", "group_index"))
    need(chosen, f"no such sample; --index goes from {indices[0]} to {indices[-1]}, --group from {groups[0]} to {groups[-1]}")
    coloured = console.is_terminal and not console.no_color
    console.print(Text(
        f"rollout {content['rollout_id']}, for weights of version {content['weight_version']}: {len(samples)} samples in "
        f"{len(groups)} groups, {len(content['examples'])} rows of sft_data; {min(limit, len(chosen))} of {len(chosen)} shown "
        "(--limit, --index, --group)"), soft_wrap=True)
    key = Text("x{-2.9} log-prob of a token, where below 10%   [[x]] masked   ")
    if coloured:
        key = Text.assemble("probability ", *((f"below {p:.0%}", style) for p, style in COLOURS[:-1]), ("masked", "dim"))
    console.print(key + Text("<v3> from here written by version 3"), soft_wrap=True)
    for sample, reward in chosen[:limit]:
        ids = sample.tokens[len(sample.tokens) - sample.response_length:]
        texts = token_texts(tokenizer, ids)
        prompt = "".join(token_texts(tokenizer, sample.tokens[:len(sample.tokens) - sample.response_length]))
        console.print()
        console.print(Text(header(sample, reward), "bold"), soft_wrap=True)
        console.print(Text.assemble("prompt:   ", (prompt, "blue")), soft_wrap=True)
        if every:
            console.print(Text("    at       id  log-prob  mask  version  token", "bold"), soft_wrap=True)
            for line in token_lines(sample, ids, texts):
                console.print(line, soft_wrap=True)
        else:
            console.print(Text("response: ") + running_text(sample, texts, coloured), soft_wrap=True)
        console.print(Text(totals(sample, texts)), soft_wrap=True)


def header(sample: Sample, reward: float) -> str:
    own = f"{sample.reward:.4g}" if isinstance(sample.reward, float) else sample.reward
    known = [version for version in sample.weight_versions if version >= 0]
    versions = " to ".join(map(str, sorted({min(known), max(known)}))) if known else "unknown"
    return (f"index {sample.index}, group {sample.group_index}: {sample.status.value}, reward {own} (in its group "
            f"{reward:+.3g}), label {sample.label!r}; {len(sample.tokens) - sample.response_length} prompt and "
            f"{sample.response_length} response tokens, version {versions}"
            + "; removed by a hook: nothing of it is trained" * sample.remove_sample)


def facts(sample: Sample) -> list[tuple]:
    """(log-prob or None where nobody sampled, loss mask, version or None) of each response token."""
    n = sample.response_length
    logps, versions = sample.rollout_log_probs or [None] * n, sample.weight_versions or [-1] * n
    return [(None if logp == 0 and not mask else logp, mask, None if version < 0 else version)
            for logp, mask, version in zip(logps, sample.loss_mask, versions)]


def style_of(logp: float | None, mask: int) -> str:
    return "dim" if not mask else "" if logp is None else next(style for p, style in COLOURS if math.exp(logp) < p)


def running_text(sample: Sample, texts: list[str], coloured: bool) -> Text:
    """The response as it reads: colours, or marks where there are none."""
    out, before, inside = Text(), None, False
    for text, (logp, mask, version) in zip(texts, facts(sample)):
        if not coloured and inside != (not mask):
            out.append("]]" if inside else "[[")
        inside = not mask
        if version is not None and version != before:            # a tool's tokens have none, and change nothing
            out.append(f"<v{version}>", "cyan")
            before = version
        out.append(text, style_of(logp, mask))
        if not coloured and mask and logp is not None and logp < MARKED:
            out.append(f"{{{logp:.1f}}}")
    return out.append("]]") if inside and not coloured else out


def token_lines(sample: Sample, ids: list[int], texts: list[str]):
    """Position in the response, id, log-prob, mask, version (> where it changes), text: a line for each token."""
    before = None
    for i, (token, text, (logp, mask, version)) in enumerate(zip(ids, texts, facts(sample))):
        changed = ">" if version is not None and before not in (None, version) else ""
        before = before if version is None else version
        logp_text, version_text = "-" if logp is None else f"{logp:.4f}", "-" if version is None else f"{changed}v{version}"
        yield Text(f"{i:6} {token:8} {logp_text:>9} {mask:5} {version_text:>8}  {text!r}", style_of(logp, mask))


def totals(sample: Sample, texts: list[str]) -> str:
    rows = facts(sample)
    trained = [(logp, i) for i, (logp, mask, _) in enumerate(rows) if mask and logp is not None]
    versions = {v: sum(version == v for _, _, version in rows) for v in sorted({v for _, _, v in rows if v is not None})}
    masked = sum(not mask for _, mask, _ in rows)
    line = f"tokens:   {len(rows)}, {len(rows) - masked} trained, {masked} masked"
    if trained:
        lowest, at = min(trained)
        line += (f"; mean log-prob {sum(logp for logp, _ in trained) / len(trained):.4f}, lowest {lowest:.4f} at {at} "
                 f"({texts[at]!r})")
    return line + "".join(f"; v{version}: {count}" for version, count in versions.items())


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text; an id where that is nothing, or there is no tokenizer. A character of several tokens
    comes with the last of them."""
    if tokenizer is None:
        return [f" {token}" for token in ids]
    out, start = [], 0                       # start: the first token that is not shown yet
    for i in range(len(ids)):
        text = tokenizer.decode(ids[start:i + 1], clean_up_tokenization_spaces=False)
        unfinished = text.endswith("\ufffd") and i - start < 3 and i + 1 < len(ids)      # UTF-8: four bytes at most
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text) or f"<id {ids[i]}>"
        out.append("" if unfinished else text)
        start = start if unfinished else i + 1
    return out


def load_tokenizer(content: dict, model: str | None, console: Console):
    """Of the folder or hub name `model`, else of the folder that the dump names; None where that is gone."""
    folder = model or content["tokenizer"]
    if model is None and not os.path.isdir(folder):
        console.print(Text(f"{folder} is not here, so there are ids instead of text; give --model a tokenizer's folder"),
                      soft_wrap=True)
        return None
    from transformers import AutoTokenizer   # 2 s
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {folder} ({str(error).splitlines()[0]}); give --model a model's folder") from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows the samples of a rollout that save_debug_rollout_data has written.")
    parser.add_argument("file", type=pathlib.Path)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--index", type=int, help="the sample of this index")
    one.add_argument("--group", type=int, help="the samples of this group_index")
    parser.add_argument("--limit", type=int, default=8, help="samples at most (8)")
    parser.add_argument("--tokens", action="store_true", help="a line for each token")
    parser.add_argument("--model", help="folder or hub name of the tokenizer; the dump names its own")
    options, console = parser.parse_args(), Console(highlight=False)
    try:
        content = read(options.file)
        tokenizer = load_tokenizer(content, options.model, console)
        show(content, console, tokenizer, options.index, options.group, options.limit, options.tokens)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
