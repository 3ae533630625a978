"""
checkpoints.py: what is in a Megatron checkpoint? Its weights one by one under their Hugging Face names; and our model on one
process.

    checkpoints/iter_*: .metadata (which piece of which tensor lies where) + *.distcp --CheckpointReader--> HF tensors
    HF folder --one_process_model--> model.MegatronModel --> .save(), log-probs

Run:   python convert.py megatron-to-hf ..., hf-to-megatron ..., check FOLDER --log-probs
Test:  pytest tests/test_convert.py
Knows nothing about: Ray, SGLang; how a Hugging Face folder is read or written (convert.py).
Left out on purpose: the optimizer's state, which only a run of ours can use.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from families import find_rule, to_hf


class CheckpointReader:
    """Lazy access to the weights in a Megatron checkpoint; construction reads its table only."""

    def __init__(self, folder):
        from torch.distributed.checkpoint import FileSystemReader
        self.folder = Path(folder)
        if not (self.folder / ".metadata").is_file() or not (self.folder / "metadata.json").is_file():
            raise ValueError(f"{folder} is no complete Megatron checkpoint (.metadata and metadata.json); give a run's "
                             "checkpoints/iter_<step>")
        self.reader = FileSystemReader(self.folder)
        self.table = self.reader.read_metadata()
        for piece in self.table.storage_data.values():
            file = self.folder / piece.relative_path
            if not file.is_file() or file.stat().st_size < piece.offset + piece.length:
                raise ValueError(f"{file} is missing or cut short; copy the checkpoint again")
        self.reader.set_up_storage_reader(self.table, is_coordinator=True)
        # Beside the weights: optimizer.state.<kind>.<weight>
        self.sizes = {key: tuple(one.size) for key, one in self.table.state_dict_metadata.items()
                      if hasattr(one, "size") and not key.startswith("optimizer.")}

    def hf_tensors(self, hf_config, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor). meta: names and shapes only, nothing is read."""
        for key, size in self.sizes.items():
            # Layers that are all alike are one tensor with the layers in front: "decoder.layers.mlp..." [L, ...]
            stacked = re.match(r"decoder\.layers\.(?!\d)", key)
            for i in range(size[0]) if stacked else [None]:
                name, place = (key, ()) if i is None else (key.replace("layers.", f"layers.{i}.", 1), (i,))
                try:
                    rule, _ = find_rule(hf_config, name)
                    if rule.load_only:       # a tied one is stored once, under the embedding's name
                        raise KeyError("these embeddings are not tied")
                    if not rule.of_experts:
                        yield from to_hf(hf_config, name, [self.read(key, place, size[len(place):], meta)])
                        continue
                    # [E, 2, F, H] or [E, H, F]; as many experts at a time as a rank had
                    for first, count in self.pieces(key, len(place)):
                        some = self.read(key, (*place, first), (count, *size[len(place) + 1:]), meta)
                        for e, one in enumerate(some, first):                                     # [2, F, H] or [H, F]
                            yield from to_hf(hf_config, name, [one.flatten(0, -2)], expert=e)
                except (KeyError, RuntimeError) as e:    # no rule; a shape that cannot be taken apart
                    raise ValueError(f"{self.folder} is a checkpoint of another model: {name} {list(size)}: {e.args[0]}; give "
                                     "the Hugging Face folder that its run began with") from e

    def pieces(self, key: str, axis: int) -> list[tuple[int, int]]:
        """(first, how many) along this axis of each stored piece; a smaller part of one cannot be read without all of it."""
        return sorted({(chunk.offsets[axis], chunk.sizes[axis]) for chunk in self.table.state_dict_metadata[key].chunks})

    def read(self, key: str, place: tuple[int, ...], shape: tuple[int, ...], meta: bool) -> Tensor:
        """Of one stored tensor, the part of this shape that begins at `place` (of the leading axes; the others are whole)."""
        from torch.distributed.checkpoint import LoadPlan
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
        stored = self.table.state_dict_metadata[key]
        axes = len(stored.size)
        begin, part = (*place, *[0] * (axes - len(place))), (*[1] * (axes - len(shape)), *shape)
        out = torch.empty(part, dtype=stored.properties.dtype, device="meta" if meta else "cpu")
        if not meta:
            chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(part))
            items = create_read_items_for_chunk_list(key, stored, [chunk])
            filled = sum(item.lengths.numel() for item in items)
            if filled != out.numel():
                raise ValueError(f"{self.folder}: {filled} of {out.numel()} numbers of {key} are there; copy it again")
            self.reader.read_data(LoadPlan(items), Into(out))
        return out.view(shape)


class Into:
    """What FileSystemReader.read_data asks of a planner: where does this piece go?"""

    def __init__(self, out: Tensor):
        self.out = out

    def resolve_tensor(self, item) -> Tensor:
        return self.out[tuple(slice(start, start + n) for start, n in zip(item.dest_offsets, item.lengths))]

    def commit_tensor(self, item, tensor) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# One process


def one_process_model(folder, trainable: bool = False):
    """A model.MegatronModel of this one process, in fp32 on the CPU."""
    import dataclasses

    import model
    from configs.base import Config
    from engines import free_port
    cfg = dataclasses.replace(Config(), device="cpu", dtype="float32")
    grid = model.init_distributed(cfg, 0, 1, "127.0.0.1", free_port("127.0.0.1"))
    return model.MegatronModel(cfg, grid, str(folder), 1, trainable=trainable)


def our_log_probs(folder, tokens: Tensor) -> Tensor:
    """Our log-prob of each token after the first, in fp32 on the CPU. [T] -> [T - 1]"""
    n = len(tokens) - 1
    data = {"tokens": [tokens], "response_lengths": [n], "loss_masks": [torch.ones(n)], "loss_weights": [torch.ones(n)]}
    model = one_process_model(folder)
    return model.forward_only([model.pack(data, [0])])[0]
