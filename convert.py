"""
convert.py: from a model folder to tensors and back. Reading Hugging Face folders, writing them, and both from the command line.

    HF folder --HFReader--> HF tensors --families.to_megatron--> one rank's parameter     (load)
    HF folder <--save_hf--- HF tensors <--families.to_hf-------- every rank's shard       (save, sync)

Run:   python convert.py check FOLDER      reads headers only, and accounts for every tensor and its shape
Test:  pytest tests/test_convert.py
Knows nothing about: Ray, SGLang, process groups; what a weight is called, and how it is cut (families.py).
Left out on purpose: reading a slice of a file per TP rank (each reads the whole tensor, from the page cache), .bin
       files (pickles run code).
"""

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from families import ALIASES, check_policy, check_tp, family, has_value_head, hf_names, ignorable, lookup

# ---------------------------------------------------------------------------------------------------------------------
# Folders

# What makes a model folder besides the weights. save_hf carries these over; code (*.py) and other files stay behind.
SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
               "vocab.*", "merges.txt", "chat_template*", "*.tiktoken"]
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
        fam = lookup(values.get("model_type"))
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
    for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "tie_word_embeddings", "rope_parameters", "rms_norm_eps"):
        if getattr(hf_config, key) != getattr(other, key):
            raise ValueError(f"{folder} has {key} = {getattr(other, key)}, the trained model {getattr(hf_config, key)}: both "
                             "are computed by the same trainers, so give a model of the same shape (a teacher of another "
                             "shape: opd_teacher_url)")


class HFReader:
    """Lazy access to the weights of a model folder. `reader(name)` reads one tensor; construction reads headers only.

    Whatever is wrong with the folder (a file missing or cut short, a name missing or unknown) is a ValueError at
    construction, so that a run stops before a GPU is touched and not on the last layer.
    """

    def __init__(self, path, hf_config=None):
        self.folder = model_folder(path, SMALL_FILES + ["*.safetensors", INDEX])
        self.hf_config = hf_config or load_hf_config(self.folder)
        family(self.hf_config)  # refuses a config.json that is not covered
        self.files = {}  # file name -> open safetensors handle: a memory map, no weights are read
        self.where = {}  # tensor name -> file name
        for file in self._weight_files():
            self.files[file] = self._open(file)
            for name in self.files[file].keys():
                self.where[name] = file
        # Every weight is accounted for: nothing missing, nothing unused.
        expected = hf_names(self.hf_config)
        unknown = [n for n in self.where if n not in expected and not ignorable(self.hf_config, n)]
        for what, names in (("lacks", expected - self.where.keys()), ("has unknown tensors", unknown)):
            if names:
                raise ValueError(f"{self.folder} {what}: {some(names)}; give a complete {self.hf_config.model_type} "
                                 "causal language model with the config.json that was saved with it")

    def __call__(self, name: str) -> Tensor:
        return self.files[self.where[name]].get_tensor(name)  # on the CPU, dtype as stored

    def num_parameters(self) -> int:
        """From the headers alone."""
        return sum(math.prod(self.files[self.where[name]].get_slice(name).get_shape()) for name in self.names())

    def names(self) -> list[str]:
        """The names to be used: exactly hf_names(hf_config), in the order of the files."""
        return [name for name in self.where if not ignorable(self.hf_config, name)]

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
    come from `source_path`. Everything is written into `path`.tmp and renamed at the end, so that a kill never leaves
    half a checkpoint under the final name. An older checkpoint there is replaced; any other folder is refused.
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
        dtypes = write_shards(tmp, hf_config, tensors, max_shard_bytes)
        copy_small_files(source, tmp, dtypes, hf_config)
        if path.exists():  # a rename cannot replace a folder with files in it
            path.rename(old)
        tmp.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_shards(folder, hf_config, tensors, max_shard_bytes) -> set[torch.dtype]:
    """Stream tensors into model-0000k-of-0000n.safetensors and the index; returns the dtypes seen."""
    from safetensors.torch import save_file

    held, held_bytes = {}, 0  # the open shard
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
        dtypes.add(tensor.dtype)
    save_file(held, folder / f"{n}.part", metadata={"format": "pt"})

    missing, extra = hf_names(hf_config) - weight_map.keys(), weight_map.keys() - hf_names(hf_config)
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
    """Carry config and tokenizer files over as they are, except that config.json names the dtype written, and a critic's what
    it is, though it began as a policy."""
    for file in source.iterdir():
        if file.is_file() and any(file.match(pattern) for pattern in SMALL_FILES):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    if len(dtypes) == 1:  # else leave it: transformers then loads in the dtype of the source model
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the name before transformers 5, and since
        config[key] = str(*dtypes).removeprefix("torch.")
    if has_value_head(hf_config):
        config |= {"architectures": hf_config.architectures, "tie_word_embeddings": False, "id2label": {"0": "LABEL_0"},
                   "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def check(folder) -> str:
    """Account for every tensor of a folder against the table and against transformers; a report, or ValueError."""
    from transformers import AutoModelForCausalLM

    hf_config = load_hf_config(folder)
    reader = HFReader(folder, hf_config)  # refuses unless names of the checkpoint == names of the table
    with torch.device("meta"):  # shapes as transformers itself would build them; takes no memory
        state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items() if not ignorable(hf_config, name)}
    odd = shapes.keys() ^ hf_names(hf_config)
    assert not odd, f"the {hf_config.model_type} table and transformers differ: {some(odd)}; fix the table"
    headers = {name: reader.files[reader.where[name]].get_slice(name) for name in reader.names()}
    found = {name: tuple(header.get_shape()) for name, header in headers.items()}
    wrong = [f"{name} {found[name]} instead of {shape}" for name, shape in shapes.items() if found[name] != shape]
    if wrong:
        raise ValueError(f"{folder} has tensors of another shape than its config.json implies: {some(wrong)}; "
                         "give the config.json that was saved with these weights")
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    dtypes = "/".join(sorted({header.get_dtype() for header in headers.values()}))  # "BF16", "F32"
    tied, ignored = "tied" if hf_config.tie_word_embeddings else "untied", len(reader.where) - len(found)
    return (f"family      {hf_config.model_type}: {hf_config.num_hidden_layers} layers, {tied} embeddings\n"
            f"parameters  {parameters:,} in {dtypes}\n"
            f"tensors     {len(found)} in {len(reader.files)} file(s): all covered, shapes right; {ignored} ignored")


def main():
    parser = argparse.ArgumentParser(description="Account for the weights of a model folder (reads headers only).")
    parser.add_argument("command", choices=["check"])
    parser.add_argument("folder", help="folder with config.json and *.safetensors, or a hub name")
    args = parser.parse_args()
    try:
        print(check(args.folder))
    except ValueError as e:  # a user's mistake: the message is enough, a traceback is not needed
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
