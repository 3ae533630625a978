"""
convert.py: from a model folder to tensors and back: reading Hugging Face folders, writing them, both from the command line.

    HF folder --HFReader--> HF tensors --families.to_megatron--> one rank's parameter     (load)
    HF folder <--save_hf--- HF tensors <--families.to_hf-------- every rank's shard       (save, sync)

Run:   python convert.py check FOLDER                 reads headers only, and accounts for every tensor and its shape
       python convert.py check FOLDER --log-probs     our model against transformers', on the same tokens
       python convert.py check FOLDER OTHER           two folders: tensor by tensor, then the log-probs of both
       python convert.py to-fp8 FOLDER OUT            weights in blocks of 128 x 128 (fp8.py); to-bf16 is the way back
       python convert.py megatron-to-hf CHECKPOINT OUT --hf=FOLDER      a run's checkpoints/iter_*, of any layout
       python convert.py hf-to-megatron FOLDER OUT    a checkpoint for other tools; a run starts from the folder itself
Test:  pytest tests/test_convert.py tests/test_fp8.py
Knows nothing about: Ray, SGLang; what a weight is called, and how it is cut (families.py).
Memory: one tensor and one shard of the output; for log-probs the model in fp32, for hf-to-megatron Adam's state too.
Left out on purpose: reading a slice of a file per TP rank (each reads the whole tensor, from the page cache), .bin
       files (pickles run code).
"""

import argparse
import copy
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import fp8
from families import (ALIASES, HANDLED, carried, check_policy, check_tp, family, has_value_head, hf_names, ignorable,
                      lookup, value_config)

# ---------------------------------------------------------------------------------------------------------------------
# Folders

# What makes a model folder besides the weights. save_hf carries these over; other files stay behind. Code (*.py) is what
# config.json's auto_map names, without which nobody can load a MiMo or a Kimi K2: it is copied, never run here.
SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
               "vocab.*", "merges.txt", "chat_template*", "*tiktoken*", "*.py"]
INDEX = "model.safetensors.index.json"


def model_folder(path_or_hub_name, patterns: list[str]) -> Path:
    """The local folder of a model: the path itself, or a hub name's snapshot with the files matching `patterns`."""
    from huggingface_hub import snapshot_download

    folder, why = Path(path_or_hub_name).expanduser(), "there is no such folder"
    # "name" or "owner/name" may be a hub name; anything that starts like a path or has more slashes is not
    if not folder.is_dir() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path_or_hub_name)):
        try:
            folder = Path(snapshot_download(str(path_or_hub_name), allow_patterns=patterns))
        except (OSError, ValueError) as e:  # no network, no such repository, not allowed
            why += f", and the hub did not give it ({type(e).__name__}: {str(e)[:200]})"
    if not (folder / "config.json").is_file():
        why = "the folder holds no config.json" if folder.is_dir() else why
        raise ValueError(f"model folder {path_or_hub_name} not found: {why}; give a folder with config.json or a hub "
                         "name you can reach")
    return folder


def load_hf_config(path_or_hub_name):
    """The transformers config of a local folder (preferred) or a hub name; ValueError says what to fix."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # heavy: seconds of import, so not at the top

    folder = model_folder(path_or_hub_name, SMALL_FILES)
    try:
        # before transformers sees it: our message names what works here
        values = json.loads((folder / "config.json").read_text())
        fam = lookup(values.get("model_type") if isinstance(values, dict) else None)
        if values["model_type"] in ALIASES:      # transformers has no class of this name
            return AutoConfig.for_model(**values | {"model_type": fam.model_type})
        return AutoConfig.from_pretrained(folder)
    except (json.JSONDecodeError, OSError, StrictDataclassError) as e:
        raise ValueError(f"{folder}/config.json cannot be read ({e}); copy or download it again") from e


def check_critic(hf_config, folder, tp_size):
    """ValueError unless the folder's model can be the critic of a policy with this config: any size, the same tokens."""
    critic = HFReader(folder).hf_config
    check_tp(critic, tp_size)
    if critic.vocab_size != hf_config.vocab_size:
        raise ValueError(f"{folder} has a vocabulary of {critic.vocab_size}, the policy {hf_config.vocab_size}: a critic "
                         "reads the policy's tokens; give one with the same tokenizer")


def check_same_shape(hf_config, folder):
    """ValueError unless the folder's model (a reference, a teacher) fits into the trainer's layers."""
    other = load_hf_config(folder)
    check_policy(other)
    HFReader(folder, other)  # complete, undamaged
    mine, theirs = hf_config.to_dict(), other.to_dict()
    free = {"architectures", "initializer_range", "max_position_embeddings", "quantization_config"}
    names = family(hf_config).handled | HANDLED - free
    for key in ["model_type", *sorted(names)]:
        if mine.get(key) != theirs.get(key):
            raise ValueError(f"{folder} has {key} = {theirs.get(key)}, the trained model {mine.get(key)}: both "
                             "are computed by the same trainers, so give a model of the same shape (a teacher of another "
                             "shape: opd_teacher_url)")


class HFReader:
    """Lazy access to the weights of a model folder. `reader(name)` reads one tensor; construction reads headers only. Of an
    fp8 folder it gives the same names, and tensors in bf16.

    Whatever is wrong with the folder (a file missing or cut short, a name missing or unknown) is a ValueError at
    construction, so that a run stops before a GPU is touched and not on the last layer.
    """

    def __init__(self, path, hf_config=None):
        self.folder = model_folder(path, SMALL_FILES + ["*.safetensors", INDEX])
        self.hf_config = hf_config or load_hf_config(self.folder)
        family(self.hf_config)  # refuses a config.json that is not covered
        self.fp8 = fp8.is_fp8(self.hf_config)
        self.files = {}  # file name -> open safetensors handle: a memory map, no weights are read
        self.where = {}  # tensor name -> file name
        for file in self._weight_files():
            self.files[file] = self._open(file)
            for name in self.files[file].keys():
                self.where[name] = file
        # Every weight is accounted for: nothing missing, nothing unused.
        expected = hf_names(self.hf_config)
        self.scales = {n for n in self.where if self.fp8 and n.endswith(fp8.SUFFIX)}
        self.carried = [n for n in self.where if carried(self.hf_config, n) and n not in self.scales]
        known = expected | self.scales | set(self.carried)
        unknown = [n for n in self.where if n not in known and not ignorable(self.hf_config, n)]
        for what, names in (("lacks", expected - self.where.keys()), ("has unknown tensors", unknown)):
            if names:
                raise ValueError(f"{self.folder} {what}: {some(names)}; give a complete {self.hf_config.model_type} "
                                 "causal language model with the config.json that was saved with it")
        self._check_scales()

    def __call__(self, name: str) -> Tensor:
        tensor, scale = self._stored(name), name + fp8.SUFFIX
        return fp8.dequantize_block(tensor, self._stored(scale)) if scale in self.scales else tensor  # else dtype as stored

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the whole model, one at a time."""
        return ((name, self(name)) for name in self.names())

    def carried_items(self, to_fp8: bool) -> Iterator[tuple[str, Tensor]]:
        """What a folder written from this one holds beside the model (families.carried). fp8 stays as stored, bit for bit."""
        for name in self.carried:
            if to_fp8 and name + fp8.SUFFIX in self.scales:
                yield from ((stored, self._stored(stored)) for stored in (name, name + fp8.SUFFIX))
            else:
                yield from fp8.quantize_stream([(name, self(name))]) if to_fp8 else [(name, self(name))]

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, "BF16", "F32", "F8_E4M3", ...) as stored."""
        part = self.files[self.where[name]].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def num_parameters(self) -> int:
        """From the headers alone."""
        return sum(math.prod(self.header(name)[0]) for name in self.names())

    def names(self) -> list[str]:
        """The names to be used: exactly hf_names(hf_config), in the order of the files."""
        beside = self.scales | set(self.carried)
        return [name for name in self.where if name not in beside and not ignorable(self.hf_config, name)]

    def _stored(self, name: str) -> Tensor:
        return self.files[self.where[name]].get_tensor(name)

    def _check_scales(self):
        """Every fp8 tensor has a scale of the right shape, and every scale its tensor."""
        wrong = []
        for name in self.names() + self.carried:
            (shape, dtype), scale = self.header(name), name + fp8.SUFFIX
            want = tuple(-(-size // fp8.BLOCK) for size in shape) if dtype.startswith("F8") else None
            have = self.header(scale)[0] if scale in self.scales else None
            if have != want or dtype.startswith("F8") and (dtype != "F8_E4M3" or not self.fp8):
                wrong.append(f"{name} {dtype} {list(shape)} has the scale {have and list(have)}")
        lost = [n for n in self.scales if n.removesuffix(fp8.SUFFIX) not in self.where]
        if wrong or lost:
            raise ValueError(f"{self.folder}: fp8 weights and scales do not match: {some(wrong + lost)}; give a complete fp8 "
                             "checkpoint (e4m3 in blocks of 128 x 128) with its own config.json, or the unquantized one")

    def _weight_files(self) -> list[str]:
        # Same order of preference as transformers. Other *.safetensors (Llama's consolidated.*) are not ours to read.
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        if not (self.folder / INDEX).is_file():
            raise ValueError(f"{self.folder} has neither model.safetensors nor {INDEX}; save the model again with "
                             "transformers' save_pretrained (it writes safetensors)")
        try:
            return sorted(set(json.loads((self.folder / INDEX).read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise ValueError(f"{self.folder}/{INDEX} is damaged ({e!r}); copy or download it again") from e

    def _open(self, file):
        from safetensors import SafetensorError, safe_open

        path = self.folder / file
        try:
            return safe_open(path, framework="pt")  # checks that the tensors fill the file exactly
        except (SafetensorError, OSError) as e:
            what = "damaged or cut short" if path.is_file() else f"missing, though {INDEX} names it"
            raise ValueError(f"{path} is {what} ({e}); copy or download it again") from e


def some(names) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def save_hf(path, source_path, hf_config, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = 5 * 10**9):
    """Write an HF folder from a stream of (name, tensor), any device. Call it on one process.

    Holds at most one shard of `max_shard_bytes` in host memory (or one tensor, if larger). Config and tokenizer files
    come from `source_path`, and what it carries beside the model (families.carried); float8 tensors with their scales
    (fp8.quantize_stream) make it an fp8 folder. Everything is written into `path`.tmp and renamed at the end, so that a kill
    never leaves half a checkpoint under the final name. An older checkpoint there is replaced; any other folder is refused.
    """
    path, source = Path(path).absolute(), model_folder(source_path, SMALL_FILES)
    if path.resolve() == source.resolve() or (path.exists() and not (path / "config.json").is_file()):
        raise ValueError(f"{path} is the source model or not a checkpoint, so it is not replaced; give another path")
    tmp, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    if old.exists() and not path.exists():  # a save was killed between the two renames below
        old.rename(path)
    shutil.rmtree(tmp, ignore_errors=True)  # of a save that was killed
    shutil.rmtree(old, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        if carried(hf_config, f"model.layers.{hf_config.num_hidden_layers}.") and not has_value_head(hf_config):
            tensors = with_carried(tensors, HFReader(source_path))
        dtypes = write_shards(tmp, hf_config, tensors, max_shard_bytes)
        copy_small_files(source, tmp, dtypes, hf_config)
        if path.exists():  # a rename cannot replace a folder with files in it
            path.rename(old)
        tmp.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def with_carried(tensors, source: HFReader) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors, and behind them what the source carries."""
    to_fp8 = False
    for name, tensor in tensors:
        to_fp8 |= tensor.dtype == torch.float8_e4m3fn
        yield name, tensor
    yield from source.carried_items(to_fp8)


def write_shards(folder, hf_config, tensors, max_shard_bytes) -> set[torch.dtype]:
    """Stream tensors into model-0000k-of-0000n.safetensors and the index; returns the dtypes seen."""
    from safetensors.torch import save_file

    held, held_bytes, expected = {}, 0, hf_names(hf_config)  # held: the open shard
    weight_map, dtypes, total_bytes, n = {}, set(), 0, 1  # weight_map: name -> number of its shard, from 1
    for name, tensor in tensors:
        assert name not in weight_map, f"{name} was given twice to save_hf; to_hf gives it once, so look at the caller"
        nbytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + nbytes > max_shard_bytes:
            save_file(held, folder / f"{n}.part", metadata={"format": "pt"})
            held, held_bytes, n = {}, 0, n + 1
        # A copy even on the CPU: tensors may be views, or live in a buffer that the sender fills again.
        held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        held_bytes, total_bytes, weight_map[name] = held_bytes + nbytes, total_bytes + nbytes, n
        if tensor.dtype == torch.float8_e4m3fn:
            expected.add(name + fp8.SUFFIX)
        if carried(hf_config, name):
            expected.add(name)
        elif not name.endswith(fp8.SUFFIX):
            dtypes.add(tensor.dtype)
    save_file(held, folder / f"{n}.part", metadata={"format": "pt"})

    missing, extra = expected - weight_map.keys(), weight_map.keys() - expected
    assert not missing and not extra, (f"save_hf got {len(weight_map)} tensors; missing: {some(missing)}; extra: "
                                       f"{some(extra)}; let every pipeline stage send, with global layer numbers")
    # Only now is the number of files known, which transformers' naming wants in every name.
    final = ["model.safetensors"] if n == 1 else [f"model-{k:05d}-of-{n:05d}.safetensors" for k in range(1, n + 1)]
    for k, file in enumerate(final, start=1):
        (folder / f"{k}.part").rename(folder / file)
    if n > 1:
        files = {name: final[k - 1] for name, k in weight_map.items()}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    return dtypes


def copy_small_files(source, folder, dtypes, hf_config):
    """Carry config and tokenizer files over as they are, except that config.json names the dtype written and whether it is
    fp8, and a critic's what it is, though it began as a policy."""
    for file in source.iterdir():
        if file.is_file() and any(file.match(pattern) for pattern in SMALL_FILES):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if torch.float8_e4m3fn in dtypes:
        config["quantization_config"] = fp8.QUANTIZATION_CONFIG
    plain = dtypes - {torch.float8_e4m3fn}
    if len(plain) == 1:  # else leave it: transformers then loads in the dtype of the source model
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the name before transformers 5, and since
        config[key] = str(*plain).removeprefix("torch.")
    if has_value_head(hf_config):
        config |= {"architectures": hf_config.architectures, "tie_word_embeddings": False, "id2label": {"0": "LABEL_0"},
                   "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# fp8 and back


def refuse_existing(out, source):
    """ValueError where something lies at OUT, or where writing it would replace the source. What a killed conversion left at
    OUT.tmp or OUT.part is replaced."""
    out = str(Path(out).absolute())
    for suffix in ("", ".old"):
        if Path(out + suffix).exists():
            raise ValueError(f"{out + suffix} exists, and nothing is replaced here; give another path, or move it away")
    for suffix in (".tmp", ".part"):
        if Path(source).absolute().is_relative_to(out + suffix):
            raise ValueError(f"{out + suffix} is replaced while {out} is written, and {source} is there; give another path")


def requantize(folder, out, to_fp8: bool):
    """A folder with the same model in fp8, or plain again (bf16 where it was fp8, else as stored)."""
    reader = HFReader(folder)
    check_policy(reader.hf_config)
    check_shapes(reader)
    refuse_existing(out, folder)
    if reader.fp8 == to_fp8:
        raise ValueError(f"{folder} is {'in fp8 already' if to_fp8 else 'not quantised'}; use it as it is")
    tensors = shown(reader.items(), len(reader.names()), f"to {out}")
    save_hf(out, reader.folder, reader.hf_config, fp8.quantize_stream(tensors) if to_fp8 else tensors)


def engine_folder(folder, run_dir: Path) -> str:
    """What fp8 engines start from: the folder itself if it is fp8, else a copy in the run's folder that is.

    NOTE: not SGLang's load_format="dummy", though weights come with the first sync: it draws the scales of the KV cache at
    random too, and those no sync can set right.
    """
    out = Path(run_dir) / "engine_model"
    if HFReader(folder).fp8:
        return str(folder)
    if not out.exists():                     # complete whenever it exists, so a resumed run has it already
        requantize(folder, out, to_fp8=True)
    return str(out)


# ---------------------------------------------------------------------------------------------------------------------
# Megatron checkpoints


def hf_to_megatron(folder, out):
    """A checkpoint as of a run that has not made a step. Its format knows no layout: any run's can load it.

    NOTE: not streamed. It has Adam's state too, whose form only the optimizer itself knows, so all of it is built here: 20
    bytes of memory for each parameter.
    """
    import checkpoints

    refuse_existing(out, folder)
    out = Path(out).absolute()
    HFReader(folder)                         # refuses a damaged one before anything is built
    checkpoints.one_process_model(folder, trainable=True).save(out, {"step": 0})


def megatron_to_hf(checkpoint, out, source):
    """Tensor by tensor, one layer's at a time."""
    import checkpoints

    refuse_existing(out, checkpoint)
    pieces, reader = checkpoints.CheckpointReader(checkpoint), HFReader(source)
    hf_config = reader.hf_config
    head = pieces.sizes.get("output_layer.weight")
    if head and head[0] == 1:                # a critic's; its folder may be the policy that it began as
        hf_config = value_config(hf_config)
    found = {name: tuple(t.shape) for name, t in pieces.hf_tensors(hf_config, meta=True)}
    shapes = {name: reader.header(name)[0] for name in found if name in reader.where}
    wrong = [f"{name} {found[name]} instead of {shape}" for name, shape in shapes.items() if found[name] != shape]
    if wrong or found.keys() != hf_names(hf_config):
        raise ValueError(f"{checkpoint} is a checkpoint of another model than {source}: "
                         f"{some(wrong or found.keys() ^ hf_names(hf_config))}; give the folder that its run began with")
    save_hf(out, reader.folder, hf_config, shown(pieces.hf_tensors(hf_config), len(found), f"to {out}"))


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check(folder) -> str:
    """Account for every tensor of a folder against the table and against transformers; a report, or ValueError."""
    reader = HFReader(folder)  # refuses unless names of the checkpoint == names of the table
    hf_config, names = reader.hf_config, reader.names()
    check_shapes(reader)
    dtypes = "/".join(sorted({reader.header(name)[1] for name in names}))  # "BF16", "F32", "F8_E4M3"
    tied = "tied" if hf_config.tie_word_embeddings else "untied"
    ignored = len(reader.where) - len(names) - len(reader.scales) - len(reader.carried)
    return (f"family      {hf_config.model_type}: {hf_config.num_hidden_layers} layers, {tied} embeddings\n"
            f"parameters  {reader.num_parameters():,} in {dtypes}\n"
            f"tensors     {len(names)} in {len(reader.files)} file(s): all covered, shapes right; {ignored} ignored"
            + f"\nscales      {len(reader.scales)}, one of each fp8 tensor" * reader.fp8
            + f"\nbeside      {len(reader.carried)} carried: layers that predict further tokens, not trained"
            * bool(reader.carried))


def check_shapes(reader: HFReader):
    """ValueError unless shapes are as transformers itself would build them (on no device, so it takes no memory)."""
    from transformers import AutoModelForCausalLM

    hf_config = plain(reader.hf_config)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    shapes = {}
    for name, t in state.items():
        if not ignorable(hf_config, name):
            shapes |= stored_as(name, tuple(t.shape))
    odd = shapes.keys() ^ hf_names(hf_config)
    assert not odd, f"the {hf_config.model_type} table and transformers differ: {some(odd)}; fix the table"
    wrong = [f"{name} {found} instead of {shape}" for name, shape in shapes.items()
             if (found := reader.header(name)[0]) != shape]
    if wrong:
        raise ValueError(f"{reader.folder} has tensors of another shape than its config.json implies: {some(wrong)}; "
                         "give the config.json that was saved with these weights")


def stored_as(name: str, size: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """transformers' parameter -> the checkpoint's tensors and their shapes, in the order in which they lie in it. Its model
    keeps a layer's experts in two: gate_up_proj [E, 2F, H] and down_proj [E, H, F]."""
    layer, _, which = name.partition(".experts.")
    if which not in ("gate_up_proj", "down_proj"):
        return {name: size}
    parts = ("gate", "up") if which == "gate_up_proj" else ("down",)
    rows = size[1] // len(parts)
    return {f"{layer}.experts.{e}.{part}_proj.weight": (rows, size[2]) for e in range(size[0]) for part in parts}


def plain(hf_config):
    """The config of the same model, not quantised."""
    hf_config = copy.deepcopy(hf_config)
    vars(hf_config).pop("quantization_config", None)
    return hf_config


def compare(folder, other) -> str:
    """Two folders of the same model, tensor by tensor: how many differ, and which of them most."""
    a, b = HFReader(folder), HFReader(other)
    if set(a.names()) != set(b.names()):
        raise ValueError(f"{folder} and {other} are not the same model: only one has "
                         f"{some(set(a.names()) ^ set(b.names()))}; compare a model with its own conversion")
    beside = set(a.carried) & set(b.carried)
    names = a.names() + sorted(beside)
    differ, most = 0, (0.0, 0.0, "")         # (relative, absolute, name)
    for name in shown(names, len(names), "compared"):
        x, y = a(name).float(), b(name).float()
        if x.shape != y.shape:
            raise ValueError(f"{name} is {list(x.shape)} in {folder}, {list(y.shape)} in {other}: not the same model")
        if not torch.equal(x, y):            # NaN too
            relative = ((x - y).norm() / x.norm().clamp(min=1e-30)).nan_to_num(torch.inf).item()
            differ, most = differ + 1, max(most, (relative, (x - y).abs().max().item(), name))
    lines = [f"tensors     {len(names)} compared, {differ} differ"]
    if alone := {*a.carried, *b.carried} - beside:
        lines.append(f"beside      only one of them carries {some(alone)}")
    if differ:
        lines.append(f"most        {most[2]}: |a - b| / |a| = {most[0]:.2e}, largest |a - b| = {most[1]:.2e}")
    if differ and a.fp8 != b.fp8:
        lines.append("fp8         one of them is rounded to it: 0.02 to 0.03 of each quantised tensor is what that does")
    return "\n".join(lines)


@torch.no_grad()
def hf_log_probs(folder, tokens: Tensor) -> Tensor:
    """transformers' log-prob of each token after the first, in fp32 on the CPU. [T] -> [T - 1]"""
    from transformers import AutoModelForCausalLM

    reader = HFReader(folder)
    if reader.fp8:                           # the formula is transformers', the weights are ours: see the NOTE in fp8.py
        model = AutoModelForCausalLM.from_config(plain(reader.hf_config), dtype=torch.float32).eval()
        for name, t in model.state_dict().items():
            if not ignorable(reader.hf_config, name):
                t.copy_(torch.cat([reader(stored) for stored in stored_as(name, tuple(t.shape))]).view(t.shape))
    else:
        model = AutoModelForCausalLM.from_pretrained(reader.folder, config=reader.hf_config, dtype=torch.float32)
    return model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def check_log_probs(folder, other, num_tokens: int) -> str:
    """The same pseudo-random tokens through two folders, or through transformers and our model."""
    import checkpoints  # and with it, for our model, Megatron

    hf_config = load_hf_config(folder)
    check_policy(hf_config)
    tokens = torch.randint(hf_config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    theirs = hf_log_probs(other, tokens) if other else checkpoints.our_log_probs(folder, tokens)
    far, who = (hf_log_probs(folder, tokens) - theirs).abs(), "the two folders" if other else "transformers and our model"
    report = f"log-probs   {who}, {num_tokens} tokens in fp32: mean |a - b| = {far.mean():.2e}, largest {far.max():.2e}"
    if not other and not far.max() < 1e-3:
        raise ValueError(f"{report}; mend the {hf_config.model_type} table in families.py: it is not what transformers does")
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def shown(items: Iterable, total: int, title: str) -> Iterator:
    """The same items; on stderr a bar, or where that is no terminal a line every five seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track
        yield from track(items, title, total, console=Console(stderr=True))
        return
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)
        yield item


def main():
    parser = argparse.ArgumentParser(description="Model folders: checked, compared, converted.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, what, *names):
        one = commands.add_parser(name, help=what, description=what)
        for positional in names:
            one.add_argument(positional, help="a folder" if positional == "out" else "a folder, or a hub name")
        return one
    one = command("check", "account for every tensor of a Hugging Face folder; compare two of them", "folder")
    one.add_argument("other", nargs="?", help="a second folder of the same model")
    one.add_argument("--log-probs", action="store_true", help="also compute with it, and compare")
    one.add_argument("--tokens", type=int, default=64, help="how many (64)")
    command("to-fp8", "a Hugging Face folder in fp8", "folder", "out")
    command("to-bf16", "an fp8 folder as plain weights", "folder", "out")
    command("hf-to-megatron", "a Hugging Face folder as a Megatron checkpoint", "folder", "out")
    one = command("megatron-to-hf", "a run's checkpoint as a Hugging Face folder", "checkpoint", "out")
    one.add_argument("--hf", required=True, help="the folder that the run began with: config and tokenizer")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of this is the CPU's work; Megatron and transformers would take a GPU
    try:
        if args.command == "check":
            for folder in filter(None, (args.folder, args.other)):
                print(check(folder), flush=True)
            if args.other:
                print(compare(args.folder, args.other), flush=True)
            if args.other or args.log_probs:
                print(check_log_probs(args.folder, args.other, max(2, args.tokens)))
        elif args.command == "hf-to-megatron":
            hf_to_megatron(args.folder, args.out)
        elif args.command == "megatron-to-hf":
            megatron_to_hf(args.checkpoint, args.out, args.hf)
        else:
            requantize(args.folder, args.out, args.command == "to-fp8")
    except (ValueError, OSError) as e:  # a user's mistake: the message is enough, a traceback is not needed
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
