"""
configs/base.py: what can be set? One dataclass, one comment per field; load, override, resolve.

    configs/run.py (flat assignments, hooks as functions) --load--> Config (read-only) --> every other file
    --key=value on the command line ----------------------^

Run:   python train.py configs/demo_cpu.py --lr=2e-4 --n_samples_per_prompt=16 [--dry-run]
Test:  pytest tests/test_base.py
Knows nothing about: what the values do. Each file reads its own fields; nobody writes to a Config. What cannot be combined is
in configs/validate.py.
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

    # ---- debugging: one side alone (debug.py) --------------------------------------------------------------------------
    save_debug_rollout_data: str | None = None   # a file of each step's samples, "dumps/{rollout_id}.pt"; in the run folder
    load_debug_rollout_data: str | None = None   # train on such files instead of generating: no engines, no evaluation
    debug_train_only: bool = False           # follows from it
    debug_rollout_only: bool = False         # engines, rewards, evaluation; no trainers: hf_checkpoint's weights throughout

    # ---- machines --------------------------------------------------------------------------------------------------
    device: Literal["auto", "cpu", "cuda"] = "auto"   # auto: cuda where there is a GPU
    ray_address: str | None = None           # an existing Ray cluster ("auto" or ip:port); None: start one here
    actor_num_gpus: int = 1                  # trainer ranks; = tp * pp * cp * dp
    rollout_num_gpus: int | None = None      # for all engines together; None: as many as the trainers when colocated
    rollout_num_gpus_per_engine: int = 1     # tensor-parallel size of one SGLang engine
    colocate: bool = False                   # engines and trainers share the same GPUs, in turns
    offload_train: bool | None = None        # colocated: trainers leave the GPU during generation; None: if they must
    offload_rollout: bool | None = None      # colocated: engines leave the GPU during training;    None: if they must
    gpu_type: str = "H200"                   # for --dry-run alone, which says whether it fits: A100, H100, H20, H200, B200
    start_timeout_s: float = 600.0           # for Ray, every engine and every trainer to be up
    train_timeout_s: float = 1800.0          # for one pass of the trainers, and for one collective inside it

    # ---- the model and how it is split ---------------------------------------------------------------------------
    tensor_model_parallel_size: int = 1      # each matrix over this many ranks
    pipeline_model_parallel_size: int = 1    # the layers over this many stages
    virtual_pipeline_model_parallel_size: int | None = None  # each stage holds so many separate runs of layers (2104.04473)
    context_parallel_size: int = 1           # each sequence over this many ranks, in a zigzag (Ring Attention 2310.01889)
    expert_model_parallel_size: int = 1      # the experts of each layer over this many of the tp * cp * dp ranks
    expert_tensor_parallel_size: int = 1     # each expert's matrices over this many of them
    sequence_parallel: bool = False          # with TP: norms and residuals split along the tokens (Megatron-LM 2205.05198)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on a GPU (fp32 main weights), float32 on CPU
    max_tokens_per_gpu: int = 4096           # packed tokens of one micro-batch; one longer sample still gets its own
    log_probs_chunk_size: int = 2048         # tokens whose logits exist at one time
    use_routing_replay: bool = False         # experts that the old log-probs' pass chose are used in training too (R2)
    use_rollout_routing_replay: bool = False # those that the engine chose, in every pass of the policy (R3, 2510.11370)
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
    fully_async: bool = False                # generate all the time; a sync interrupts answers, which go on with new weights
    max_staleness: int | None = None         # weight updates that a trained token may be behind; None: 0, async_mode 1,
    #                                          fully_async 2, partial_rollout 8 more
    partial_rollout: bool = False            # keep what aborted samples have; go on with them in the next step
    mask_offpolicy_in_partial_rollout: bool = False  # and train only the tokens of the current weights
    buffer_filter: Callable | str | None = None      # (args, rollout_id, buffer, num_samples) -> groups to take first
    custom_generate_function: Callable | str | None = None  # async (args, sample, sampling_params) -> Sample | list
    tools: list = field(default_factory=list)        # functions that the model may call, turn by turn; typed, with docstrings
    tool_call_parser: str | None = None      # SGLang's name for how the model writes calls: qwen25, llama3, glm45, ...
    tool_timeout_s: float = 30.0             # for one call
    max_turns: int = 8                       # of the model, in one sample
    rollout_sample_filter: Callable | str | None = None      # (args, groups) -> None; sets remove_sample
    rollout_function: Callable | str | None = None   # in the place of all of this: (args, rollout_id, data_source, evaluation)
    data_source: Callable | str | None = None        # class (args) with get_samples, add_samples, ...; prompt_data is not read
    custom_convert_samples_to_train_data: Callable | str | None = None   # (args, samples) -> dict of lists; hooks.py has all
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_max_response_len: int = 1024     # new tokens
    rollout_stop: str | list | None = None
    rollout_stop_token_ids: list | None = None
    rollout_skip_special_tokens: bool = False
    sglang_server_concurrency: int = 512     # requests in flight per engine
    request_timeout_s: float = 1800.0        # for one generate request
    generate_timeout_s: float = 7200.0       # for one sample of custom_generate_function or tools; one rollout_function
    request_retries: int = 3                 # after an engine died under it
    max_engine_restarts: int = 3             # in a whole run; then the run says why and ends
    health_check_interval_s: float | None = None     # an engine silent for three of these is restarted; None: 10, a CPU 60
    inject_faults: dict = field(default_factory=dict)    # whom faults.py kills, and at which step or steps, to watch the run
    #                                          recover: dict(engine_0=3, router=[5, 9], reward_worker=7, hang_engine_1=8)
    rollout_quantization: Literal["fp8"] | None = None   # engines hold fp8 weights in blocks of 128 x 128; trainers do not
    sglang: dict = field(default_factory=dict)  # any field of SGLang's ServerArgs

    # ---- rewards ---------------------------------------------------------------------------------------------------
    rm_type: str | None = None               # a built-in grader of graders.py; a row's metadata["rm_type"] goes first
    custom_rm: Callable | str | None = None  # [async] (args, sample) -> float | dict; with group_rm: (args, samples) -> list
    group_rm: bool = False
    rm_url: str | None = None                # for rm_type="remote_rm"
    custom_reward_post_process: Callable | str | None = None # (args, samples) -> (raw_rewards, rewards): your own comparison
    reward_key: str | None = None            # which entry of a dict reward is trained on
    eval_reward_key: str | None = None       # which one is evaluated; None: reward_key
    reward_timeout_s: float = 30.0           # for one sample's score
    reward_workers: int = 2                  # processes that run `def` rewards and tools; time in their queue is not limited
    code_timeout_s: float = 10.0             # rm_type="code": for one run of a program; all of a sample's
    #                                          together may take 0.8 reward_timeout_s
    code_memory_mb: int = 1024               # address space of such a program
    on_reward_error: Literal["raise", "skip"] = "raise"  # skip: the sample counts as failed, its group is left out

    # ---- evaluation ------------------------------------------------------------------------------------------------
    eval_prompt_data: dict = field(default_factory=dict)  # name -> path, or dict(prompt_data=..., any others of eval_fields())
    eval_interval: int | None = None         # steps; also before the first and after the last step
    skip_eval_before_train: bool = False
    n_samples_per_eval_prompt: int = 1
    eval_temperature: float | None = None    # None: rollout_temperature; 0: greedy
    eval_top_p: float | None = None
    eval_max_response_len: int | None = None
    eval_function: Callable | str | None = None      # in the place of all of this: (args, rollout_id, data_source, evaluation)
    log_passrate: bool = False               # also pass@k, k = 1, 2, 4, ... n (Codex 2107.03374, unbiased)

    # ---- the algorithm ---------------------------------------------------------------------------------------------
    loss_type: Literal["policy", "sft", "custom_loss"] = "policy"  # sft: rows' own answers are the responses, no engine
    custom_loss_function: Callable | str | None = None       # for custom_loss: (args, LossInput) -> loss [R], metrics
    advantage_estimator: str = "grpo"        # a name in algos.ADVANTAGES
    custom_advantage_function: Callable | str | None = None  # (args, data) sets data["advantages"], in the estimator's place;
    #                                          data: the samples of one data-parallel rank, which may have part of a group only
    #                                          (data["rewards"] is compared within whole groups already)
    normalize_advantages: bool | None = None # whiten over all trained tokens of a rollout; None: as the estimator's paper
    gamma: float = 1.0                       # discount, for ppo and reinforce_plus_plus
    lambd: float = 1.0                       # GAE's lambda, for ppo (1506.02438)
    true_on_policy_mode: bool = False        # one optimizer step a rollout, no stale token, plain sampling, or it is refused;
    #                                          fp32 logits on both sides, a tight max_logprob_diff asserted at every step
    num_steps_per_rollout: int = 1           # optimizer steps on one rollout
    global_batch_size: int | None = None     # samples of one optimizer step; None: P * n / num_steps_per_rollout
    rewards_normalization: bool = True       # subtract the group's mean
    grpo_std_normalization: bool = True      # divide by the group's std; False: Dr.GRPO (2503.20783)
    overlong_filtering: bool = False         # DAPO: truncated samples count in their group, but are not trained
    overlong_buffer_len: int | None = None   # DAPO: tokens below rollout_max_response_len from which the reward goes down...
    overlong_penalty_factor: float = 1.0     # ...by this much at the limit
    eps_clip: float = 0.2
    eps_clip_high: float | None = None       # DAPO's clip-higher (2503.14476); None: eps_clip
    eps_clip_c: float | None = None          # dual clip (1912.09729): > 1; None: off
    use_kl_loss: bool = False                # a KL(policy || reference) term in the loss
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    use_unbiased_kl: bool = False            # that KL times the importance ratio (DeepSeek-V3.2 2512.02556)
    kl_coef: float = 0.0                     # KL in the reward; refused by estimators that cannot use it
    entropy_coef: float = 0.0
    use_rollout_logprobs: bool = False       # the engine's log-probs are the old policy's
    use_tis: bool = False                    # importance weights trainer / engine; their four settings: algos.mismatch_weight
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    tis_mode: Literal["truncate", "mask"] = "truncate"       # mask by token: IcePop; by sequence: MIS
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_opsm: bool = False                   # leave out bad samples that are far off policy (DeepSeek-V3.2 2512.02556)
    opsm_delta: float = 1e-4                 # mean log-ratio from which a sample is far
    calculate_per_token_loss: bool = False   # mean over all tokens of the step; False: mean of each sample's mean
    fixed_loss_length: int | None = None     # Dr.GRPO: each sample's sum divided by this constant (max response length)
    critic: dict = field(default_factory=dict)  # ppo: what the critic sets otherwise, dict(lr=1e-5, ...); see critic_config
    critic_num_gpus: int | None = None       # its own GPUs; None: it shares the actor's
    num_critic_only_steps: int = 0           # rollouts from which only the critic learns, at first
    value_clip: float = 0.2                  # how far a value may move in one rollout before its loss stops counting
    use_opd: bool = False                    # on-policy distillation: a teacher's log-probs go into the advantages
    opd_kl_coef: float = 1.0
    opd_teacher_load: str | None = None      # the teacher: a Hugging Face folder of the model's own shape, in the trainers...
    opd_teacher_url: str | None = None       # ...or any model with its tokenizer behind this SGLang server
    sft_data: str | dict | Callable = ""     # rows with answers, as prompt_data with loss_type="sft", beside the samples
    sft_batch_size: int = 0                  # so many of them in each rollout step
    sft_loss_coef: float = 1.0               # times their mean negative log-likelihood

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
    from configs.validate import validate    # it imports this file
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
                 max_steps="num_rollout", num_train_epochs="num_epoch", reward_funcs="custom_rm",
                 adv_estimator="advantage_estimator", gae_lambda="lambd", lam="lambd", use_kl_in_reward="kl_coef",
                 mask_truncated_completions="overlong_filtering", critic_lr="critic.lr", cliprange_value="value_clip",
                 critic_load="critic.hf_checkpoint", critic_lr_warmup_iters="critic.lr_warmup_iters",
                 ppo_epochs="num_steps_per_rollout", num_iterations="num_steps_per_rollout", clip_ratio="eps_clip",
                 clip_ratio_low="eps_clip", clip_ratio_high="eps_clip_high", kl_penalty="kl_loss_type",
                 scale_rewards="grpo_std_normalization", importance_sampling_level="advantage_estimator",
                 loss_agg_mode="calculate_per_token_loss", vllm_importance_sampling_cap="tis_clip",
                 opd_type="opd_teacher_load (or opd_teacher_url)", staleness_threshold="max_staleness",
                 max_async_level="max_staleness", max_head_offpolicyness="max_staleness",
                 max_tool_calling_iterations="max_turns", max_assistant_turns="max_turns", environment_factory="tools",
                 prefill_num_servers="rollout_num_gpus (every engine prefills and decodes)",
                 multimodal_keys="input_key (of text: the trainers take no images)", custom_rm_path="custom_rm")


def unknown(key: str) -> str:
    if key in ELSEWHERE:
        return f"unknown setting {key!r}; here it is {ELSEWHERE[key]!r}"
    if key.removesuffix("_path") in FIELDS:
        return f"unknown setting {key!r}; here it is {key.removesuffix('_path')!r}: a function, or its name"
    near = difflib.get_close_matches(key.replace("-", "_"), [*FIELDS, *ELSEWHERE], 1, 0.5)
    near = [ELSEWHERE.get(name, name) for name in near]
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; see configs/base.py for the list")


def check_types(values: dict[str, Any], where: str = "") -> None:
    hints = typing.get_type_hints(Config)
    for key, value in values.items():
        hint = hints[key]
        wanted = hint.__name__ if type(hint) is type else str(hint).replace("typing.", "").replace("collections.abc.", "")
        need(fits(value, hint), f"{where}{key}={value!r} is {type(value).__name__}, but {key} is {wanted}; "
             "change it in the run file or on the command line" + (' (there: {"key": 1})' if hint is dict else ""))


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
        is_hook = Callable in typing.get_args(hint) and key not in ("hf_checkpoint", "prompt_data", "sft_data")
        if is_hook and isinstance(value, str):
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
        new["max_staleness"] = 8 * cfg.partial_rollout + cfg.async_mode + 2 * cfg.fully_async
    if cfg.eps_clip_high is None:
        new["eps_clip_high"] = cfg.eps_clip
    if cfg.eval_reward_key is None:
        new["eval_reward_key"] = cfg.reward_key
    if cfg.max_logprob_diff is None:         # what is healthy is in README's table of metrics
        wide = new.get("dtype", cfg.dtype) == "float32"
        new["max_logprob_diff"] = (1e-5 if wide else 0.05) if cfg.true_on_policy_mode else 1e-4 if wide else 0.1
    if cfg.true_on_policy_mode and device == "cuda":         # logits in fp32 on both sides: bf16 rounds one of 20 by 0.06
        new["sglang"] = {"enable_fp32_lm_head": True} | cfg.sglang
    if cfg.use_rollout_routing_replay:
        own = {"enable_return_routed_experts": True}
        if device == "cuda":                 # NOTE: on Blackwell SGLang may pick kernels that choose experts inside, unseen
            own["moe_runner_backend"] = "triton"
        new["sglang"] = own | new.get("sglang", cfg.sglang)
    if cfg.health_check_interval_s is None:
        new["health_check_interval_s"] = 10.0 if device == "cuda" else 60.0
    train_only = cfg.debug_train_only or cfg.load_debug_rollout_data is not None
    if train_only or cfg.debug_rollout_only:     # one side alone: nothing to share, to send, or to do at the same time
        new |= dict(debug_train_only=train_only, colocate=False, offload_train=False, offload_rollout=False, async_mode=False,
                    fully_async=False, update_weight_transport="distributed")
    if train_only:
        new |= dict(eval_prompt_data={}, eval_interval=None, eval_function=None)
    if cfg.debug_rollout_only:               # else SGLang calls it "default", until a sync
        new["sglang"] = {"weight_version": "0"} | new.get("sglang", cfg.sglang)
    return dataclasses.replace(cfg, **new)


def dp_size(cfg: Config) -> int:
    """Data-parallel ranks: each has samples of its own."""
    tp, pp, cp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.context_parallel_size
    return cfg.actor_num_gpus // (tp * pp * cp)


def has_engines(cfg: Config) -> bool:
    return cfg.loss_type != "sft" and not cfg.debug_train_only


def has_eval(cfg: Config) -> bool:
    return bool(cfg.eval_prompt_data or cfg.eval_function)


def samples_per_group(cfg: Config) -> int:
    """SFT trains each row once; RL samples each prompt n times."""
    return 1 if cfg.loss_type == "sft" else cfg.n_samples_per_prompt


def eval_config(cfg: Config, name: str) -> Config:
    """The Config under which one held-out set is evaluated: its own settings over the run's."""
    return resolve(dataclasses.replace(cfg, rollout_shuffle=False, sft_data="", sft_batch_size=0, **eval_settings(cfg, name)))


def eval_settings(cfg: Config, name: str) -> dict[str, Any]:
    data = cfg.eval_prompt_data[name]
    return data if isinstance(data, dict) and "reasoning_gym" not in data else {"prompt_data": data}


# What the critic may set otherwise than the actor. hf_checkpoint: a model with a scalar head of its own, or a policy.
CRITIC_FIELDS = {"hf_checkpoint", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "weight_decay",
                 "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "max_tokens_per_gpu", "megatron"}


def critic_config(cfg: Config) -> Config:
    """The Config under which the critic runs."""
    own = cfg.critic | {"megatron": cfg.megatron | cfg.critic.get("megatron", {})}
    return dataclasses.replace(cfg, actor_num_gpus=cfg.critic_num_gpus or cfg.actor_num_gpus, **own)


def has_stage(cfg: Config) -> bool:
    """Whether the model is the result of another run file, which goes first."""
    return isinstance(cfg.hf_checkpoint, str) and cfg.hf_checkpoint.endswith(".py")


def import_function(key: str, name: str) -> Callable:
    """'package.module.function' or 'package.module:function' -> the function."""
    module, _, function = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
        need(callable(found), f"it is a {type(found).__name__}, not a function")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}={name!r} cannot be imported ({error}); write 'package.module.function'") from error


# ---- Errors ----------------------------------------------------------------------------------------------------------
class InputError(ValueError):
    """What was given cannot be used, found before anything was started; the message ends with the remedy."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


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


def describe(cfg: Config) -> str:
    """The resolved config and the placement, for people."""
    defaults = Config()
    values = to_dict(cfg)
    lines = ["config (* differs from the default)"]
    lines += [f"  {'*' if getattr(cfg, k) != getattr(defaults, k) else ' '} {k} = {v!r}" for k, v in values.items()]
    tp, pp, cp, dp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.context_parallel_size, dp_size(cfg)
    ep, etp = cfg.expert_model_parallel_size, cfg.expert_tensor_parallel_size
    unit = "GPU" if cfg.device == "cuda" else "CPU process"
    width = cfg.rollout_num_gpus_per_engine
    engines = cfg.rollout_num_gpus // width if has_engines(cfg) else 0
    ranks, critics = (0, 0) if cfg.debug_rollout_only else (cfg.actor_num_gpus, cfg.critic_num_gpus or 0)
    where = f", {engines} engine(s) of tp {width}, {'sharing them' if cfg.colocate else 'apart'}" if engines else ""
    experts = f" (experts over ep {ep} x etp {etp})" if ep * etp > 1 else ""
    lines.append(f"placement: {ranks} trainer rank(s) = tp {tp} x cp {cp} x dp {dp} x pp {pp}{experts}{where}")
    both = " and critic" if cfg.critic and not cfg.critic_num_gpus else ""
    for rank in range(0, ranks, tp):                # a line for each tensor-parallel group
        many = f"-{rank + tp - 1}" if tp > 1 else ""
        place = f"(cp {rank // tp % cp}, dp {rank // (tp * cp) % dp}, pp {rank // (tp * cp * dp)})"
        lines.append(f"  {unit} {rank}{many}: trainer{both} rank {rank}{many} {place}")
    for rank in range(critics):
        lines.append(f"  {unit} {ranks + rank}: critic rank {rank}")
    for engine in range(engines):
        at = engine * width + (0 if cfg.colocate else ranks + critics)
        lines.append(f"  {unit} {at}{f'-{at + width - 1}' if width > 1 else ''}: engine {engine}")
    if has_stage(cfg):
        lines.append(f"first: {cfg.hf_checkpoint}, whose result is the model")
    lines.append(f"each step: {cfg.rollout_batch_size} prompts x {samples_per_group(cfg)} samples = "
                 f"{cfg.num_steps_per_rollout} optimizer step(s) of {cfg.global_batch_size} samples; "
                 f"weights travel by {cfg.update_weight_transport}")
    return "\n".join(lines)


def save(cfg: Config, path: pathlib.Path) -> None:
    path.write_text(json.dumps(to_dict(cfg), indent=1, default=str) + "\n")
