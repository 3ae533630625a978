"""
buffer.py: where do prompts come from, what waits, how are samples packed and split over ranks?

    jsonl | parquet | reasoning-gym | function --DataSource--> groups of Sample --rollout.py--> finished Samples
    finished Samples --to_train_data--> lists by key --plan--> steps x ranks x micro-batches --pack--> PackedBatch

Test:  pytest tests/test_buffer.py
Knows nothing about: Ray, SGLang, Megatron.    Shapes: T packed tokens, R response tokens of a micro-batch, S its samples.

A packed micro-batch of three samples (p prompt, r response, . padding that is a sequence of its own):

    tokens      p p p r r r r | p p r r r | p p p r r | . . .         [T]
    cu_seqlens  0               7           12          17    20      [S + 2]
    logit_index     2 3 4 5       8 9 10        14 15                 [R] row whose hidden state predicts...
    targets           r r r r       r r r         r r                 [R] ...this token: the one-token shift, done only here
"""
import base64
import dataclasses
import itertools
import json
import pathlib
import random
import re
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

import chat
from hooks import pop_first
from sample import Sample, Status

ENGINE_RESERVE = 7                           # tokens: SGLang refuses an input that leaves less room than this in its context


# ---- Reading rows ----------------------------------------------------------------------------------------------------
def data_file(source: str) -> tuple[str, str, str]:
    """"data.jsonl@[lo:hi]" -> the file, which must be there, lo and hi, each perhaps empty."""
    match = re.fullmatch(r"(.+)@\[(-?\d*):(-?\d*)\]", source)
    path, lo, hi = (match[1], match[2], match[3]) if match else (source, "", "")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"data file {path} not found; give a .jsonl or .parquet file, dict(reasoning_gym=...) or a function")
    return path, lo, hi


def read_rows(cfg, source) -> tuple[list[dict], Counter]:
    """Rows (dicts) of a file, a reasoning-gym task or a function, and a count of the bad lines left out.

    A file may carry a slice: "data.jsonl@[100:200]". A broken line raises ValueError with file and line number, or is counted
    where on_bad_line="skip".
    """
    skipped = Counter()
    if callable(source):
        return list(source()), skipped
    if isinstance(source, dict):
        return reasoning_gym_rows(cfg, source), skipped
    path, lo, hi = data_file(source)
    if path.endswith(".parquet"):
        import pyarrow.parquet
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.endswith((".jsonl", ".json")):
        rows = read_jsonl(cfg, path, skipped)
    else:
        raise ValueError(f"data file {path}: only .jsonl and .parquet are read; convert it")
    rows = rows[slice(int(lo) if lo else None, int(hi) if hi else None)]
    if not rows:
        raise ValueError(f"data {source} has no rows; check the slice and the file")
    return rows, skipped


def read_jsonl(cfg, path: str, skipped: Counter) -> list[dict]:
    rows = []
    with open(path, "rb") as f:              # bytes: a line that is not UTF-8 is one bad line, not a bad file
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__} instead of an object")
                if cfg.input_key not in row:
                    raise ValueError(f"no key {cfg.input_key!r}, only {sorted(row)}; set input_key")
                rows.append(row)
            except ValueError as error:      # json.JSONDecodeError is one
                if cfg.on_bad_line == "raise":
                    what = "an empty line" if not line.strip() else str(error)
                    raise ValueError(f"{path}:{number}: {what}. Mend the line, or set on_bad_line='skip' "
                                     "to leave such lines out and count them") from None
                skipped["bad_line"] += 1
    return rows


def reasoning_gym_rows(cfg, source: dict) -> list[dict]:
    """Procedural tasks with a verifier of their own: dict(reasoning_gym="chain_sum", size=500, seed=1, min_terms=2, ...).

    `instruction` is ours: a line put under each question, to say how the answer must look.
    """
    import reasoning_gym
    options = dict(source)
    name, instruction = options.pop("reasoning_gym"), options.pop("instruction", "")
    try:
        entries = list(reasoning_gym.create_dataset(name, **options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym task {name!r} with {options}: {error}; "
                         "see reasoning_gym.factory.DATASETS for the names") from error
    end = f"\n{instruction}" if instruction else ""
    return [{cfg.input_key: e["question"] + end, cfg.label_key or "label": e["answer"], cfg.metadata_key: {
             "rm_type": "reasoning_gym", "source_dataset": name, "entry": e}} for e in entries]


# ---- The data source -------------------------------------------------------------------------------------------------
class DataSource:
    """Groups of n samples per prompt, in an order that only depends on seed and epoch; unfinished groups come back first.

    Its state (position, counters, waiting groups with their tokens) is in every checkpoint, so a resumed run goes on where
    the other one would have.
    """

    def __init__(self, cfg, tokenizer, context_len: int):
        """context_len: tokens that the model can have."""
        self.cfg, self.tokenizer = cfg, tokenizer
        self.context_len = min(cfg.rollout_max_context_len or context_len, context_len)
        self.tools = [chat.schema(tool) for tool in cfg.tools] or None
        if self.tools:                       # a template that knows no tool's result: raise now, not at the first call
            name, number = cfg.tools[0].__name__, "call00000"
            call = {"type": "function", "id": number, "function": {"name": name, "arguments": {}}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "name": name, "tool_call_id": number, "content": "1"}
            chat.reply(tokenizer, [{"role": "user", "content": "?"}], turn, [result], True, self.tools,
                       **cfg.apply_chat_template_kwargs)
        rows, self.skipped = read_rows(cfg, cfg.prompt_data)
        self.prompts = self.prepare(rows)
        self.examples = None                             # another source: the rows of sft_data, in an order of their own
        if cfg.sft_data:
            own = dataclasses.replace(cfg, loss_type="sft", prompt_data=cfg.sft_data, sft_data="", rollout_max_prompt_len=None)
            self.examples = DataSource(own, tokenizer, context_len)
        self.epoch, self.offset = 0, 0                   # position in the data
        self.next_group, self.next_index = 0, 0          # numbers given out so far
        self.buffer: list[list[Sample]] = []             # groups put back, oldest first
        self.buffer_dropped = 0                          # groups that a buffer_filter took out and did not hand on
        self._order = (None, [])                         # (epoch, permutation), derived

    def __len__(self) -> int:
        return len(self.prompts)

    def prepare(self, rows: list[dict]) -> list[Sample]:
        """Rows -> one template Sample each, tokenised; what does not fit is left out and counted."""
        cfg = self.cfg
        sft = cfg.loss_type == "sft"
        limit = min(cfg.rollout_max_prompt_len or self.context_len, self.context_len - (1 if sft else ENGINE_RESERVE))
        to_sample = self.sft_sample if sft else self.prompt_sample
        samples = []
        for number, row in enumerate(track(rows, f"reading {len(rows)} rows", transient=True, disable=len(rows) < 5000)):
            try:
                sample = to_sample(row)
            except (KeyError, TypeError, ValueError) as error:
                if cfg.on_bad_line == "raise":
                    what = f"no key {error}" if isinstance(error, KeyError) else str(error)
                    raise ValueError(f"{cfg.prompt_data}: row {number}: {what}. Mend the row, set input_key/label_key, "
                                     "apply_chat_template=False where the model has no template, or set "
                                     "on_bad_line='skip'") from error
                self.skipped["bad_line"] += 1
                continue
            prompt_len = len(sample.tokens) - sample.response_length
            too_long = prompt_len > limit or len(sample.tokens) > self.context_len
            if too_long or prompt_len == 0:
                self.skipped["prompt_too_long" if too_long else "prompt_empty"] += 1
                continue
            samples.append(sample)
        if not samples:
            raise ValueError(f"no usable prompt in {len(rows)} rows ({dict(self.skipped)}); the limit is {limit} tokens: "
                             "raise rollout_max_prompt_len or rollout_max_context_len, or shorten the prompts")
        return samples

    def prompt_sample(self, row: dict) -> Sample:
        cfg, tools = self.cfg, row[self.cfg.tool_key] if self.cfg.tool_key else self.tools
        prompt, known = to_prompt(cfg, self.tokenizer, row[cfg.input_key], tools)
        # The template has written the special tokens already; a plain string gets the tokenizer's own (such as BOS).
        ids = self.tokenizer(prompt, add_special_tokens=not cfg.apply_chat_template)["input_ids"]
        label = row[cfg.label_key] if cfg.label_key else row.get("label")
        return Sample(prompt=prompt, tokens=ids, label=label, metadata=dict(row.get(cfg.metadata_key) or {}) | known)

    def sft_sample(self, row: dict) -> Sample:
        """A finished sample: a prompt and its label, or a conversation whose assistant turns are trained (chat.py says which
        tokens are theirs); a message with step_loss_mask=0 is not."""
        turns, cfg = row[self.cfg.input_key], self.cfg
        if not turns:
            raise ValueError("the conversation is empty")
        if isinstance(turns, str) or turns[-1]["role"] != "assistant":
            label = row[cfg.label_key] if cfg.label_key else row.get("label")
            if label is None:
                raise ValueError("loss_type='sft' needs an answer: set label_key, or end the messages with an assistant turn")
            if not cfg.apply_chat_template:
                sample = self.prompt_sample(row)
                answer = self.tokenizer(str(label), add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
                sample.append(answer, [0.0] * len(answer))
                sample.response, sample.status = str(label), Status.COMPLETED
                return sample
            turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
            turns = [*turns, {"role": "assistant", "content": str(label)}]
        tools = row[cfg.tool_key] if cfg.tool_key else None
        ids, mask = chat.assistant_mask(self.tokenizer, turns, tools, **cfg.apply_chat_template_kwargs)
        if 1 not in mask:
            raise ValueError("no token of this conversation is trained; has every assistant turn step_loss_mask=0?")
        at = mask.index(1)                   # what stands before is the prompt
        sample = Sample(prompt=self.tokenizer.decode(ids[:at]), tokens=ids[:at], status=Status.COMPLETED)
        for train, run in itertools.groupby(zip(ids[at:], mask[at:]), key=lambda pair: pair[1]):
            run = [token for token, _ in run]
            sample.append(run, [0.0] * len(run) if train else None, trainable=bool(train))
        sample.response = self.tokenizer.decode(ids[at:])
        return sample

    # -- giving out
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups: waiting ones first, then new prompts. Rolls over into the next epoch."""
        groups = []
        if self.buffer:
            before = len(self.buffer)
            groups = (self.cfg.buffer_filter or pop_first)(self.cfg, None, self.buffer, num_samples)
            self.buffer_dropped += before - len(self.buffer) - len(groups)
            twice = {id(group) for group in groups} & {id(group) for group in self.buffer}
            if len(groups) > num_samples or twice:
                raise ValueError(f"buffer_filter gave {len(groups)} groups, {num_samples} were asked for, and left "
                                 f"{len(twice)} of them in the buffer; return at most num_samples, and del them there")
        while len(groups) < num_samples:
            groups.append(self.new_group())
        return groups

    def new_group(self) -> list[Sample]:
        if self.offset == len(self.prompts):
            self.epoch, self.offset = self.epoch + 1, 0
        template = self.prompts[self.order()[self.offset]]
        self.offset += 1
        n = 1 if self.cfg.loss_type == "sft" else self.cfg.n_samples_per_prompt
        group = []
        for _ in range(n):
            group.append(template.copy(group_index=self.next_group, index=self.next_index))
            self.next_index += 1
        self.next_group += 1
        return group

    def get_examples(self) -> list[Sample]:
        """The next sft_batch_size rows of sft_data."""
        return [group[0] for group in self.examples.get_samples(self.cfg.sft_batch_size)] if self.examples else []

    def order(self) -> list[int]:
        if self._order[0] != self.epoch:
            order = list(range(len(self.prompts)))
            if self.cfg.rollout_shuffle:
                random.Random(self.cfg.rollout_seed + self.epoch).shuffle(order)
            self._order = (self.epoch, order)
        return self._order[1]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Put groups back, e.g. aborted ones with what they have so far."""
        self.buffer.extend(groups)

    # -- checkpoint
    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "offset": self.offset, "next_group": self.next_group, "next_index": self.next_index,
                "buffer_dropped": self.buffer_dropped, "rows": len(self.prompts),
                "buffer": [[s.to_dict() for s in group] for group in self.buffer],
                "examples": self.examples.state_dict() if self.examples else None}

    def load_state_dict(self, state: dict) -> None:
        if state["rows"] != len(self.prompts):
            raise ValueError(f"the checkpoint was made with {state['rows']} prompts, prompt_data now has {len(self.prompts)}; "
                             "resume with the data of the run, or start a new run from its Hugging Face checkpoint")
        for key in ("epoch", "offset", "next_group", "next_index", "buffer_dropped"):
            setattr(self, key, state.get(key, 0))
        self.buffer = [[Sample.from_dict(d) for d in group] for group in state["buffer"]]
        if self.examples and state.get("examples"):      # a resumed run may be the first with examples
            self.examples.load_state_dict(state["examples"])


def to_prompt(cfg, tokenizer, prompt: str | list, tools: list | None) -> tuple[str, dict]:
    """A row's prompt -> its text after the chat template, and the metadata with which agent.py goes on: messages, tools."""
    known = {"tools": tools} if tools else {}
    if cfg.apply_chat_template:
        known["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = chat.render(tokenizer, known["messages"], tools, add_generation_prompt=True, **cfg.apply_chat_template_kwargs)
    if not isinstance(prompt, str):
        raise ValueError("the prompt is a list of messages; set apply_chat_template=True")
    return prompt, known


# ---- Samples -> lists by key -----------------------------------------------------------------------------------------
def to_train_data(cfg, samples: list[Sample], rewards: list[float], examples: list[Sample] = ()) -> dict[str, list]:
    """What travels to the trainers, under upstream's names: one entry per sample in every list.

    rewards: already compared within groups (algos.group_rewards). Samples of a generation step that have no trainable token
    are kept here (their reward counted in the group) and get weight 0 in plan(). examples: of sft_data; their loss_masks are
    0, so no policy loss sees them, and sft_masks say what is trained.
    """
    data = {key: [] for key in ("tokens", "response_lengths", "loss_masks", "rewards", "raw_reward", "truncated",
                                "sample_indices", "rollout_ids", "group_indices", "rollout_log_probs")}
    for sample, reward in zip(samples, rewards):
        sample.check()
        n = sample.response_length
        left_out = sample.remove_sample or (cfg.overlong_filtering and sample.status == Status.TRUNCATED)
        mask = [0] * n if left_out else sample.loss_mask
        data["tokens"].append(torch.tensor(sample.tokens, dtype=torch.int64))                     # [prompt + R_i]
        data["response_lengths"].append(n)
        data["loss_masks"].append(torch.tensor(mask, dtype=torch.int64))                          # [R_i]
        data["rewards"].append(float(reward))
        data["raw_reward"].append(sample.get_reward_value(cfg.reward_key))
        data["truncated"].append(sample.status == Status.TRUNCATED)
        data["sample_indices"].append(sample.index)
        data["rollout_ids"].append(sample.rollout)
        data["group_indices"].append(sample.group_index)
        log_probs = sample.rollout_log_probs or [0.0] * n
        data["rollout_log_probs"].append(torch.tensor(log_probs, dtype=torch.float32))            # [R_i]
    if cfg.use_rollout_routing_replay:
        data["rollout_routed_experts"] = [routed_experts(s) for s in samples]
    if cfg.opd_teacher_url:
        data["teacher_log_probs"] = [torch.tensor(s.teacher_log_probs or [0.0] * s.response_length) for s in samples]   # [R_i]
    if examples:
        add_examples(cfg, data, examples)
    return data


def routed_experts(sample: Sample) -> Tensor:
    """[T_i, L * k] int16; -1 for tokens that no engine has seen: the last, and what a tool put behind it."""
    if not sample.rollout_routed_experts:
        raise ValueError(f"sample {sample.index}: use_rollout_routing_replay needs the engine's routes; a "
                         "custom_generate_function sets sample.rollout_routed_experts from its last request "
                         "(client.keep_routes)")
    rows, text = sample.rollout_routed_experts
    if rows >= len(sample.tokens):
        raise ValueError(f"sample {sample.index}: routes of {rows} tokens, the sample has {len(sample.tokens)}; a hook that "
                         "cuts tokens off must set sample.rollout_routed_experts anew")
    told = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32).view(rows, -1).to(torch.int16)
    return F.pad(told, (0, 0, 0, len(sample.tokens) - rows), value=-1)


def add_examples(cfg, data: dict[str, list], examples: list[Sample]) -> None:
    """Rows of sft_data behind the samples, each a group of its own, numbered -1, -2, ..."""
    own = to_train_data(dataclasses.replace(cfg, opd_teacher_url=None, use_rollout_routing_replay=False), examples,
                        [0.0] * len(examples))
    data["sft_masks"] = [torch.zeros_like(mask) for mask in data["loss_masks"]] + own["loss_masks"]
    own["loss_masks"] = [torch.zeros_like(mask) for mask in own["loss_masks"]]
    own["group_indices"] = [-1 - i for i in range(len(examples))]
    own["raw_reward"] = [0.0] * len(examples)
    own["teacher_log_probs"] = own["rollout_log_probs"]
    if cfg.use_rollout_routing_replay:       # nobody generated them: the routers choose
        width = data["rollout_routed_experts"][0].shape[1]
        own["rollout_routed_experts"] = [torch.full((len(t), width), -1, dtype=torch.int16) for t in own["tokens"]]
    for key in data.keys() - {"sft_masks"}:
        data[key].extend(own[key])


def to_flat(data: dict[str, list]) -> dict[str, tuple]:
    """For the journey: each key's tensors as one, because Ray takes 0.1 ms for a tensor however small. key -> (all, sizes)"""
    return {key: (torch.cat(values), [len(v) for v in values]) if torch.is_tensor(values[0]) else (values, None)
            for key, values in data.items()}


def from_flat(flat: dict[str, tuple]) -> dict[str, list]:
    """The inverse of to_flat."""
    return {key: list(values) if sizes is None else list(values.split(sizes)) for key, (values, sizes) in flat.items()}


# ---- Lists -> steps x ranks x micro-batches --------------------------------------------------------------------------
def plan(cfg, data: dict[str, list], dp_size: int) -> list[list[list[list[int]]]]:
    """-> plan[optimizer step][dp rank][micro-batch] = sample positions; adds data["loss_weights"].

    Pack first, distribute second: bins of at most max_tokens_per_gpu tokens, as many as a multiple of dp_size, then spread
    so that ranks carry about the same number of tokens. Groups are never cut between optimizer steps.
    """
    groups: dict[int, list[int]] = {}
    for i, g in enumerate(data["group_indices"]):
        groups.setdefault(g, []).append(i)
    kinds = [[own for g, own in groups.items() if g >= 0], [own for g, own in groups.items() if g < 0]]  # samples, examples
    if len(kinds[0]) < cfg.num_steps_per_rollout:
        raise ValueError(f"{len(kinds[0])} groups cannot fill {cfg.num_steps_per_rollout} optimizer steps; "
                         "set num_steps_per_rollout lower or rollout_batch_size higher")
    data["loss_weights"] = [0.0] * len(data["tokens"])
    if "sft_masks" in data:
        data["sft_weights"] = [0.0] * len(data["tokens"])
    steps = []
    for k in range(cfg.num_steps_per_rollout):
        members = []                         # the k-th part of the samples' groups, and of the examples
        for kind in kinds:
            lo, hi = (len(kind) * j // cfg.num_steps_per_rollout for j in (k, k + 1))
            members += [i for group in kind[lo:hi] for i in group]
        set_loss_weights(cfg, data, members)
        # context-parallel ranks share a micro-batch; virtual stages take micro-batches in rounds of pp
        rounds = cfg.pipeline_model_parallel_size if cfg.virtual_pipeline_model_parallel_size else 1
        bins = pack_bins([len(data["tokens"][i]) for i in members], cfg.max_tokens_per_gpu * cfg.context_parallel_size,
                         dp_size * rounds)
        bins = [[members[j] for j in one] for one in bins]
        steps.append(distribute(bins, [sum(len(data["tokens"][i]) for i in one) for one in bins], dp_size))
    return steps


def set_loss_weights(cfg, data: dict[str, list], members: list[int]) -> None:
    """The factor of each of a sample's trainable tokens in the loss of its optimizer step.

    default                   mean over rollouts of the mean over the rollout's trainable tokens (GRPO 2402.03300, eq. 3)
    calculate_per_token_loss  mean over all trainable tokens of the step (DAPO 2503.14476, eq. 8)
    fixed_loss_length = L     sum over tokens / L, mean over rollouts (Dr.GRPO 2503.20783): long answers are not favoured
    A rollout with no trainable token is in no mean: neither its weight nor the count (upstream counts it).
    """
    trainable = {i: int(data["loss_masks"][i].sum()) for i in members}
    per_rollout = Counter()
    for i in members:
        per_rollout[data["rollout_ids"][i]] += trainable[i]
    rollouts = max(sum(n > 0 for n in per_rollout.values()), 1)
    for i in members:
        if not trainable[i]:
            continue
        if cfg.calculate_per_token_loss:
            data["loss_weights"][i] = 1.0 / sum(trainable.values())
        else:
            data["loss_weights"][i] = 1.0 / (cfg.fixed_loss_length or per_rollout[data["rollout_ids"][i]]) / rollouts
    if "sft_masks" in data:                  # examples: mean over all their tokens
        tokens = max(sum(int(data["sft_masks"][i].sum()) for i in members), 1)
        for i in members:
            data["sft_weights"][i] = 1.0 / tokens


def pack_bins(lengths: list[int], capacity: int, multiple: int) -> list[list[int]]:
    """First-fit decreasing. -> bins of positions; their number is a multiple of `multiple`, a bin may be empty then."""
    bins, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if fit is None:                      # a sample above the capacity gets a bin of its own
            bins.append([])
            room.append(capacity)
            fit = len(bins) - 1
        bins[fit].append(i)
        room[fit] -= lengths[i]
    while len(bins) % multiple:              # every rank runs the same number: split the fullest, or add an empty one
        b = max(range(len(bins)), key=lambda b: len(bins[b]))
        half = len(bins[b]) // 2
        bins.append(bins[b][:half])
        bins[b] = bins[b][half:]
    return [sorted(one) for one in bins]


def distribute(bins: list[list[int]], loads: list[int], dp_size: int) -> list[list[list[int]]]:
    """Heaviest bins first, dp_size at a time, the heaviest of them to the rank that has least. -> [rank][micro-batch]"""
    ranks, total = [[] for _ in range(dp_size)], [0] * dp_size
    by_load = sorted(range(len(bins)), key=lambda b: -loads[b])
    for start in range(0, len(bins), dp_size):
        for b, r in zip(by_load[start:start + dp_size], sorted(range(dp_size), key=lambda r: total[r])):
            ranks[r].append(bins[b])
            total[r] += loads[b]
    return ranks


# ---- A micro-batch ---------------------------------------------------------------------------------------------------
@dataclass
class PackedBatch:
    """The tensors of one micro-batch, on the device. The picture is at the top of this file."""
    tokens: Tensor          # [1, T] int64
    position_ids: Tensor    # [1, T] position within its own sequence
    cu_seqlens: Tensor      # [S + 1 or S + 2] int32: where each sequence starts, and the end
    max_seqlen: int
    logit_index: Tensor     # [R] int64 into T
    targets: Tensor         # [R] int64
    weight: Tensor          # [R] fp32: loss_mask * loss_weight
    sample: Tensor          # [R] int64: 0 for the tokens of the first sample, 1 for the second, ...
    samples: list[int]      # S positions in the data
    lengths: list[int]      # R_i of each of them, sum is R
    real: Tensor            # [T] not padding
    experts: Tensor | None  # [T, L * k] int16 that the engine routed each token to; -1: unknown
    per_token: dict[str, Tensor]  # [R] advantages, old_logp, rollout_logp, ref_logp, ... whichever the data has


PER_TOKEN = {"advantages": "advantages", "old_logp": "log_probs", "ref_logp": "ref_log_probs",
             "rollout_logp": "rollout_log_probs", "old_values": "values",
             "returns": "returns"}               # LossInput's name -> upstream's key in the data


def lengthen(batch: PackedBatch, total: int) -> PackedBatch:
    """The same micro-batch with padding behind, `total` tokens in all."""
    more = total - len(batch.real)
    if not more:
        return batch
    positions = torch.cat([batch.position_ids, torch.arange(more, device=batch.tokens.device)[None]], dim=1)
    return dataclasses.replace(
        batch, tokens=F.pad(batch.tokens, (0, more)), position_ids=positions, max_seqlen=max(batch.max_seqlen, more),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=total), real=F.pad(batch.real, (0, more)),
        experts=None if batch.experts is None else F.pad(batch.experts, (0, 0, 0, more), value=-1))


def pack(data: dict[str, list], samples: list[int], pad_to: int, device="cpu", pad_each: int = 1) -> PackedBatch:
    """Samples at these positions -> one packed micro-batch, padded to a multiple of pad_to tokens, and every sequence to a
    multiple of pad_each."""
    lengths = [data["response_lengths"][i] for i in samples]
    sizes = [len(data["tokens"][i]) for i in samples]
    tokens = [F.pad(data["tokens"][i], (0, -n % pad_each)) for i, n in zip(samples, sizes)]       # behind: no token sees it
    starts = [0, *torch.tensor([len(t) for t in tokens], dtype=torch.int64).cumsum(0).tolist()]   # [S + 1]
    total = starts[-1]
    pad = -total % pad_to if total else pad_to
    if pad:                                  # padding attends only to itself
        tokens = tokens + [torch.zeros(pad, dtype=torch.int64)]
    real, experts = torch.zeros(total + pad, dtype=torch.bool), None                              # [T]
    if "rollout_routed_experts" in data:
        experts = torch.full((total + pad, data["rollout_routed_experts"][0].shape[1]), -1, dtype=torch.int16)
    for i, start, n in zip(samples, starts, sizes):
        real[start:start + n] = True
        if experts is not None:
            experts[start:start + n] = data["rollout_routed_experts"][i]
    # A response token at position j of the packed row is predicted by the hidden state at j - 1.
    spans = [torch.arange(start + n - r, start + n) for start, n, r in zip(starts, sizes, lengths)]
    target_index = torch.cat(spans or [torch.zeros(0, dtype=torch.int64)])                        # [R]
    row = torch.cat(tokens)                                                                       # [T]

    def gather(values):                      # one tensor or none for each sample -> [R]
        return torch.cat([*values, torch.zeros(0)]).to(device)

    def weights(kind):                       # mask * weight of each token; "loss" or "sft"
        return gather(data[f"{kind}_masks"][i] * data[f"{kind}_weights"][i] for i in samples)
    per_token = {name: gather(data[key][i] for i in samples) for name, key in PER_TOKEN.items() if key in data}
    if "sft_masks" in data:
        per_token["sft_weight"] = weights("sft")
    seqlens = [len(t) for t in tokens]
    return PackedBatch(
        tokens=row[None].to(device),
        position_ids=torch.cat([torch.arange(n) for n in seqlens])[None].to(device),
        cu_seqlens=torch.tensor([0, *torch.tensor(seqlens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        max_seqlen=max(seqlens),
        logit_index=(target_index - 1).to(device),
        targets=row[target_index].to(device),
        weight=weights("loss"),
        sample=torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device),
        samples=list(samples), lengths=lengths, per_token=per_token,
        real=real.to(device), experts=None if experts is None else experts.to(device))
