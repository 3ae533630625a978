"""
weights_sync.py: how do weights reach the engines? Gathered over TP and PP, converted, packed into buckets, checked by
checksums; sent through shared memory, a process group or a disk.

    each rank's shards --all_gather(tp)--> full --convert--> HF tensors --flat buffer--> Bucket --broadcast(pp)--> every rank
    tensor:      each rank: a handle of its buffer, for the engine on its GPU; /update_weights_from_tensor copies it in
    distributed: rank 0: one broadcast to all engines, /update_weights_from_distributed (NCCL, gloo)
    disk:        rank 0: a Hugging Face folder, /update_weights_from_disk

The driver (actor.Trainers.push_weights) wraps this in: pause -> flush -> buckets -> verify -> version -> continue.

Test:  pytest tests/test_weights_sync.py
Knows nothing about: samples, losses, which weights these are.
Relies on: data-parallel replicas hold the same weights, so one of them sends.
"""
import base64
import datetime
import hashlib
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import ray
import torch
import torch.distributed as dist
from torch import Tensor

import convert
import families
import fp8
from engines import EngineError, call, free_port

GROUP = "nanoslime_weights"
PIECE = 2**28                                # bytes of experts that are gathered at a time


# ---- Gathering -------------------------------------------------------------------------------------------------------
@dataclass
class Bucket:
    """Some Hugging Face tensors in one flat buffer of bytes, so that one handle or one broadcast moves them all."""
    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    flat: Tensor                             # [bytes] uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the buffer."""
        start = 0
        for name, shape, dtype in zip(self.names, self.shapes, self.dtypes):
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, self.flat[start:start + size].view(dtype).view(shape)
            start += size


@torch.no_grad()
def hf_tensors(model, stage: int) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of one pipeline stage's weights. Those ranks of that stage that take part call it. One parameter
    (of experts: a few of each rank's) at a time is whole, so that a large model needs little more memory than its shards."""
    grid = model.grid
    assert stage == grid.pp_rank, f"stage {stage} asked on a rank of stage {grid.pp_rank}"
    for name, param in model.named_weights():
        rule, _ = families.find_rule(model.hf_config, name)
        if rule.load_only:                   # the last stage's copy of a tied embedding: stage 0 sends it
            continue
        if not rule.of_experts:
            whole = rule.kind in families.WHOLE
            yield from families.to_hf(model.hf_config, name, gathered(param, None if whole else grid.tp_group))
            continue
        count = max(1, PIECE // (param[0].nbytes * grid.ep_size * grid.etp_size))
        for first in range(0, len(param), count):            # these experts of every expert-parallel rank
            shards = [gathered(shard, grid.ep_group) for shard in gathered(param[first:first + count], grid.etp_group)]
            for rank, own in enumerate(zip(*shards)):            # [etp] of [count, ...]
                for e, one in enumerate(zip(*own), rank * len(param) + first):
                    yield from families.to_hf(model.hf_config, name, [part.flatten(0, -2) for part in one], expert=e)


def gathered(tensor: Tensor, group) -> list[Tensor]:
    """Of all ranks of the group, in their order."""
    if group is None or group.size() == 1:
        return [tensor.detach()]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


def takes_part(model) -> bool:
    """Whether rank 0 needs this rank to have all weights: data- and context-parallel replicas hold the same, but experts may
    be dealt over them."""
    return model.grid.ep_size * model.grid.etp_size > 1 or model.grid.dp_rank == model.grid.cp_rank == 0


def buckets(model, bucket_bytes: int) -> Iterator[Bucket]:
    """All weights of the model, on every rank that takes part, in buckets of at most bucket_bytes (a larger
    tensor is one of its own).

    Pipeline stages take turns: the stage packs a bucket and broadcasts it to the others, so every rank sees all of them.
    """
    grid = model.grid
    for stage in range(grid.pp_size):
        source = iter(pack_buckets(hf_tensors(model, stage), bucket_bytes)) if stage == grid.pp_rank else None
        while True:
            bucket = next(source, None) if source else None
            if grid.pp_size > 1:
                bucket = broadcast_bucket(bucket, stage, grid, model.device)
            if bucket is None:
                break
            yield bucket


def pack_buckets(tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    held, size = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        # NOTE: SGLang fuses latent attention's two narrow matrices when it has both, and forgets a half whose other half does
        # not come in the same request.
        if held and size + nbytes > bucket_bytes and "kv_a_proj_with_mqa" not in name:
            yield to_bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += nbytes
    if held:
        yield to_bucket(held)


def to_bucket(named: list[tuple[str, Tensor]]) -> Bucket:
    flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in named])               # [bytes]
    return Bucket([n for n, _ in named], [tuple(t.shape) for _, t in named], [t.dtype for _, t in named], flat)


def broadcast_bucket(bucket: Bucket | None, stage: int, grid, device) -> Bucket | None:
    """From the ranks of one pipeline stage to the others of their pipeline. None ends the stage's turn."""
    src = dist.get_global_rank(grid.pp_group, stage)
    box = [None if bucket is None else (bucket.names, bucket.shapes, bucket.dtypes, bucket.flat.numel())]
    dist.broadcast_object_list(box, src=src, group=grid.pp_group)
    if box[0] is None:
        return None
    names, shapes, dtypes, size = box[0]
    flat = bucket.flat if bucket else torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=src, group=grid.pp_group)
    return Bucket(names, shapes, dtypes, flat)


# ---- Sending ---------------------------------------------------------------------------------------------------------
class WeightSync:
    """One rank's part in pushing weights."""

    def __init__(self, cfg, model, disk_dir: pathlib.Path):
        """disk_dir: this run's own; versions before the present one are removed there."""
        self.cfg, self.model, self.disk_dir = cfg, model, disk_dir
        self.group, self.group_urls = None, None     # the process group with the engines, and whom it joins
        self.failure: EngineError | None = None
        self.members: set[str] = set()       # engines that hold a group of ours, this one or one before it
        self.pool = ThreadPoolExecutor(16)
        if cfg.device == "cpu":
            # NOTE: torch's default sends file descriptors, which only our own child processes can receive. An engine is none
            # of them, and crashes.
            torch.multiprocessing.set_sharing_strategy("file_system")
        elif cfg.update_weight_transport == "tensor":
            # NOTE: Ray shows us one GPU, our number 0; an engine sees several and numbers them differently. The patch names
            # a GPU by its UUID.
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
            monkey_patch_torch_reductions()

    def push(self, version: int, urls: list[str], owners: list[list[int]], check: bool) -> dict:
        """Send this model's weights to the engines at `urls`. Every rank calls it.

        owners: of each engine, the trainer rank that serves each of its GPUs (transport "tensor").
        Rank 0 returns {"version", "bytes", "expected"}: what was sent, and with check=True the checksum of every engine
        parameter as it must be now (see expected_checksums). The others return {}.
        """
        away = {kind for _, kind, _ in self.model.away.values()}             # "weights", "gradients", "state"
        assert "weights" not in away, "weights are off the GPU: wake() first"
        by_tensor = self.cfg.update_weight_transport == "tensor"
        alone = not by_tensor or {rank for own in owners for rank in own} == {0}     # rank 0 sends all; its replica gathers
        if alone and not takes_part(self.model):
            return {}
        sender = self.model.grid.rank == 0
        if sender and self.cfg.update_weight_transport == "distributed":
            self.tried(self.connect, urls)
        sent, tensors = 0, {}

        def send_all():
            nonlocal sent
            for bucket in buckets(self.model, self.cfg.update_weight_buffer_size):
                if self.cfg.rollout_quantization:            # here, so that a folder for others (save_hf) stays bf16
                    bucket = to_bucket(list(fp8.quantize_stream(bucket.tensors())))
                sent += bucket.flat.numel()
                if sender and check:
                    tensors.update((name, tensor.cpu()) for name, tensor in bucket.tensors())
                yield bucket

        if self.cfg.update_weight_transport == "disk":
            self.send_by_disk(version, urls, send_all(), sender)
        else:
            last = held = None               # a bucket is gathered while the engines copy the one before it, held till then
            for bucket in send_all():
                if by_tensor:
                    last, held = self.send_tensor(bucket, urls, owners, alone, last), bucket
                elif sender:                 # not in a thread: two collectives at the same time may wait for each other
                    self.tried(self.send_distributed, bucket, urls)
            if last is not None:
                self.settle(last)
            if by_tensor and not alone:
                dist.barrier()               # another rank's request may still be reading from `held`
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not sender:
            return {}
        tp, kv_heads = self.cfg.rollout_num_gpus_per_engine, self.model.hf_config.num_key_value_heads
        # Of fp8 weights an engine gives the checksum of the product with their scales, and none of the scales.
        expected = expected_checksums(fp8.dequantized(tensors), tp, kv_heads, self.cfg.device) if check else None
        return {"version": version, "bytes": sent, "expected": expected}

    # -- an engine that dies under it: kept as self.failure till all buckets are through, for a rank that left now would leave
    #    the others alone in a collective. Client.sync then replaces the engine, and all is sent again.
    def tried(self, send, *args) -> None:
        """A step of the process group's; none after one that failed."""
        try:
            if self.failure is None:
                send(*args)
        except EngineError as error:
            self.failure = error
            if self.group is not None and self.cfg.device == "cuda":
                dist.distributed_c10d._abort_process_group(self.group)       # a broadcast that hangs would hold destroy up
                self.group = None
            self.group_urls = None           # the next push builds a group anew

    def settle(self, answer: Future) -> None:
        try:
            answer.result()
        except EngineError as error:
            self.failure = self.failure or error

    # -- shared memory (CPU) and CUDA IPC (same GPU)
    def send_tensor(self, bucket: Bucket, urls: list[str], owners: list[list[int]], alone: bool,
                    last: Future | None) -> Future:
        """Handles to the buffers go over HTTP, the bytes do not move until the engines copy them into their parameters.

        Each engine gets one request, with one handle per GPU of its own, from the trainer on its first GPU: so every GPU
        copies within its own memory.
        last: the request for the bucket before this one. Its answer is awaited before the exchange of handles, so that after
        the exchange no engine reads any rank's bucket of before.
        """
        rank = self.model.grid.rank
        # One handle for each GPU: a handle may be opened once.
        handles = {}                         # (engine, which of its GPUs) -> handle
        for engine, own in enumerate(owners):
            for k, owner in enumerate(own):
                if owner == rank:
                    handles[engine, k] = self.handle(bucket)
        if last is not None:
            self.settle(last)
        if not alone:
            everybody = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, handles)
            handles = {place: handle for some in everybody for place, handle in some.items()}
        mine = [e for e, own in enumerate(owners) if own[0] == rank]
        payloads = [{"serialized_named_tensors": [handles[e, k] for k in range(len(owners[e]))],
                     "load_format": "flattened_bucket", "flush_cache": False} for e in mine]
        return self.pool.submit(self.post, [urls[e] for e in mine], "/update_weights_from_tensor", payloads)

    def handle(self, bucket: Bucket) -> str:
        from sglang.srt.utils import MultiprocessingSerializer   # 6 s to import: only where a sync needs it
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
        metadata, start = [], 0
        for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes):
            size = dtype.itemsize * torch.Size(shape).numel()
            metadata.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, start + size, size))
            start += size
        flat = {"flattened_tensor": bucket.flat, "metadata": metadata}
        return base64.b64encode(MultiprocessingSerializer.serialize(flat)).decode()

    # -- process group
    def connect(self, urls: list[str]) -> None:
        """(Re)build the group of rank 0 and every engine rank; needed at the start and after an engine was replaced."""
        if urls == self.group_urls:
            return
        from sglang.srt.utils import init_custom_process_group
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = self.group_urls = None
        # NOTE: an engine that was not sent to lately may still hold a group of before, and then cannot join another.
        leave = [u for u in urls if u in self.members]
        self.post(leave, "/destroy_weights_update_group", [{"group_name": GROUP}] * len(leave))
        per_engine, limit_s = self.cfg.rollout_num_gpus_per_engine, self.cfg.train_timeout_s
        world = 1 + per_engine * len(urls)
        host = ray.util.get_node_ip_address()    # the one that Ray's other nodes know
        port = free_port(host, part=1)
        backend = "nccl" if self.cfg.device == "cuda" else "gloo"
        joined = self.pool.submit(init_custom_process_group, backend=backend, init_method=f"tcp://{host}:{port}",
                                  world_size=world, rank=0, group_name=GROUP, timeout=datetime.timedelta(seconds=limit_s))
        # An engine's refusal comes first, and says more than our own wait for it.
        self.post(urls, "/init_weights_update_group", [
            {"master_address": host, "master_port": port, "rank_offset": 1 + i * per_engine, "world_size": world,
             "group_name": GROUP, "backend": backend} for i in range(len(urls))])
        self.group, self.group_urls = joined.result(timeout=limit_s), list(urls)
        self.members |= set(urls)

    def send_distributed(self, bucket: Bucket, urls: list[str]) -> None:
        """The engines are told by HTTP what comes, and receive it in one broadcast."""
        told = self.pool.submit(self.post, urls, "/update_weights_from_distributed", [
            {"names": bucket.names, "dtypes": [str(d).removeprefix("torch.") for d in bucket.dtypes],
             "shapes": [list(s) for s in bucket.shapes], "group_name": GROUP, "load_format": "flattened_bucket",
             "flush_cache": False}] * len(urls))
        work = dist.broadcast(bucket.flat, src=0, group=self.group, async_op=True)
        told.result(timeout=self.cfg.train_timeout_s)    # an engine's refusal comes first, and says more than a hang
        work.wait()

    # -- disk
    def send_by_disk(self, version: int, urls: list[str], stream: Iterator[Bucket], sender: bool) -> None:
        folder = self.disk_dir / f"weights_{version}"
        if not sender:
            for _ in stream:                 # take part in the gathering
                pass
            return
        convert.save_hf(folder, self.model.hf_folder, self.model.hf_config,
                        ((name, tensor) for bucket in stream for name, tensor in bucket.tensors()))
        self.post(urls, "/update_weights_from_disk", [{"model_path": str(folder), "flush_cache": False}] * len(urls))
        for old in self.disk_dir.glob("weights_*"):
            if old != folder:
                shutil.rmtree(old)

    def post(self, urls: list[str], path: str, payloads: list[dict]) -> None:
        """To all engines at once; the first no is an error with the engine's own words, whoever else is still busy."""
        def one(url, payload):
            call("POST", url + path, payload, self.cfg.train_timeout_s)
        pool = ThreadPoolExecutor(max(1, len(urls)))     # one thread each: a broadcast needs all engines at the same time
        answers = [pool.submit(one, url, payload) for url, payload in zip(urls, payloads)]
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()


# ---- Verifying -------------------------------------------------------------------------------------------------------
# SGLang fuses what the checkpoint keeps apart, and pads the vocabulary; its parameter names are ours otherwise.
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
         "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
         "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1)}
ALONE = {"q_proj": "k_proj", "kv_a_proj_with_mqa": "q_a_proj"}   # of MLA: fused only where the other one is there too
EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.weight$")
WHOLE = ("norm", "mlp.gate.", "q_a_proj", "kv_a_proj")           # every TP rank holds all of it
VOCAB_PADDING = 64


def expected_checksums(tensors: dict[str, Tensor], tp_size: int, kv_heads: int, device: str) -> list[dict[str, str]]:
    """What /weights_checker must answer for these HF tensors: for each TP rank of an engine, parameter -> checksum.

    All parameters of the dense, mixture and MLA families; w_kc and w_vc, which SGLang derives from kv_b_proj, are none.
    """
    parts: dict[str, dict[int, tuple[str, Tensor]]] = {}    # engine's name -> place -> HF name, tensor
    for name, tensor in tensors.items():
        fused, place = engine_name(name, tensors)
        # GLM-4's checkpoints hold gate above up; cut over TP is each of them.
        for i, piece in enumerate(tensor.chunk(2) if "gate_up_proj" in name else [tensor]):
            parts.setdefault(fused, {})[place + i] = name, piece
    checksums = []
    for rank in range(tp_size):
        own = {}
        for fused, pieces in parts.items():
            # Experts too: only the bytes count, and they lie as in [E, 2F/tp, H] and [E, H, F/tp].
            cut = [shard(name, piece, rank, tp_size, kv_heads if ".qkv_proj." in f".{fused}" and i > 0 else tp_size)
                   for i, (name, piece) in sorted(pieces.items())]
            own[fused] = checksum(torch.cat(cut) if len(cut) > 1 else cut[0], device)
        checksums.append(own)
    return checksums


def engine_name(name: str, names: Iterable[str]) -> tuple[str, int]:
    """An HF tensor's parameter in the engine, and which of its parts it is: e.g. gate, up of expert 0, 1, ... in one."""
    expert = EXPERT.search(name)
    if expert:
        number, down = int(expert[1]), expert[2] == "down"
        return name[:expert.start()] + ("experts.w2_weight" if down else "experts.w13_weight"), (
            2 * number + (expert[2] == "up"))
    module = name.split(".")[-2]
    if module in ALONE and name.replace(module, ALONE[module]) not in names:
        return name, 0
    fused, place = FUSED.get(module, (module, 0))
    return name.replace(module, fused), place


def shard(name: str, tensor: Tensor, rank: int, tp_size: int, most: int) -> Tensor:
    """One engine rank's part of one HF tensor. [rows/tp, ...] or [rows, columns/tp]; where there are at most `most` different
    parts (key and value heads), fewer than ranks, each goes to several ranks."""
    if "embed_tokens" in name or "lm_head" in name:
        rows = -(-tensor.shape[0] // VOCAB_PADDING) * VOCAB_PADDING
        tensor = torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], tensor.shape[1])])
        return tensor.chunk(tp_size)[rank]
    if "e_score_correction_bias" in name:
        return tensor.float()                # fp32 in every engine, whatever the model's dtype
    if any(part in name for part in WHOLE):
        return tensor
    if "o_proj" in name or "down_proj" in name:
        return tensor.chunk(tp_size, dim=1)[rank].contiguous()
    parts = min(tp_size, most)
    return tensor.chunk(parts)[rank * parts // tp_size]


def checksum(tensor: Tensor, device: str) -> str:
    """SGLang's hash of a parameter: the first 8 bytes of SHA-256 on a CPU, a kernel of its own on a GPU."""
    if device == "cuda":
        from sglang.srt.managers.mm_utils import tensor_hash
        return f"{tensor_hash(tensor.cuda().contiguous()):016x}"
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).digest()[:8].hex()


def compare_checksums(expected: list[dict[str, str]], answers: list[dict], engines: Iterable[int]) -> int:
    """Raise RuntimeError naming the first parameters in which an engine differs from the trainer.

    -> how many parameters were left out. NOTE: on GPUs SGLang may hold the shared expert as one more expert of
    w13_weight and w2_weight; those layers' experts are not compared then. disable_shared_experts_fusion prevents it.
    """
    left_out = 0
    for engine, answer in zip(engines, answers):
        assert len(answer["ranks"]) == len(expected), (
            f"engine {engine} has {len(expected)} ranks, and {len(answer['ranks'])} of them said what weights they hold")
        for rank, own in enumerate(answer["ranks"]):
            have, want = own["checksums"], expected[own["parallelism_info"]["tp_rank"]]
            names = want.keys() | have.keys()
            layers = {n.split("shared_experts.")[0] for n in want.keys() - have.keys() if "shared_experts." in n}
            fused = {n for n in names if "experts." in n and re.split(r"(shared_)?experts\.", n)[0] in layers}
            left_out += len(fused)
            wrong = sorted(n for n in names - fused if want.get(n) != have.get(n))
            if wrong:
                raise RuntimeError(
                    f"after the weight sync engine {engine} (rank {rank}) differs from the trainer in {len(wrong)} of "
                    f"{len(want)} parameters, first {wrong[:3]}: its samples would come from other weights. Usual causes: a "
                    "rule of families.py that is wrong for this family, an engine that quantises; compare with "
                    "update_weight_transport='disk'")
    return left_out
