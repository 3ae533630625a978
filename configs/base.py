"""
configs/base.py: what can be set? One dataclass, one comment per field; load, override, validate.

    configs/run.py (flat assignments, hooks as functions) --load--> Config (read-only) --> every other file
    --key=value on the command line ----------------------^

Run:   python train.py configs/demo_cpu.py --lr=2e-4 --n_samples_per_prompt=16 [--dry-run]
Test:  pytest tests/test_base.py
Knows nothing about: what the values do. Each file reads its own fields; nobody writes to a Config.
Left out on purpose: nested groups, inheritance and interpolation; a run file is Python, so it can compute what it likes.

Names and defaults are upstream slime's wherever it has them. "gpu" in a name means one accelerator, or one CPU process
on a machine that has none: the same run file describes both.
"""
import ast
import dataclasses
import difflib
import importlib
import importlib.util
import json
import pathlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Config:
    # ---- the run ---------------------------------------------------------------------------------------------------
    hf_checkpoint: str | Callable = ""       # folder, hub name, another run file (.py: done first, its result loaded),
    #                                          or a function(folder) that writes a Hugging Face model there
    num_rollout: int | None = None           # rollout steps of the whole run; a step is generate, train, sync
    num_epoch: int | None = None             # or: passes over prompt_data (gives num_rollout where that is None)
    output_dir: str = "outputs"              # run folders go here
    run_name: str | None = None              # run folder's name; None: the run file's name and the time
    resume: bool | str = False               # True: go on with the newest run of this run file; or that run's folder
    seed: int = 1234                         # of the trainers: initial weights, dropout
    rollout_seed: int = 42                   # of the data: shuffling and, with deterministic, each request's sampling
    deterministic: bool = False              # same seeds, same metrics: bit for bit on a CPU, on a GPU as its kernels allow
    save_interval: int | None = None         # steps between checkpoints (the last step is always saved); None: only then
    save_hf: bool = True                     # each checkpoint also as a Hugging Face folder that transformers loads
    keep_checkpoints: int = 2                # older ones are deleted once a newer one is complete
    log_samples: int = 3                     # samples shown in the terminal's table each step
    use_wandb: bool = False                  # log to Weights & Biases too (pip install wandb)
    wandb_project: str = "nanoslime"
    on_invariant: Literal["raise", "warn"] = "raise"  # when a number that must hold does not (README has the list)
    max_logprob_diff: float | None = None    # bound on mean |logp - rollout_logp|; None: 1e-4 in fp32, 0.1 in bf16

    # ---- machines --------------------------------------------------------------------------------------------------
    device: Literal["auto", "cpu", "cuda"] = "auto"   # auto: cuda where there is a GPU
    ray_address: str | None = None           # an existing Ray cluster ("auto" or ip:port); None: start one here
    actor_num_gpus: int = 1                  # trainer ranks; = tp * pp * dp
    rollout_num_gpus: int | None = None      # for all engines together; None: as many as the trainers when colocated
    rollout_num_gpus_per_engine: int = 1     # tensor-parallel size of one SGLang engine
    colocate: bool = False                   # engines and trainers share the same GPUs, in turns
    offload_train: bool | None = None        # colocated: trainers leave the GPU during generation; None: if they must
    offload_rollout: bool | None = None      # colocated: engines leave the GPU during training;    None: if they must
    start_timeout_s: float = 600.0           # for Ray, every engine and every trainer to be up
    train_timeout_s: float = 1800.0          # for one pass of the trainers, and for one collective inside it

    # ---- the model and how it is split ---------------------------------------------------------------------------
    tensor_model_parallel_size: int = 1      # each matrix over this many ranks
    pipeline_model_parallel_size: int = 1    # the layers over this many stages
    sequence_parallel: bool = False          # with TP: norms and residuals split along the tokens (Megatron-LM 2205.05198)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on a GPU (fp32 main weights), float32 on CPU
    max_tokens_per_gpu: int = 4096           # packed tokens of one micro-batch; one longer sample still gets its own
    log_probs_chunk_size: int = 2048         # tokens whose logits exist at one time
    ref_load: str | None = None              # the reference model of the KL terms; None: hf_checkpoint
    megatron: dict = field(default_factory=dict)  # any field of Megatron's TransformerConfig, OptimizerConfig, DDP config

    # ---- data ------------------------------------------------------------------------------------------------------
    prompt_data: str | dict | Callable = ""  # "file.jsonl@[0:1000]" or .parquet; dict(reasoning_gym="chain_sum", size=..,
    #                                          seed=.., ...); or a function() that returns rows (dicts)
    input_key: str = "input"                 # the row's prompt: a string or a list of chat messages
    label_key: str | None = None             # the row's right answer, handed to the reward
    metadata_key: str = "metadata"           # the row's dict for hooks and rewards
    tool_key: str | None = None              # the row's tool descriptions, for the chat template
    apply_chat_template: bool = False        # strings become one user message first
    apply_chat_template_kwargs: dict = field(default_factory=dict)  # e.g. dict(enable_thinking=False)
    rollout_shuffle: bool = False            # a new order each epoch, from rollout_seed + epoch
    rollout_max_prompt_len: int | None = None    # tokens; longer prompts are left out and counted
    rollout_max_context_len: int | None = None   # tokens of prompt + response; None: what the model can do
    on_bad_line: Literal["raise", "skip"] = "raise"  # a broken row: an error with its place, or a counted skip

    # ---- generation ------------------------------------------------------------------------------------------------
    rollout_batch_size: int = 32             # P prompts (groups) trained in one step
    n_samples_per_prompt: int = 8            # n samples in a group
    over_sampling_batch_size: int | None = None  # groups asked for at a time while filtering; None: rollout_batch_size
    max_batches_asked: int = 20              # a step that asked for so many rollout batches and could not fill one is an error
    dynamic_sampling_filter: Callable | str | None = None  # (args, samples) -> keep (bool or DynamicFilterOutput)
    async_mode: bool = False                 # generate the next step's samples while these are trained: one weight update old
    max_staleness: int | None = None         # weight updates that a trained token may be behind; None: 0, async 1, partial 8
    partial_rollout: bool = False            # keep what aborted samples have; go on with them in the next step
    mask_offpolicy_in_partial_rollout: bool = False  # and train only the tokens of the current weights
    buffer_filter: Callable | str | None = None      # (args, rollout_id, buffer, num_samples) -> groups to take first
    custom_generate_function: Callable | str | None = None  # async (args, sample, sampling_params) -> Sample | list
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_max_response_len: int = 1024     # new tokens
    rollout_stop: str | list | None = None
    rollout_stop_token_ids: list | None = None
    rollout_skip_special_tokens: bool = False
    sglang_server_concurrency: int = 512     # requests in flight per engine
    request_timeout_s: float = 1800.0        # for one generate request
    generate_timeout_s: float = 7200.0       # for one call of custom_generate_function: all its turns and tools
    request_retries: int = 3                 # after an engine died under it
    max_engine_restarts: int = 3             # in a whole run; then the run says why and ends
    health_check_interval_s: float | None = None     # an engine silent for three of these is restarted; None: 10, a CPU 60
    sglang: dict = field(default_factory=dict)  # any field of SGLang's ServerArgs

    # ---- rewards ---------------------------------------------------------------------------------------------------
    rm_type: str | None = None               # a built-in grader of rewards.py; a row's metadata["rm_type"] goes first
    custom_rm: Callable | str | None = None  # [async] (args, sample) -> float | dict; with group_rm: (args, samples) -> list
    group_rm: bool = False
    rm_url: str | None = None                # for rm_type="remote_rm"
    reward_key: str | None = None            # which entry of a dict reward is trained on
    eval_reward_key: str | None = None       # which one is evaluated; None: reward_key
    reward_timeout_s: float = 30.0           # for one sample's score
    reward_workers: int = 2                  # processes that run reward functions
    on_reward_error: Literal["raise", "skip"] = "raise"  # skip: the sample counts as failed, its group is left out

    # ---- evaluation ------------------------------------------------------------------------------------------------
    eval_prompt_data: dict = field(default_factory=dict)  # name -> path, or dict(prompt_data=..., any others of eval_fields())
    eval_interval: int | None = None         # steps; also before the first and after the last step
    skip_eval_before_train: bool = False
    n_samples_per_eval_prompt: int = 1
    eval_temperature: float | None = None    # None: rollout_temperature; 0: greedy
    eval_top_p: float | None = None
    eval_max_response_len: int | None = None
    log_passrate: bool = False               # also pass@k, k = 1, 2, 4, ... n (Codex 2107.03374, unbiased)

    # ---- the algorithm ---------------------------------------------------------------------------------------------
    loss_type: Literal["policy", "sft"] = "policy"   # sft: rows' own answers are the responses, no engine is started
    advantage_estimator: str = "grpo"        # a name in algos.ADVANTAGES
    num_steps_per_rollout: int = 1           # optimizer steps on one rollout
    global_batch_size: int | None = None     # samples of one optimizer step; None: P * n / num_steps_per_rollout
    rewards_normalization: bool = True       # subtract the group's mean
    grpo_std_normalization: bool = True      # divide by the group's std; False: Dr.GRPO (2503.20783)
    eps_clip: float = 0.2
    eps_clip_high: float | None = None       # DAPO's clip-higher (2503.14476); None: eps_clip
    eps_clip_c: float | None = None          # dual clip (1912.09729): > 1; None: off
    use_kl_loss: bool = False                # a KL(policy || reference) term in the loss
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    kl_coef: float = 0.0                     # KL in the reward; refused by estimators that cannot use it
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False   # mean over all tokens of the step; False: mean of each sample's mean
    fixed_loss_length: int | None = None     # Dr.GRPO: each sample's sum divided by this constant (max response length)

    # ---- the optimizer ---------------------------------------------------------------------------------------------
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: int = 0                 # optimizer steps
    lr_decay_iters: int | None = None        # None: the whole run
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0                   # global norm; 0: off
    use_distributed_optimizer: bool = True   # optimizer state split over the data-parallel ranks (ZeRO-1, 1910.02054)

    # ---- weight sync -----------------------------------------------------------------------------------------------
    update_weight_transport: Literal["auto", "tensor", "distributed", "disk"] = "auto"  # auto: tensor when colocated
    update_weight_buffer_size: int = 2 * 1024**3     # bytes of one bucket; three exist at a time
    update_weight_disk_dir: str | None = None        # a folder that trainers and engines share; None: in the run folder
    check_weight_update_interval: int = 20   # the first sync and every n-th are checked tensor by tensor; 0: only the first


# ---- Loading ---------------------------------------------------------------------------------------------------------
FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def load(run_file: str, overrides: list[str] = ()) -> Config:
    """Read a run file, apply `--key=value` overrides (later wins), resolve what is left open, validate.

    Raises ValueError for unknown names (with the nearest one), wrong types and impossible combinations.
    """
    values = read_run_file(run_file)
    for arg in overrides:
        apply_override(values, arg)
    check_types(values)
    cfg = resolve(Config(**values))
    validate(cfg)
    return cfg


def read_run_file(run_file: str) -> dict[str, Any]:
    """A run file's assignments. Its functions, imports and names that start with `_` are its own business."""
    path = pathlib.Path(run_file)
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(p) for p in pathlib.Path(__file__).parent.glob("*.py")], 1, 0.3)
        raise ValueError(f"run file {path} not found{f'; did you mean {near[0]}?' if near else ''}")
    # NOTE: not registered in sys.modules: so Ray sends its functions to other processes by value, not by a name unknown there.
    spec = importlib.util.spec_from_file_location(f"run_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {}
    for key, value in vars(module).items():
        helper = isinstance(value, (types.ModuleType, type)) or callable(value)
        if key in FIELDS:
            values[key] = value
        elif not key.startswith("_") and not helper:
            raise ValueError(f"{path}: {unknown(key)}; a variable of your own starts with an underscore: _{key}")
    return values


def apply_override(values: dict[str, Any], arg: str) -> None:
    """One `--key=value`; `--sglang.mem_fraction_static=0.6` reaches into a dict; a bare `--flag` means true."""
    if not arg.startswith("--"):
        raise ValueError(f"argument {arg!r} not understood; write --key=value")
    key, has_value, text = arg[2:].partition("=")
    key, _, inner = key.replace("-", "_").partition(".")
    if key not in FIELDS:
        raise ValueError(unknown(key))
    value = parse_value(text) if has_value else True
    if inner:
        need(isinstance(values.get(key, {}), dict), f"{arg}: {key} is not a dict of settings; write --{key}={text}")
        value = {**values.get(key, {}), inner: value}
    elif has_value and typing.get_type_hints(Config)[key] in (str, str | None) and value is not None:
        value = text                         # a string field takes the text as it is: --run_name=7
    values[key] = value


def parse_value(text: str) -> Any:
    """'1e-6' -> float, 'true' -> bool, 'none' -> None, '[1, 2]' -> list, anything else stays a string."""
    words = {"true": True, "false": False, "none": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# What users of TRL, verl and others may type -> the name here.
ELSEWHERE = dict(learning_rate="lr", temperature="rollout_temperature", top_p="rollout_top_p", model="hf_checkpoint",
                 model_path="hf_checkpoint", num_generations="n_samples_per_prompt", train_batch_size="rollout_batch_size",
                 max_completion_length="rollout_max_response_len", max_prompt_length="rollout_max_prompt_len",
                 beta="kl_loss_coef", epsilon="eps_clip", epsilon_high="eps_clip_high", max_grad_norm="clip_grad",
                 max_steps="num_rollout", num_train_epochs="num_epoch", reward_funcs="custom_rm")


def unknown(key: str) -> str:
    if key in ELSEWHERE:
        return f"unknown setting {key!r}; here it is {ELSEWHERE[key]!r}"
    near = difflib.get_close_matches(key.replace("-", "_"), [*FIELDS, *ELSEWHERE], 1, 0.5)
    near = [ELSEWHERE.get(name, name) for name in near]
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; see configs/base.py for the list")


def check_types(values: dict[str, Any], where: str = "") -> None:
    hints = typing.get_type_hints(Config)
    for key, value in values.items():
        hint = hints[key]
        wanted = hint.__name__ if type(hint) is type else str(hint).replace("typing.", "").replace("collections.abc.", "")
        need(fits(value, hint), f"{where}{key}={value!r} is {type(value).__name__}, but {key} is {wanted}; "
             "change it in the run file or on the command line")


def fits(value: Any, hint: Any) -> bool:
    """Whether value is of a (possibly union or Literal) type. An int serves as a float; a bool does not serve as an int."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, h) for h in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is Callable:
        return callable(value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def resolve(cfg: Config) -> Config:
    """Fill in what follows from other fields or from this machine, and turn hook names into functions."""
    new = {}
    for key, hint in typing.get_type_hints(Config).items():
        value = getattr(cfg, key)
        if Callable in typing.get_args(hint) and key not in ("hf_checkpoint", "prompt_data") and isinstance(value, str):
            new[key] = import_function(key, value)
    if cfg.device == "auto":
        import torch                         # heavy, so only here
        new["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    device = new.get("device", cfg.device)
    if cfg.dtype == "auto":
        new["dtype"] = "bfloat16" if device == "cuda" else "float32"
    if cfg.rollout_num_gpus is None:
        new["rollout_num_gpus"] = cfg.actor_num_gpus if cfg.colocate else cfg.rollout_num_gpus_per_engine
    for key in ("offload_train", "offload_rollout"):
        if not (cfg.colocate and device == "cuda" and cfg.loss_type != "sft") and getattr(cfg, key) is None:
            new[key] = False                 # else memory.share_memory decides, when the GPU is seen
    if cfg.update_weight_transport == "auto":
        new["update_weight_transport"] = "tensor" if cfg.colocate else "distributed"
    if cfg.global_batch_size is None:
        new["global_batch_size"] = cfg.rollout_batch_size * samples_per_group(cfg) // max(cfg.num_steps_per_rollout, 1)
    if cfg.over_sampling_batch_size is None:
        new["over_sampling_batch_size"] = cfg.rollout_batch_size
    if cfg.max_staleness is None:
        new["max_staleness"] = 8 * cfg.partial_rollout + cfg.async_mode
    if cfg.eps_clip_high is None:
        new["eps_clip_high"] = cfg.eps_clip
    if cfg.eval_reward_key is None:
        new["eval_reward_key"] = cfg.reward_key
    if cfg.max_logprob_diff is None:
        new["max_logprob_diff"] = 1e-4 if new.get("dtype", cfg.dtype) == "float32" else 0.1
    if cfg.health_check_interval_s is None:
        new["health_check_interval_s"] = 10.0 if device == "cuda" else 60.0
    return dataclasses.replace(cfg, **new)


def samples_per_group(cfg: Config) -> int:
    """SFT trains each row once; RL samples each prompt n times."""
    return 1 if cfg.loss_type == "sft" else cfg.n_samples_per_prompt


def import_function(key: str, name: str) -> Callable:
    """'package.module.function' or 'package.module:function' -> the function."""
    module, _, function = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
        need(callable(found), f"it is a {type(found).__name__}, not a function")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}={name!r} cannot be imported ({error}); write 'package.module.function'") from error


# ---- Validation ------------------------------------------------------------------------------------------------------
def validate(cfg: Config) -> None:
    """Every rule that can be checked without starting anything. Each message ends with the remedy."""
    need(cfg.hf_checkpoint, "hf_checkpoint is not set; give a Hugging Face folder, a hub name or a run file")
    need(cfg.prompt_data, "prompt_data is not set; give a .jsonl or .parquet file, dict(reasoning_gym=...) or a function")
    need(cfg.num_rollout is not None or cfg.num_epoch is not None,
         "neither num_rollout nor num_epoch is set, so the run would have no end; set num_rollout")
    for key in ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "global_batch_size", "actor_num_gpus",
                "rollout_num_gpus_per_engine", "rollout_num_gpus", "tensor_model_parallel_size", "max_tokens_per_gpu",
                "pipeline_model_parallel_size", "log_probs_chunk_size", "rollout_max_response_len", "reward_workers",
                "sglang_server_concurrency", "update_weight_buffer_size", "n_samples_per_eval_prompt", "keep_checkpoints",
                "max_batches_asked"):
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be positive; set it to 1 or more")
    for key in [name for name in FIELDS if name.endswith("timeout_s")] + ["health_check_interval_s"]:
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be positive; every wait has a limit, in seconds")
    for key in ("save_interval", "eval_interval", "num_rollout", "num_epoch", "rollout_max_prompt_len", "fixed_loss_length"):
        value, least = getattr(cfg, key), 0 if key == "num_rollout" else 1
        need(value is None or value >= least, f"{key}={value} must be at least {least}; or leave it unset (None)")
    validate_layout(cfg)
    validate_batch(cfg)
    validate_algorithm(cfg)
    validate_eval(cfg)
    validate_passthrough(cfg)


class InputError(ValueError):
    """What was given cannot be used, found before anything was started; the message ends with the remedy."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def validate_layout(cfg: Config) -> None:
    tp, pp, world = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.actor_num_gpus
    need(world % (tp * pp) == 0,
         f"actor_num_gpus {world} is not a multiple of tp {tp} * pp {pp}; "
         f"set actor_num_gpus={tp * pp * max(world // (tp * pp), 1)}")
    need(not cfg.sequence_parallel or tp > 1, "sequence_parallel needs tensor parallelism; set tensor_model_parallel_size=2")
    engines, per_engine = cfg.rollout_num_gpus, cfg.rollout_num_gpus_per_engine
    need(engines % per_engine == 0, f"rollout_num_gpus {engines} is not a multiple of rollout_num_gpus_per_engine "
         f"{per_engine}; set rollout_num_gpus={per_engine * max(engines // per_engine, 1)}")
    need(cfg.device != "cpu" or per_engine == 1, "SGLang runs an engine on one CPU process only; "
         "set rollout_num_gpus_per_engine=1 and more engines through rollout_num_gpus")
    need(not cfg.colocate or cfg.device == "cpu" or cfg.loss_type == "sft" or engines == world,
         f"colocated, both sides share the same GPUs; set rollout_num_gpus={world} like actor_num_gpus, or remove it")
    need(cfg.colocate or not (cfg.offload_train or cfg.offload_rollout),
         "offload_train and offload_rollout are for GPUs that both sides share; set colocate=True or remove them")
    need(cfg.update_weight_transport != "tensor" or cfg.colocate,
         "update_weight_transport='tensor' hands memory over inside one machine; set colocate=True or use 'distributed'")
    need(cfg.update_weight_transport != "distributed" or not cfg.colocate or cfg.device == "cpu",
         "NCCL cannot join two processes of one GPU; colocated runs use update_weight_transport='tensor' (or 'disk')")


def validate_batch(cfg: Config) -> None:
    need(not cfg.async_mode or not cfg.colocate, "async_mode trains and generates at the same time, and colocated sides take "
         "turns; set colocate=False and give the engines GPUs of their own (rollout_num_gpus)")
    need(not cfg.async_mode or cfg.loss_type != "sft", "async_mode has nothing to generate with loss_type='sft'; remove it")
    need(cfg.max_staleness >= cfg.async_mode, "with async_mode samples are one weight update old; set max_staleness=1")
    per_rollout, steps, gbs = cfg.rollout_batch_size * samples_per_group(cfg), cfg.num_steps_per_rollout, cfg.global_batch_size
    need(gbs * steps == per_rollout, f"global_batch_size {gbs} * num_steps_per_rollout {steps} != rollout_batch_size "
         f"{cfg.rollout_batch_size} * n {samples_per_group(cfg)} = {per_rollout}; set global_batch_size={per_rollout // steps}"
         + ("" if per_rollout % steps == 0 else " and a num_steps_per_rollout that divides it"))
    dp = cfg.actor_num_gpus // (cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size)
    need(gbs >= dp, f"global_batch_size {gbs} leaves some of the {dp} data-parallel ranks without a sample; "
         f"set it to at least {dp}")
    need(cfg.over_sampling_batch_size >= cfg.rollout_batch_size, f"over_sampling_batch_size {cfg.over_sampling_batch_size} "
         f"is below rollout_batch_size; set it to at least {cfg.rollout_batch_size}")
    need(cfg.rollout_temperature > 0 or cfg.loss_type == "sft", "rollout_temperature must be > 0: temperature 0 is greedy "
         "decoding, which is no policy to take gradients of; set rollout_temperature=1.0 (eval_temperature may be 0)")
    need(0 < cfg.rollout_top_p <= 1, f"rollout_top_p={cfg.rollout_top_p} must be in (0, 1]; set rollout_top_p=1.0")
    if cfg.rollout_max_context_len and cfg.rollout_max_prompt_len:
        need(cfg.rollout_max_prompt_len < cfg.rollout_max_context_len, "rollout_max_prompt_len leaves no room for a response; "
             f"set it to at most rollout_max_context_len - 1 = {cfg.rollout_max_context_len - 1}")
    need(not cfg.mask_offpolicy_in_partial_rollout or cfg.partial_rollout,
         "mask_offpolicy_in_partial_rollout has no effect without partial_rollout; set partial_rollout=True")


def validate_algorithm(cfg: Config) -> None:
    if cfg.loss_type == "sft":
        return
    need(cfg.rm_type or cfg.custom_rm or has_row_rewards(cfg),
         "no reward is set; set rm_type to a grader of rewards.py or custom_rm to a function (args, sample) -> float")
    need(cfg.rm_type != "remote_rm" or cfg.rm_url,
         "rm_type='remote_rm' asks a server for the reward; set rm_url='http://...'")
    need(not cfg.group_rm or cfg.custom_rm, "group_rm hands whole groups to custom_rm; set custom_rm to a function "
         "(args, samples) -> list of rewards")
    need(cfg.rm_type not in ("dapo", "boxed_dapo") or cfg.custom_rm or cfg.reward_key,
         f"rm_type={cfg.rm_type!r} gives a dict (score, acc, pred); set reward_key='score' to train on its +1 or -1")
    need(not cfg.rewards_normalization or cfg.n_samples_per_prompt > 1,
         f"advantage_estimator={cfg.advantage_estimator!r} compares the samples of one prompt, and a group of 1 always has "
         "advantage 0; set n_samples_per_prompt=2 or more")
    need(not (cfg.kl_coef and cfg.kl_loss_coef), "only one of kl_coef (KL in the reward) and kl_loss_coef (KL in the loss) "
         "can be set; set kl_coef=0")
    need(not cfg.kl_loss_coef or cfg.use_kl_loss, "kl_loss_coef has no effect without use_kl_loss; set use_kl_loss=True")
    need(not cfg.use_kl_loss or cfg.kl_loss_coef, "use_kl_loss with kl_loss_coef=0 would load and run a reference for "
         "nothing; set kl_loss_coef=0.001 or use_kl_loss=False")
    need(not cfg.ref_load or cfg.use_kl_loss or cfg.kl_coef,
         "ref_load is set but nothing reads the reference; set use_kl_loss=True")
    need(0 < cfg.eps_clip < 1, f"eps_clip={cfg.eps_clip} must be in (0, 1); set eps_clip=0.2")
    need(cfg.eps_clip_c is None or cfg.eps_clip_c > 1, f"eps_clip_c={cfg.eps_clip_c}: dual clip needs a bound above 1; "
         "set eps_clip_c=3.0 or leave it unset")
    need(not (cfg.calculate_per_token_loss and cfg.fixed_loss_length),
         "calculate_per_token_loss and fixed_loss_length are two different denominators; set one of them")


def has_row_rewards(cfg: Config) -> bool:
    """reasoning-gym tasks bring their own verifier. A row of a file may name one too, but not every row has to: those
    need rm_type all the same, as the default."""
    return isinstance(cfg.prompt_data, dict)


def validate_eval(cfg: Config) -> None:
    need(not cfg.eval_prompt_data or cfg.loss_type != "sft", "loss_type='sft' starts no engine, so nothing can be evaluated; "
         "remove eval_prompt_data, and evaluate in the run that comes after it")
    need(cfg.eval_interval is None or cfg.eval_prompt_data, "eval_interval is set but there is nothing to evaluate on; "
         "set eval_prompt_data = dict(name='file.jsonl')")
    allowed = eval_fields()
    for name in cfg.eval_prompt_data:
        where, own = f"eval_prompt_data[{name!r}]", eval_settings(cfg, name)
        for key in own.keys() - allowed:
            near = difflib.get_close_matches(key, allowed, 1, 0.4)
            raise ValueError(f"{where}: unknown setting {key!r}; "
                             + (f"did you mean {near[0]!r}?" if near else f"use one of {sorted(allowed)}"))
        need(own.get("prompt_data"), f"{where} has no prompt_data of its own; add prompt_data='file.jsonl'")
        check_types(own, f"{where}: ")
        eval_config(cfg, name)               # imports its hooks


def eval_fields() -> set[str]:
    """The settings that a held-out set may have of its own."""
    return {"prompt_data", "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_max_response_len",
            "rm_type", "custom_rm", "input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template",
            "apply_chat_template_kwargs", "rollout_max_prompt_len", "eval_reward_key", "custom_generate_function"}


def eval_config(cfg: Config, name: str) -> Config:
    """The Config under which one held-out set is evaluated: its own settings over the run's."""
    return resolve(dataclasses.replace(cfg, rollout_shuffle=False, **eval_settings(cfg, name)))


def eval_settings(cfg: Config, name: str) -> dict[str, Any]:
    data = cfg.eval_prompt_data[name]
    return data if isinstance(data, dict) and "reasoning_gym" not in data else {"prompt_data": data}


def validate_passthrough(cfg: Config) -> None:
    """`megatron` and `sglang` name fields of the packages' own dataclasses; what nanoslime sets itself is refused there."""
    if cfg.megatron:
        from megatron.core.distributed import DistributedDataParallelConfig   # 5 s to import, so only when asked
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import TransformerConfig
        check_passthrough("megatron", cfg.megatron, (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig),
                          {"tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "lr", "min_lr",
                           "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "use_distributed_optimizer",
                           "params_dtype", "bf16", "calculate_per_token_loss"})
    if cfg.sglang:
        from sglang.srt.server_args import ServerArgs
        check_passthrough("sglang", cfg.sglang, (ServerArgs,), {
            "model_path", "host", "port", "tp_size", "dtype", "random_seed", "device", "base_gpu_id", "dist_init_addr",
            "nnodes", "node_rank"})


def check_passthrough(name: str, given: dict, classes: tuple, ours: set[str]) -> None:
    fields = {f.name: f for cls in classes for f in dataclasses.fields(cls)}
    for key, value in given.items():
        need(key not in ours, f"{name}[{key!r}] is set by nanoslime from its own settings; "
             f"remove it there and use the field of configs/base.py")
        near = difflib.get_close_matches(key, fields, 1, 0.5)
        need(key in fields, f"{name}[{key!r}] is not a field of {' or '.join(c.__name__ for c in classes)}"
             + (f"; did you mean {near[0]!r}?" if near else f"; see {classes[0].__module__}"))
        default = fields[key].default
        # Their annotations are too loose to check by; the default's own type says what is meant.
        if type(default) in (bool, int, float, str) and value is not None:
            fitting = fits(value, type(default)) or (type(default) is int and isinstance(value, float))
            need(fitting, f"{name}[{key!r}]={value!r} is {type(value).__name__}, but its default is {default!r}; "
                 f"give a {type(default).__name__}")


# ---- Showing and saving ------------------------------------------------------------------------------------------------
def to_dict(cfg: Config) -> dict[str, Any]:
    """JSON-able; a function becomes 'module.name'."""
    def plain(value):
        if callable(value):
            return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
    return {key: plain(getattr(cfg, key)) for key in FIELDS}


def save(cfg: Config, path: pathlib.Path) -> None:
    path.write_text(json.dumps(to_dict(cfg), indent=1, default=str) + "\n")
