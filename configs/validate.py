"""
configs/validate.py: can these settings work together? Every rule that can be checked without starting anything.

    Config --validate--> nothing, or a ValueError whose message ends with the remedy

Test:  pytest tests/test_base.py
Knows nothing about: models and data (train.start reads those before anything heavy starts), estimators (algos.check).
"""
import dataclasses
import difflib
import inspect
import math
import re
import warnings

from configs.base import (CRITIC_FIELDS, FIELDS, Config, check_types, dp_size, eval_config, eval_settings, fits, has_eval,
                          need, samples_per_group)


def validate(cfg: Config) -> None:
    """Every rule that can be checked without starting anything. Each message ends with the remedy."""
    need(cfg.hf_checkpoint, "hf_checkpoint is not set; give a Hugging Face folder, a hub name or a run file")
    need(cfg.prompt_data or cfg.data_source, "prompt_data is not set; give a .jsonl or .parquet file, dict(reasoning_gym=...) "
         "or a function, or a class of your own as data_source")
    need(not (cfg.prompt_data and cfg.data_source), "data_source takes prompt_data's place; remove one of the two")
    need(cfg.num_rollout is not None or not cfg.data_source, "how long is an epoch of data_source? set num_rollout")
    need(cfg.num_rollout is not None or cfg.num_epoch is not None,
         "neither num_rollout nor num_epoch is set, so the run would have no end; set num_rollout")
    for key in ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "global_batch_size", "actor_num_gpus",
                "rollout_num_gpus_per_engine", "rollout_num_gpus", "tensor_model_parallel_size", "max_tokens_per_gpu",
                "pipeline_model_parallel_size", "log_probs_chunk_size", "rollout_max_response_len", "reward_workers",
                "sglang_server_concurrency", "update_weight_buffer_size", "n_samples_per_eval_prompt", "keep_checkpoints",
                "max_batches_asked", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"):
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be positive; set it to 1 or more")
    for key in [name for name in FIELDS if name.endswith("timeout_s")] + ["health_check_interval_s"]:
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be positive; every wait has a limit, in seconds")
    for key in ("save_interval", "eval_interval", "num_rollout", "num_epoch", "rollout_max_prompt_len", "fixed_loss_length"):
        value, least = getattr(cfg, key), 0 if key == "num_rollout" else 1
        need(value is None or value >= least, f"{key}={value} must be at least {least}; or leave it unset (None)")
    validate_debug(cfg)
    validate_layout(cfg)
    validate_batch(cfg)
    validate_generation(cfg)
    validate_algorithm(cfg)
    validate_eval(cfg)
    validate_passthrough(cfg)


def validate_debug(cfg: Config) -> None:
    need(not (cfg.debug_rollout_only and cfg.debug_train_only), "debug_rollout_only starts no trainers, debug_train_only (or "
         "load_debug_rollout_data) no engines, so nothing is left to run; remove one of them")
    need(not cfg.debug_train_only or cfg.load_debug_rollout_data, "debug_train_only has nothing to train on; set "
         "load_debug_rollout_data to what a run with save_debug_rollout_data wrote, 'outputs/.../dumps/{rollout_id}.pt'")
    need(not (cfg.save_debug_rollout_data and cfg.debug_train_only), "save_debug_rollout_data would write again what "
         "load_debug_rollout_data reads; remove it")
    for key in ("save_debug_rollout_data", "load_debug_rollout_data"):
        path = getattr(cfg, key)
        need(path is None or "{rollout_id}" in path, f"{key}={path!r} names the same file in every step; put {{rollout_id}} "
             "into it: 'dumps/{rollout_id}.pt'")
    need(not cfg.debug_rollout_only or cfg.loss_type != "sft", "loss_type='sft' starts no engines and debug_rollout_only no "
         "trainers; remove debug_rollout_only")
    need(not (cfg.debug_rollout_only and cfg.resume), "debug_rollout_only has nobody to load a checkpoint; remove resume, and "
         "give the run's Hugging Face folder: --hf_checkpoint=outputs/.../hf/iter_...")


def validate_layout(cfg: Config) -> None:
    tp, pp, cp, world = (cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.context_parallel_size,
                         cfg.actor_num_gpus)
    need(world % (tp * pp * cp) == 0, f"actor_num_gpus {world} is not a multiple of tp {tp} * pp {pp} * cp {cp}; "
         f"set actor_num_gpus={tp * pp * cp * max(world // (tp * pp * cp), 1)}, or other sizes (tp: a divisor of the model's "
         "key and value heads)")
    ep, etp, ranks = cfg.expert_model_parallel_size, cfg.expert_tensor_parallel_size, world // pp
    need(ranks % (ep * etp) == 0, f"the {ranks} ranks of a pipeline stage (tp * cp * dp) are not a multiple of ep {ep} * etp "
         f"{etp}; set expert_model_parallel_size="
         f"{max(n for n in range(1, ep + 1) if ranks // math.gcd(ranks, etp) % n == 0)}"
         + ("" if ranks % etp == 0 else " and expert_tensor_parallel_size=1"))
    need(ep * etp == 1 or tp == 1 or cfg.sequence_parallel, "experts with tensor parallelism need sequence_parallel, or each "
         "token would be sent tp times; set sequence_parallel=True")
    runs = cfg.virtual_pipeline_model_parallel_size
    need(runs is None or (runs > 1 and pp > 1), f"virtual_pipeline_model_parallel_size={runs} cuts each of several pipeline "
         "stages into several runs of layers; set it and pipeline_model_parallel_size to 2 or more, or remove it")
    need(not cfg.sequence_parallel or tp > 1, "sequence_parallel needs tensor parallelism; set tensor_model_parallel_size=2")
    engines, per_engine = cfg.rollout_num_gpus, cfg.rollout_num_gpus_per_engine
    need(engines % per_engine == 0, f"rollout_num_gpus {engines} is not a multiple of rollout_num_gpus_per_engine "
         f"{per_engine}; set " + ("rollout_num_gpus_per_engine to a divisor of it" if cfg.colocate else
                                  f"rollout_num_gpus={per_engine * max(engines // per_engine, 1)}"))
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
    if cfg.rollout_quantization:
        need(cfg.device != "cpu", "rollout_quantization='fp8' needs a GPU (Hopper or newer): SGLang computes no fp8 on a CPU; "
             "remove it")
        need(cfg.dtype != "float32", "rollout_quantization='fp8': SGLang's other tensors are bf16; set dtype='bfloat16'")
        need(not cfg.true_on_policy_mode, "true_on_policy_mode asks for one policy, and engines in fp8 are another; set "
             "rollout_quantization=None")
        need(cfg.loss_type != "sft", "rollout_quantization has no effect with loss_type='sft', which starts no engine; "
             "remove it")
        for key in ("quantization", "load_format"):
            need(key not in cfg.sglang, f"sglang[{key!r}] beside rollout_quantization='fp8' would make other parameters than "
                 "the weight sync fills; remove it")


def validate_batch(cfg: Config) -> None:
    need(not cfg.async_mode or not cfg.colocate, "async_mode trains and generates at the same time, and colocated sides take "
         "turns; set colocate=False and give the engines GPUs of their own (rollout_num_gpus)")
    need(not cfg.async_mode or cfg.loss_type != "sft", "async_mode has nothing to generate with loss_type='sft'; remove it")
    need(cfg.max_staleness >= cfg.async_mode, "with async_mode samples are one weight update old; set max_staleness=1")
    if cfg.fully_async:
        need(not cfg.colocate, "fully_async trains and generates at the same time, and colocated sides take turns; set "
             "colocate=False and give the engines GPUs of their own (rollout_num_gpus)")
        need(not cfg.async_mode, "async_mode updates weights between batches, fully_async in the middle of answers; set one")
        need(cfg.loss_type != "sft", "fully_async has nothing to generate with loss_type='sft'; remove it")
        need(cfg.max_staleness >= 1, f"fully_async with max_staleness={cfg.max_staleness} could only generate while nobody "
             "trains; set max_staleness=1 or more, or fully_async=False")
        need(not cfg.rollout_function, "rollout_function makes a step's samples itself; remove fully_async")
    per_rollout, steps, gbs = cfg.rollout_batch_size * samples_per_group(cfg), cfg.num_steps_per_rollout, cfg.global_batch_size
    need(gbs * steps == per_rollout, f"global_batch_size {gbs} * num_steps_per_rollout {steps} != rollout_batch_size "
         f"{cfg.rollout_batch_size} * n {samples_per_group(cfg)} = {per_rollout}; set global_batch_size={per_rollout // steps}"
         + ("" if per_rollout % steps == 0 else " and a num_steps_per_rollout that divides it"))
    dp = dp_size(cfg)
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
    need(not cfg.mask_offpolicy_in_partial_rollout or cfg.partial_rollout or cfg.fully_async,
         "mask_offpolicy_in_partial_rollout has no effect without partial_rollout or fully_async; set partial_rollout=True")


def validate_generation(cfg: Config) -> None:
    """Tools, hooks that replace others, and faults."""
    if cfg.tools:
        need(cfg.apply_chat_template, "tools are written into the prompt by the chat template; set apply_chat_template=True")
        from sglang.srt.function_call.function_call_parser import FunctionCallParser     # 2 s to import: only when asked
        known = sorted(FunctionCallParser.ToolCallParserEnum)
        need(cfg.tool_call_parser in known, f"tool_call_parser={cfg.tool_call_parser!r}: how does the model write a call? set "
             f"it to 'qwen25' for Qwen and Hermes (JSON in <tool_call>), or another of SGLang's names: {', '.join(known)}")
        need(not cfg.custom_generate_function, "custom_generate_function runs the conversation itself; remove tools, or call "
             "agent.converse(args, sample, sampling_params, tools=[...]) in it")
        need(cfg.loss_type != "sft", "tools are called by no one with loss_type='sft'; describe them in the rows (tool_key)")
        for tool in cfg.tools:
            named = callable(tool) and getattr(tool, "__name__", "<lambda>") != "<lambda>"
            need(named, f"tools: {tool!r} is not a named function; write it with def")
            try:
                from transformers.utils import get_json_schema
                get_json_schema(tool)
            except Exception as error:       # of transformers: it says what is missing
                raise ValueError(f"tools: {tool.__name__}: {str(error).strip()} The model learns from these how to call it; "
                                 "give the function type hints, and a docstring with an Args: section") from error
        names = [tool.__name__ for tool in cfg.tools]
        need(len(set(names)) == len(names), f"tools: {names} have not all a name of their own; rename one")
    else:
        need(not cfg.tool_call_parser or cfg.custom_generate_function,
             "tool_call_parser has no effect without tools or custom_generate_function; remove it")
    need(cfg.max_turns > 0, f"max_turns={cfg.max_turns} must be positive; set it to 1 or more")
    validate_hooks(cfg)
    need(not cfg.inject_faults or cfg.loss_type != "sft", "inject_faults strikes engines, and loss_type='sft' has none")
    steps = cfg.num_rollout
    for name, when in cfg.inject_faults.items():
        kind = re.fullmatch(r"(hang_)?engine_(\d+)|router|reward_worker", name)
        need(kind, f"inject_faults[{name!r}]: name engine_0, hang_engine_0 (or another rank), router or reward_worker")
        engines = cfg.rollout_num_gpus // cfg.rollout_num_gpus_per_engine
        need(not kind[2] or int(kind[2]) < engines, f"inject_faults[{name!r}]: there are {engines} engines, engine_0 is first")
        for step in when if isinstance(when, list) else [when]:
            need(isinstance(step, int) and 0 <= step < (steps or math.inf),
                 f"inject_faults[{name!r}]={when!r}: give a step, or a list of steps, from 0 to {(steps or 1) - 1}")


PLAIN_HOOKS = ("dynamic_sampling_filter", "buffer_filter", "rollout_sample_filter", "custom_reward_post_process",
               "custom_convert_samples_to_train_data")           # called in the middle of things, so they cannot wait
# What a hook leaves without effect.
REPLACED = dict(
    rollout_function=("dynamic_sampling_filter", "partial_rollout"),
    data_source=("buffer_filter", "sft_data"),
    custom_reward_post_process=("overlong_buffer_len",),
    custom_convert_samples_to_train_data=("overlong_filtering", "sft_data", "opd_teacher_url", "use_rollout_routing_replay",
                                          "load_debug_rollout_data"))


def validate_hooks(cfg: Config) -> None:
    for key in PLAIN_HOOKS:
        need(not is_async(getattr(cfg, key)), f"{key} is not awaited; write it with def, and ask others in custom_rm, "
             "whose reward it then sees")
    hook = cfg.custom_generate_function
    need(not inspect.isfunction(hook) or is_async(hook), "custom_generate_function must be async def: all samples are "
         "generated at the same time, in one thread; write async def, and await what it waits for")
    for hook, keys in REPLACED.items():
        for key in keys if getattr(cfg, hook) else ():
            need(not getattr(cfg, key), f"{key} has no effect with {hook}, which takes its place; remove one of the two")
    if cfg.custom_reward_post_process:
        need(cfg.rewards_normalization and cfg.grpo_std_normalization, "custom_reward_post_process compares the rewards "
             "itself; remove rewards_normalization and grpo_std_normalization")
    if inspect.isclass(cfg.data_source):
        has = {name for name in dir(cfg.data_source) if callable(getattr(cfg.data_source, name))}
        lacks = {"get_samples"} - has or (not {"state_dict", "load_state_dict"} <= has and {"save", "load"} - has)
        need(not lacks, f"data_source {cfg.data_source.__name__} has no {' and no '.join(sorted(lacks or ()))}; the loop "
             "calls get_samples, and save and load (or state_dict and load_state_dict), so that a resumed run goes on")
        need("add_samples" in has or not cfg.partial_rollout, "partial_rollout puts unfinished groups back: give data_source "
             "an add_samples(groups)")
    for key in (*REPLACED, *PLAIN_HOOKS, "custom_generate_function", "eval_function", "group_rm"):
        need(cfg.loss_type != "sft" or not getattr(cfg, key), f"{key} has no effect with loss_type='sft', where the rows are "
             "the samples; remove it")


def is_async(hook) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))


def validate_algorithm(cfg: Config) -> None:
    if cfg.loss_type == "sft":
        need(not cfg.sft_data, "sft_data is trained beside samples; with loss_type='sft' the rows are prompt_data: remove it")
        for key in ("critic", "critic_num_gpus", "use_opd", "true_on_policy_mode", "use_kl_loss", "use_tis",
                    "use_routing_replay", "use_rollout_routing_replay"):
            need(not getattr(cfg, key), f"{key} has no effect with loss_type='sft'; remove it")
        return
    need(cfg.rm_type or cfg.custom_rm or has_row_rewards(cfg) or cfg.use_opd or cfg.custom_generate_function
         or cfg.rollout_function,            # those two may set sample.reward themselves
         "no reward is set; set rm_type to a grader of graders.py or custom_rm to a function (args, sample) -> float")
    need((cfg.loss_type == "custom_loss") == (cfg.custom_loss_function is not None), "loss_type='custom_loss' and "
         "custom_loss_function=a function (args, LossInput) -> loss, metrics belong together; set both or neither")
    need(cfg.rm_type != "remote_rm" or cfg.rm_url,
         "rm_type='remote_rm' asks a server for the reward; set rm_url='http://...'")
    need(not cfg.group_rm or cfg.custom_rm, "group_rm hands whole groups to custom_rm; set custom_rm to a function "
         "(args, samples) -> list of rewards")
    need(cfg.rm_type not in ("dapo", "boxed_dapo") or cfg.custom_rm or cfg.reward_key,
         f"rm_type={cfg.rm_type!r} gives a dict (score, acc, pred); set reward_key='score' to train on its +1 or -1")
    need(cfg.rm_type != "code" or cfg.code_timeout_s <= 0.8 * cfg.reward_timeout_s, f"code_timeout_s={cfg.code_timeout_s} is "
         f"for one run of a program, and all take at most 0.8 reward_timeout_s; set reward_timeout_s={2 * cfg.code_timeout_s}")
    need(cfg.code_memory_mb >= 128, f"code_memory_mb={cfg.code_memory_mb}: Python itself takes more; set 128 or more")
    need(not (cfg.kl_coef and cfg.kl_loss_coef), "only one of kl_coef (KL in the reward) and kl_loss_coef (KL in the loss) "
         "can be set; set kl_coef=0")
    need(not cfg.kl_loss_coef or cfg.use_kl_loss, "kl_loss_coef has no effect without use_kl_loss; set use_kl_loss=True")
    need(not cfg.use_kl_loss or cfg.kl_loss_coef, "use_kl_loss with kl_loss_coef=0 would load and run a reference for "
         "nothing; set kl_loss_coef=0.001 or use_kl_loss=False")
    need(not cfg.ref_load or cfg.use_kl_loss or cfg.kl_coef,
         "ref_load is set but nothing reads the reference; set use_kl_loss=True")
    need(0 < cfg.eps_clip <= 1, f"eps_clip={cfg.eps_clip} must be in (0, 1]; set eps_clip=0.2")
    need(cfg.eps_clip_c is None or cfg.eps_clip_c > 1, f"eps_clip_c={cfg.eps_clip_c}: dual clip needs a bound above 1; "
         "set eps_clip_c=3.0 or leave it unset")
    need(not (cfg.calculate_per_token_loss and cfg.fixed_loss_length),
         "calculate_per_token_loss and fixed_loss_length are two different denominators; set one of them")
    need(0 <= cfg.gamma <= 1 and 0 <= cfg.lambd <= 1, f"gamma={cfg.gamma} and lambd={cfg.lambd} must be in [0, 1]; set both "
         "to 1.0, as is usual for language models")
    longest = cfg.rollout_max_response_len
    need(cfg.overlong_buffer_len is None or 0 < cfg.overlong_buffer_len <= longest,
         f"overlong_buffer_len={cfg.overlong_buffer_len} must lie within rollout_max_response_len={longest}; "
         f"set it to {max(1, longest // 4)}")
    validate_corrections(cfg)
    validate_critic(cfg)
    validate_teachers(cfg)


def validate_corrections(cfg: Config) -> None:
    """What sets right that sampler and trainer are two policies."""
    need(not cfg.use_unbiased_kl or cfg.use_kl_loss, "use_unbiased_kl is about the KL in the loss; set use_kl_loss=True")
    need(not (cfg.use_tis and cfg.use_rollout_logprobs), "use_tis weighs trainer against engine by old_logp - rollout_logp, "
         "and use_rollout_logprobs makes the two the same; set one of them")
    switches = dict(use_tis=("tis_level", "tis_mode", "tis_clip", "tis_clip_low"), use_opsm=("opsm_delta",),
                    use_opd=("opd_kl_coef",), critic=("value_clip",), sft_data=("sft_loss_coef",),
                    overlong_buffer_len=("overlong_penalty_factor",))
    for switch, keys in switches.items():
        for key in keys:
            need(getattr(cfg, switch) or getattr(cfg, key) == FIELDS[key].default,
                 f"{key}={getattr(cfg, key)!r} has no effect without {switch}; set {switch}, or remove it")
    for key in ("use_tis", "use_opsm", "entropy_coef", "eps_clip_c") if cfg.loss_type == "custom_loss" else ():
        need(not getattr(cfg, key), f"{key} is part of the policy loss, and custom_loss_function takes its place; remove it, "
             "or build it into your function")
    need(0 <= cfg.tis_clip_low < cfg.tis_clip, f"tis_clip_low={cfg.tis_clip_low} must be at least 0 and below "
         f"tis_clip={cfg.tis_clip}; set tis_clip_low=0.0")
    one_policy = cfg.num_steps_per_rollout == 1 and not cfg.use_rollout_logprobs
    need(not (cfg.use_opsm and one_policy), "use_opsm compares the current policy with the old one, and with one optimizer "
         "step per rollout they are the same; set use_rollout_logprobs=True, or num_steps_per_rollout=2")
    need(not (cfg.use_routing_replay and cfg.use_rollout_routing_replay), "use_routing_replay takes the routes of the old "
         "log-probs' pass, use_rollout_routing_replay the engine's; set one of them")
    need(not cfg.use_rollout_routing_replay or cfg.sglang.get("enable_return_routed_experts"), "use_rollout_routing_replay "
         "needs the engine's routes; remove enable_return_routed_experts=False from sglang")
    need(not (cfg.use_routing_replay and cfg.use_rollout_logprobs), "use_routing_replay takes the routes of the old "
         "log-probs' pass, which use_rollout_logprobs leaves out; use_rollout_routing_replay takes the engine's")
    if cfg.true_on_policy_mode:
        same = dict(num_steps_per_rollout=1, async_mode=False, partial_rollout=False, max_staleness=0, rollout_top_p=1.0,
                    rollout_top_k=-1, on_invariant="raise")
        for key, must in same.items():
            value = getattr(cfg, key)
            need(value == must, f"true_on_policy_mode: {key}={value!r} would train another policy than the one that samples, "
                 f"or would not tell; set {key}={must!r}")
        need(not cfg.sglang.get("quantization"), "true_on_policy_mode: an engine with quantised weights is another policy; "
             "remove sglang's quantization")


def validate_critic(cfg: Config) -> None:
    for key in cfg.critic.keys() - CRITIC_FIELDS:
        near = difflib.get_close_matches(key, CRITIC_FIELDS, 1, 0.4)
        raise ValueError(f"critic[{key!r}] cannot be set; " + (f"did you mean {near[0]!r}?" if near else
                                                              f"use one of {sorted(CRITIC_FIELDS)}"))
    check_types(cfg.critic, "critic: ")
    for key in ("lr", "max_tokens_per_gpu"):
        need(cfg.critic.get(key, 1) > 0, f"critic[{key!r}]={cfg.critic.get(key)} must be positive")
    source = cfg.critic.get("hf_checkpoint", "x")
    need(isinstance(source, str) and not source.endswith(".py"), "critic['hf_checkpoint'] is a folder or a hub name; give one")
    alone = cfg.num_critic_only_steps
    need(not cfg.num_rollout or alone < cfg.num_rollout, f"num_critic_only_steps={alone} leaves the actor no step of "
         f"num_rollout={cfg.num_rollout}; set it lower")
    one, own = cfg.actor_num_gpus // dp_size(cfg), cfg.critic_num_gpus
    need(own is None or (own > 0 and own % one == 0), f"critic_num_gpus={own} is not a multiple of tp * pp * cp = {one}, "
         f"which the critic shares with the actor; set critic_num_gpus={one}")
    need(own is None or not cfg.colocate or cfg.device == "cpu", "critic_num_gpus gives the critic GPUs of its own, and with "
         "colocate all share the same; remove one of the two")
    need(cfg.num_critic_only_steps >= 0, f"num_critic_only_steps={cfg.num_critic_only_steps} must be 0 or more")
    need(cfg.value_clip > 0, f"value_clip={cfg.value_clip} must be positive; set value_clip=0.2")


def validate_teachers(cfg: Config) -> None:
    """Distillation, and examples beside the samples."""
    teachers = [key for key in ("opd_teacher_load", "opd_teacher_url") if getattr(cfg, key)]
    need(not cfg.use_opd or len(teachers) == 1, f"use_opd needs one teacher, it has {teachers or 'none'}; set "
         "opd_teacher_load to a Hugging Face folder of the model's own shape, or opd_teacher_url to an SGLang server")
    need(cfg.use_opd or not teachers, f"{' and '.join(teachers)} has no effect without use_opd; set use_opd=True")
    need(not cfg.use_opd or cfg.opd_kl_coef > 0, f"use_opd with opd_kl_coef={cfg.opd_kl_coef} would run a teacher for "
         "nothing; set opd_kl_coef=1.0")
    need(not cfg.opd_teacher_url or cfg.rollout_temperature == 1, "the server gives its log-probs at temperature 1; set "
         "rollout_temperature=1.0, or use opd_teacher_load")
    need(not cfg.sft_data or cfg.rollout_temperature == 1, "sft_data is trained by the same pass as the samples, whose logits "
         "are divided by rollout_temperature; set rollout_temperature=1.0")
    need(cfg.sft_loss_coef > 0, f"sft_loss_coef={cfg.sft_loss_coef} must be positive; set sft_loss_coef=1.0")
    examples, steps = cfg.sft_batch_size, cfg.num_steps_per_rollout
    need(bool(cfg.sft_data) == (examples > 0), f"sft_data and sft_batch_size={examples} belong together; set both, or neither")
    need(examples == 0 or examples >= steps, f"sft_batch_size={examples} leaves optimizer steps without an example; "
         f"set it to at least {steps}")


def has_row_rewards(cfg: Config) -> bool:
    """reasoning-gym tasks bring their own verifier. A row of a file may name one too, but not every row has to: those
    need rm_type all the same, as the default."""
    return isinstance(cfg.prompt_data, dict)


def validate_eval(cfg: Config) -> None:
    need(not cfg.eval_prompt_data or cfg.loss_type != "sft", "loss_type='sft' starts no engine, so nothing can be evaluated; "
         "remove eval_prompt_data, and evaluate in the run that comes after it")
    need(cfg.eval_interval is None or has_eval(cfg), "eval_interval is set but there is nothing to evaluate on; "
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
        one = eval_config(cfg, name)         # imports its hooks
        need(one.rm_type or one.custom_rm or has_row_rewards(one) or one.custom_generate_function,
             f"{where} has no reward; add rm_type or custom_rm to it")
        need(not (own.get("rm_type") and one.custom_rm), f"{where}: the run's custom_rm goes before its rm_type; add "
             "custom_rm=None to it")


def eval_fields() -> set[str]:
    """The settings that a held-out set may have of its own."""
    return {"prompt_data", "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_max_response_len",
            "rm_type", "custom_rm", "input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template",
            "apply_chat_template_kwargs", "rollout_max_prompt_len", "eval_reward_key", "custom_generate_function"}


def validate_passthrough(cfg: Config) -> None:
    """`megatron` and `sglang` name fields of the packages' own dataclasses; what nanoslime sets itself is refused there."""
    if cfg.megatron or cfg.critic.get("megatron"):
        with warnings.catch_warnings():      # about Transformer Engine and apex
            warnings.simplefilter("ignore")
            from megatron.core.distributed import DistributedDataParallelConfig          # 5 s to import, so only when asked
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer.transformer_config import TransformerConfig
        check_passthrough("megatron", cfg.megatron | cfg.critic.get("megatron", {}),
                          (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig),
                          {"tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "lr", "min_lr",
                           "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "use_distributed_optimizer",
                           "params_dtype", "bf16", "calculate_per_token_loss", "context_parallel_size", "pipeline_dtype",
                           "expert_model_parallel_size", "expert_tensor_parallel_size", "variable_seq_lengths",
                           "virtual_pipeline_model_parallel_size", "perform_initialization"})
    need("use_precision_aware_optimizer" not in cfg.megatron, "megatron['use_precision_aware_optimizer'] comes with "
         "optimizer_cpu_offload by itself, and without it needs Transformer Engine's Adam, which we do not use; remove it")
    share = cfg.megatron.get("optimizer_offload_fraction")
    need(share is None or (cfg.megatron.get("optimizer_cpu_offload") and 0 < share <= 1), f"megatron['optimizer_offload_"
         f"fraction']={share} is how much of Adam optimizer_cpu_offload=True moves to the CPU; set both, it to at most 1.0")
    if cfg.megatron.get("optimizer_cpu_offload"):
        for key, must in dict(device="cuda", dtype="bfloat16", use_distributed_optimizer=True).items():
            need(getattr(cfg, key) == must, "megatron['optimizer_cpu_offload'] takes the distributed optimizer of a bf16 "
                 f"model from the GPU to the CPU; set {key}={must!r}, or remove it")
    roles = [key for key in cfg.sglang if key.startswith(("disaggregation_", "encoder_", "language_only"))]
    need(not roles, f"sglang: {', '.join(roles)} are for servers that do only a part of the work (prefill, decode or encode), "
         "and every engine here does all of it; remove them")
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
