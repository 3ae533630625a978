"""
test_base.py: a mistake in a run file or on the command line is an error that names it and says what to do instead.

    run file in a temporary folder + --key=value --load--> Config | ValueError: what is wrong; the remedy

Run:   pytest tests/test_base.py       CPU only; about 20 s, most of it SGLang's and Megatron's import for the pass-through tests.
"""
import dataclasses
import functools
import json
import pathlib
import re

import pytest

from configs import base

GOOD = dict(hf_checkpoint="some/model", prompt_data="d.jsonl", num_rollout=2, rm_type="math")
CONFIGS = pathlib.Path(base.__file__).parent


@pytest.fixture
def load(tmp_path):
    """load(*command line, text="more lines", key=value, ...) on top of GOOD; None leaves a setting out."""
    def load(*overrides, text="", **settings):
        path = tmp_path / "run.py"
        lines = [f"{k} = {v!r}" for k, v in (GOOD | settings).items() if v is not None]
        path.write_text("\n".join(lines) + "\n" + text)
        return base.load(str(path), list(overrides))
    return load


# ---- What must load --------------------------------------------------------------------------------------------------
def run_files():
    """configs/*.py, less the modules that only serve them."""
    return sorted(p for p in CONFIGS.glob("*.py") if p.name != "base.py" and re.search(r"^hf_checkpoint =", p.read_text(), re.M))


@pytest.mark.parametrize("path", run_files(), ids=lambda p: p.stem)
def test_every_config_loads(path):
    cfg = base.load(str(path))
    json.dumps(base.to_dict(cfg))
    assert base.load(str(path), ["--num_rollout=1"]).num_rollout == 1


def test_there_are_run_files():
    assert len(run_files()) >= 3


def test_what_follows_is_filled_in(load):
    cfg = load("--device=cpu")
    assert (cfg.dtype, cfg.max_logprob_diff, cfg.global_batch_size, cfg.over_sampling_batch_size) == ("float32", 1e-4, 256, 32)
    assert (cfg.rollout_num_gpus, cfg.update_weight_transport, cfg.eps_clip_high) == (1, "distributed", 0.2)
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    cfg = load("--device=cuda", "--colocate", "--actor_num_gpus=8", "--num_steps_per_rollout=2", "--eps_clip=0.1", "--reward_key=acc")
    assert (cfg.dtype, cfg.max_logprob_diff, cfg.global_batch_size, cfg.eval_reward_key) == ("bfloat16", 0.1, 128, "acc")
    assert (cfg.rollout_num_gpus, cfg.update_weight_transport, cfg.eps_clip_high) == (8, "tensor", 0.1)
    assert (cfg.offload_train, cfg.offload_rollout) == (None, None)          # decided when the GPU's memory is known
    cfg = load("--device=cuda", "--colocate", "--offload_train=false", "--dtype=float32", "--eps_clip_high=0.3", "--actor_num_gpus=3", "--rollout_num_gpus=3")
    assert (cfg.offload_train, cfg.offload_rollout, cfg.dtype) == (False, None, "float32")
    assert (cfg.max_logprob_diff, cfg.eps_clip_high, cfg.rollout_num_gpus) == (1e-4, 0.3, 3)
    sft = load(loss_type="sft", rm_type=None, rollout_temperature=0.0, n_samples_per_prompt=1)
    assert sft.global_batch_size == 32       # SFT trains each row once


def test_config_is_read_only(load):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().lr = 1.0


# ---- The command line ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arg, key, value", [
    ("--lr=2e-6", "lr", 2e-6), ("--lr=1", "lr", 1), ("--n-samples-per-prompt=16", "n_samples_per_prompt", 16),
    ("--colocate", "colocate", True), ("--save_hf=false", "save_hf", False), ("--save-hf=True", "save_hf", True),
    ("--save_interval=none", "save_interval", None), ("--save_interval=", "save_interval", None), ("--resume", "resume", True),
    ("--resume=outputs/a", "resume", "outputs/a"), ("--rollout_stop_token_ids=[1, 2]", "rollout_stop_token_ids", [1, 2]),
    ("--rollout_stop=['a', 'b']", "rollout_stop", ["a", "b"]), ("--run_name=7", "run_name", "7"), ("--run_name=none", "run_name", None),
    ("--output_dir=true", "output_dir", "true"), ("--prompt_data=a.jsonl@[0:10]", "prompt_data", "a.jsonl@[0:10]"),
    ("--prompt_data={'reasoning_gym': 'chain_sum'}", "prompt_data", {"reasoning_gym": "chain_sum"}),
    ("--rollout_top_k=-1", "rollout_top_k", -1), ("--wandb_project=a=b", "wandb_project", "a=b")])
def test_overrides(load, arg, key, value):
    got = getattr(load(arg), key)
    assert got == value and type(got) is type(value)


def test_later_wins_and_dots_reach_into_dicts(load):
    cfg = load("--lr=1.0", "--lr=2.0", "--sglang.max_running_requests=8", "--sglang.mem-fraction-static=0.5",
               sglang=dict(mem_fraction_static=0.9, disable_cuda_graph=True), lr=3.0)
    assert cfg.lr == 2.0
    assert cfg.sglang == dict(mem_fraction_static=0.5, disable_cuda_graph=True, max_running_requests=8)


@pytest.mark.parametrize("args, message", [
    (["lr=1"], r"argument 'lr=1' not understood; write --key=value"),
    (["--n_sample_per_prompt=4"], r"unknown setting 'n_sample_per_prompt'; did you mean 'n_samples_per_prompt'\?"),
    (["--learning-rate=4"], r"unknown setting 'learning_rate'; here it is 'lr'"),
    (["--qqqqq=4"], r"unknown setting 'qqqqq'; see configs/base.py for the list"),
    (["--lr=fast"], r"lr='fast' is str, but lr is float; change it"),
    (["--lr"], r"lr=True is bool, but lr is float"),
    (["--run_name"], r"run_name=True is bool, but run_name is str \| None"),   # a name was forgotten
    (["--rollout_batch_size=1.5"], r"rollout_batch_size=1.5 is float, but rollout_batch_size is int"),
    (["--rollout_batch_size=true"], r"rollout_batch_size=True is bool, but"),
    (["--colocate=1"], r"colocate=1 is int, but colocate is bool"),
    (["--device=tpu"], r"device='tpu' is str, but device is Literal\['auto', 'cpu', 'cuda'\]"),
    (["--sglang=7"], r"sglang=7 is int, but sglang is dict"),
    (["--lr.x=1"], r"lr.*is dict, but lr is float"),
    (["--lr=1.0", "--lr.x=1"], r"--lr.x=1: lr is not a dict of settings; write --lr=")])
def test_wrong_command_lines(load, args, message):
    with pytest.raises(ValueError, match=message):
        load(*args)


# ---- Run files -------------------------------------------------------------------------------------------------------
def test_hooks_and_helpers(load):
    cfg = load(rm_type=None, text="""
import math
from collections import Counter
from os.path import join as _join, basename
_P = 4
_table = {1: 2}
class Thing: pass
def helper(x): return 2 * x
async def custom_rm(args, sample): return helper(1.0)
rollout_batch_size = _P * 2
dynamic_sampling_filter = lambda args, samples: True
def prompt_data(): return [{"input": "a"}]
""")
    assert cfg.custom_rm.__name__ == "custom_rm" and cfg.rollout_batch_size == 8
    assert cfg.dynamic_sampling_filter(None, None) is True and cfg.prompt_data() == [{"input": "a"}]


@pytest.mark.parametrize("name", ["configs.base.fits", "configs.base:fits"])
def test_hooks_by_name(load, name):
    assert load(f"--custom_rm={name}").custom_rm is base.fits
    cfg = load(eval_prompt_data=dict(a=dict(prompt_data="e.jsonl", custom_rm=name)))
    assert base.eval_config(cfg, "a").custom_rm is base.fits


@pytest.mark.parametrize("name, why", [("nowhere.at.all", "No module named 'nowhere'"), ("math.squirt", "no attribute 'squirt'"),
                                       ("plain", ""), ("math.pi", "float, not a function")])
def test_hooks_that_cannot_be_imported(load, name, why):
    with pytest.raises(ValueError, match=rf"custom_rm='{name}' cannot be imported \(.*{why}.*\); write 'package.module.function'"):
        load(custom_rm=name)


def test_run_file_mistakes(load, tmp_path):
    with pytest.raises(ValueError, match=r"run\.py: unknown setting 'rollout_batchsize'; did you mean 'rollout_batch_size'\?; "
                                         r"a variable of your own starts with an underscore: _rollout_batchsize"):
        load(text="rollout_batchsize = 4")
    with pytest.raises(ValueError, match="rollout_batch_size='4' is str, but rollout_batch_size is int; change it in the run"):
        load(rollout_batch_size="4")
    with pytest.raises(ValueError, match=r"run file .*nope\.py not found"):
        base.load(str(tmp_path / "nope.py"))
    with pytest.raises(ValueError, match=r"run file configs/demo_gpu\.py not found; did you mean .*configs/demo_cpu\.py\?"):
        base.load("configs/demo_gpu.py")
    with pytest.raises(NameError, match="undefined"):      # a bug in the file is shown as it is
        load(text="lr = undefined")


def test_names_from_elsewhere_are_settings_here():
    here = {name.split()[0].split(".")[0] for name in base.ELSEWHERE.values()}           # "critic.lr", "a (or b)"
    assert here <= base.FIELDS.keys() and not base.ELSEWHERE.keys() & base.FIELDS.keys()


# ---- Impossible combinations: what is wrong, and the remedy ------------------------------------------------------------
WRONG = [
    (dict(hf_checkpoint=None), "hf_checkpoint is not set; give a Hugging Face folder"),
    (dict(prompt_data=None), "prompt_data is not set; give a .jsonl"),
    (dict(num_rollout=None), "neither num_rollout nor num_epoch is set.*; set num_rollout"),
    (dict(rm_type=None), "no reward is set; set rm_type to a grader of graders.py or custom_rm"),
    (dict(rm_type="code", code_timeout_s=30.0), "all take at most 0.8 reward_timeout_s; set reward_timeout_s=60.0"),
    (dict(code_memory_mb=10), "code_memory_mb=10: .*set 128 or more"),
    (dict(rm_type="remote_rm"), "set rm_url='http://...'"),
    (dict(group_rm=True), "group_rm hands whole groups to custom_rm; set custom_rm"),
    (dict(rm_type="dapo"), r"gives a dict \(score, acc, pred\); set reward_key='score'"),
    (dict(rollout_batch_size=0), "rollout_batch_size=0 must be positive; set it to 1 or more"),
    (dict(num_steps_per_rollout=0), "num_steps_per_rollout=0 must be positive"),
    (dict(max_batches_asked=0), "max_batches_asked=0 must be positive"),
    (dict(n_samples_per_prompt=0), "n_samples_per_prompt=0 must be positive"),
    (dict(tensor_model_parallel_size=-1), "tensor_model_parallel_size=-1 must be positive"),
    (dict(rollout_num_gpus_per_engine=0), "rollout_num_gpus_per_engine=0 must be positive"),
    (dict(reward_timeout_s=0), "reward_timeout_s=0 must be positive; every wait has a limit"),
    (dict(save_interval=0), r"save_interval=0 must be at least 1; or leave it unset \(None\)"),
    (dict(num_rollout=-1), "num_rollout=-1 must be at least 0"),
    # layout
    (dict(actor_num_gpus=6, tensor_model_parallel_size=4), r"actor_num_gpus 6 is not a multiple of tp 4 \* pp 1 \* cp 1; set actor_num_gpus=4"),
    (dict(pipeline_model_parallel_size=2), r"actor_num_gpus 1 is not a multiple of tp 1 \* pp 2 \* cp 1; set actor_num_gpus=2"),
    (dict(actor_num_gpus=4, tensor_model_parallel_size=2, context_parallel_size=4), r"tp 2 \* pp 1 \* cp 4; set actor_num_gpus=8"),
    (dict(context_parallel_size=0), "context_parallel_size=0 must be positive"),
    (dict(actor_num_gpus=4, pipeline_model_parallel_size=2, expert_model_parallel_size=4),
     r"the 2 ranks of a pipeline stage \(tp \* cp \* dp\) are not a multiple of ep 4 \* etp 1; set expert_model_parallel_size=2$"),
    (dict(actor_num_gpus=2, expert_tensor_parallel_size=4), "set expert_model_parallel_size=1 and expert_tensor_parallel_size=1$"),
    (dict(actor_num_gpus=2, tensor_model_parallel_size=2, expert_model_parallel_size=2), "set sequence_parallel=True"),
    (dict(virtual_pipeline_model_parallel_size=2), "virtual_pipeline_model_parallel_size=2 cuts .* to 2 or more, or remove it"),
    (dict(actor_num_gpus=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1), "=1 cuts .*, or remove it"),
    (dict(actor_num_gpus=4, context_parallel_size=2, rollout_batch_size=1, n_samples_per_prompt=1, rewards_normalization=False),
     "leaves some of the 2 data-parallel ranks"),
    (dict(device="cuda", colocate=True, actor_num_gpus=2, rollout_num_gpus=4), "set rollout_num_gpus=2 like actor_num_gpus"),
    (dict(sequence_parallel=True), "sequence_parallel needs tensor parallelism; set tensor_model_parallel_size=2"),
    (dict(device="cuda", rollout_num_gpus=3, rollout_num_gpus_per_engine=2),
     "rollout_num_gpus 3 is not a multiple of rollout_num_gpus_per_engine 2; set rollout_num_gpus=2"),
    (dict(device="cpu", rollout_num_gpus_per_engine=2), "one CPU process only; set rollout_num_gpus_per_engine=1"),
    (dict(offload_train=True), "offload_train and offload_rollout are for GPUs that both sides share; set colocate=True"),
    (dict(offload_rollout=True), "are for GPUs that both sides share; set colocate=True"),
    (dict(update_weight_transport="tensor"), "set colocate=True or use 'distributed'"),
    (dict(device="cuda", colocate=True, update_weight_transport="distributed"), "colocated runs use update_weight_transport='tensor'"),
    (dict(rollout_quantization="fp8"), "computes no fp8 on a CPU; remove it"),
    (dict(device="cuda", rollout_quantization="fp8", dtype="float32"), "set dtype='bfloat16'"),
    (dict(device="cuda", rollout_quantization="fp8", true_on_policy_mode=True), "engines in fp8 are another; set rollout_quant"),
    (dict(device="cuda", rollout_quantization="fp8", loss_type="sft"), "no effect with loss_type='sft'.*remove it"),
    (dict(device="cuda", rollout_quantization="fp8", sglang=dict(quantization="fp8")), r"sglang\['quantization'\] beside.*remove it"),
    # batch
    (dict(global_batch_size=100), r"global_batch_size 100 \* num_steps_per_rollout 1 != rollout_batch_size 32 \* n 8 = 256; "
                                  "set global_batch_size=256"),
    (dict(num_steps_per_rollout=3), r"!= rollout_batch_size 32 \* n 8 = 256; set global_batch_size=85 and a num_steps_per_rollout that"),
    (dict(actor_num_gpus=4, rollout_batch_size=1, n_samples_per_prompt=2), "leaves some of the 4 data-parallel ranks.*at least 4"),
    (dict(over_sampling_batch_size=8), "over_sampling_batch_size 8 is below rollout_batch_size; set it to at least 32"),
    (dict(rollout_temperature=0.0), r"rollout_temperature must be > 0.*set rollout_temperature=1\.0 \(eval_temperature may be 0\)"),
    (dict(rollout_top_p=0.0), r"rollout_top_p=0.0 must be in \(0, 1\]; set rollout_top_p=1.0"),
    (dict(rollout_max_prompt_len=100, rollout_max_context_len=100), "no room for a response; set it to at most .* = 99"),
    (dict(mask_offpolicy_in_partial_rollout=True), "without partial_rollout or fully_async; set partial_rollout=True"),
    # algorithm
    (dict(kl_coef=0.1, kl_loss_coef=0.1, use_kl_loss=True), "only one of kl_coef .* and kl_loss_coef .*; set kl_coef=0"),
    (dict(kl_loss_coef=0.1), "kl_loss_coef has no effect without use_kl_loss; set use_kl_loss=True"),
    (dict(use_kl_loss=True), "for nothing; set kl_loss_coef=0.001 or use_kl_loss=False"),
    (dict(ref_load="other"), "ref_load is set but nothing reads the reference; set use_kl_loss=True"),
    (dict(eps_clip=0.0), "eps_clip=0.0 must be in .*; set eps_clip=0.2"),
    (dict(eps_clip_c=1.0), "eps_clip_c=1.0: dual clip needs a bound above 1; set eps_clip_c=3.0"),
    (dict(calculate_per_token_loss=True, fixed_loss_length=9), "two different denominators; set one of them"),
    (dict(gamma=1.1), r"gamma=1.1 and lambd=1.0 must be in \[0, 1\]; set both to 1.0"),
    (dict(overlong_buffer_len=2000), "overlong_buffer_len=2000 must lie within rollout_max_response_len=1024; set it to 256"),
    (dict(loss_type="custom_loss"), "loss_type='custom_loss' and custom_loss_function=.* belong together; set both or neither"),
    (dict(custom_loss_function="math.sqrt"), "belong together; set both or neither"),
    # corrections of the mismatch between sampler and trainer
    (dict(use_unbiased_kl=True), "use_unbiased_kl is about the KL in the loss; set use_kl_loss=True"),
    (dict(use_tis=True, use_rollout_logprobs=True), "use_rollout_logprobs makes the two the same; set one of them"),
    (dict(tis_mode="mask"), "tis_mode='mask' has no effect without use_tis; set use_tis, or remove it"),
    (dict(opsm_delta=0.1), "opsm_delta=0.1 has no effect without use_opsm"),
    (dict(true_on_policy_mode=True, sglang=dict(quantization="fp8")), "quantised weights is another policy; remove"),
    (dict(use_tis=True, tis_clip_low=3.0), "tis_clip_low=3.0 must be at least 0 and below tis_clip=2.0; set tis_clip_low=0.0"),
    (dict(use_opsm=True), "with one optimizer step per rollout they are the same; set use_rollout_logprobs=True"),
    (dict(true_on_policy_mode=True, num_steps_per_rollout=2), "true_on_policy_mode: num_steps_per_rollout=2 .*; set .*=1"),
    (dict(true_on_policy_mode=True, on_invariant="warn"), "or would not tell; set on_invariant='raise'"),
    (dict(true_on_policy_mode=True, async_mode=True), "true_on_policy_mode: async_mode=True .*; set async_mode=False"),
    (dict(use_routing_replay=True, use_rollout_routing_replay=True), "use_rollout_routing_replay the engine's; set one of them"),
    (dict(use_routing_replay=True, use_rollout_logprobs=True), "which use_rollout_logprobs leaves out; use_rollout_routing"),
    (dict(use_rollout_routing_replay=True, loss_type="sft"), "use_rollout_routing_replay has no effect with loss_type='sft'"),
    # critic
    (dict(critic=dict(lrr=1e-5)), r"critic\['lrr'\] cannot be set; did you mean 'lr'\?"),
    (dict(critic=dict(gamma=1.0)), r"critic\['gamma'\] cannot be set; .*"),
    (dict(critic=dict(lr="1e-5")), "critic: lr='1e-5' is str, but lr is float"),
    (dict(critic_num_gpus=3, actor_num_gpus=2, tensor_model_parallel_size=2), r"critic_num_gpus=3 is not a multiple of tp \* pp \* cp = 2"),
    (dict(critic_num_gpus=1, device="cuda", colocate=True), "with colocate all share the same; remove one of the two"),
    (dict(num_critic_only_steps=-1), "num_critic_only_steps=-1 must be 0 or more"),
    (dict(value_clip=0.1), "value_clip=0.1 has no effect without critic; set critic, or remove it"),
    (dict(value_clip=0.0, critic=dict(lr=1e-5)), "value_clip=0.0 must be positive; set value_clip=0.2"),
    (dict(critic=dict(lr=0.0)), r"critic\['lr'\]=0.0 must be positive"),
    (dict(critic=dict(lr=1e-5, hf_checkpoint="x.py")), r"critic\['hf_checkpoint'\] is a folder or a hub name"),
    (dict(critic=dict(lr=1e-5), num_critic_only_steps=2), "leaves the actor no step of num_rollout=2; set it lower"),
    (dict(critic=dict(lr=1e-5), loss_type="sft"), "critic has no effect with loss_type='sft'; remove it"),
    # teachers
    (dict(use_opd=True), "use_opd needs one teacher, it has none; set opd_teacher_load to .*, or opd_teacher_url"),
    (dict(use_opd=True, opd_teacher_load="a", opd_teacher_url="b"), r"use_opd needs one teacher, it has \['opd_teacher_load', .*"),
    (dict(opd_teacher_load="a"), "opd_teacher_load has no effect without use_opd; set use_opd=True"),
    (dict(use_opd=True, opd_teacher_load="a", opd_kl_coef=0.0), "would run a teacher for nothing; set opd_kl_coef=1.0"),
    (dict(use_opd=True, opd_teacher_url="a", rollout_temperature=0.7), "at temperature 1; set rollout_temperature=1.0"),
    (dict(sft_data="d.jsonl", sft_batch_size=1, rollout_temperature=0.7), "divided by rollout_temperature; set .*=1.0"),
    (dict(sft_data="d.jsonl", sft_batch_size=1, sft_loss_coef=-1.0), "sft_loss_coef=-1.0 must be positive"),
    (dict(sft_data="d.jsonl"), "sft_data and sft_batch_size=0 belong together; set both, or neither"),
    (dict(sft_data="d.jsonl", sft_batch_size=1, num_steps_per_rollout=2), "leaves optimizer steps without an example; set .* 2"),
    (dict(sft_data="d.jsonl", sft_batch_size=1, loss_type="sft"), "with loss_type='sft' the rows are prompt_data: remove it"),
    # evaluation
    (dict(eval_interval=5), r"eval_interval is set but there is nothing to evaluate on; set eval_prompt_data = dict\("),
    (dict(eval_prompt_data=dict(aime=dict(prompt_data="e.jsonl", eval_temprature=0))),
     r"eval_prompt_data\['aime'\]: unknown setting 'eval_temprature'; did you mean 'eval_temperature'\?"),
    (dict(eval_prompt_data=dict(aime=dict(prompt_data="e.jsonl", lr=1.0))), r"eval_prompt_data\['aime'\]: unknown setting 'lr'; .*"),
    (dict(eval_prompt_data=dict(aime=dict(prompt_data="e.jsonl", eval_temperature="0"))),
     r"eval_prompt_data\['aime'\]: eval_temperature='0' is str, but eval_temperature is float \| None; change it"),
    (dict(eval_prompt_data=dict(aime=dict(eval_temperature=0.0))), r"eval_prompt_data\['aime'\] has no prompt_data.*; add prompt_data="),
    (dict(eval_prompt_data=dict(aime="e.jsonl"), rm_type=None, use_opd=True, opd_teacher_load="t"),
     r"eval_prompt_data\['aime'\] has no reward; add rm_type or custom_rm"),
    (dict(eval_prompt_data=dict(aime=7)), r"eval_prompt_data\['aime'\]: prompt_data=7 is int"),
    (dict(eval_prompt_data=dict(aime=dict(prompt_data="e.jsonl", custom_rm="math.squirt"))), "custom_rm='math.squirt' cannot be imported"),
]


@pytest.mark.parametrize("settings, message", WRONG, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_wrong_settings(load, settings, message):
    with pytest.raises(ValueError, match=message):
        load(**settings)


@pytest.mark.parametrize("settings", [
    dict(n_samples_per_prompt=1, rewards_normalization=False), dict(loss_type="sft", rm_type=None, n_samples_per_prompt=1),
    dict(rm_type=None, prompt_data=dict(reasoning_gym="chain_sum")), dict(num_rollout=None, num_epoch=1), dict(num_rollout=0),
    dict(use_kl_loss=True, kl_loss_coef=0.1, ref_load="other"), dict(eval_temperature=0.0), dict(device="cpu", rollout_num_gpus=2),
    dict(actor_num_gpus=16, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True,
         virtual_pipeline_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=2),
    dict(colocate=True, offload_train=True), dict(colocate=True, update_weight_transport="disk"),
    dict(eval_interval=1, eval_prompt_data=dict(a="e.jsonl", b=dict(reasoning_gym="chain_sum", size=3)))], ids=",".join)
def test_right_settings(load, settings):
    load(**settings)


# ---- Tools -------------------------------------------------------------------------------------------------------------
TOOL = '''
def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: a number
        b: another one
    """
    return a + b
apply_chat_template, tool_call_parser, tools = True, "qwen25", [add]
'''


def test_right_tools(load):
    assert [tool.__name__ for tool in load(text=TOOL).tools] == ["add"]
    load(custom_generate_function="agent.converse", tool_call_parser="qwen25")        # it may call agent.converse itself


@pytest.mark.parametrize("text, message", [
    ("def bare(a: int):\n    pass\ntools = [bare]", "tools: bare: .*docstring.*; give the function type hints, and a docstring"),
    ('def bare(a):\n    """Does.\n\n    Args:\n        a: b\n    """\ntools = [bare]', "tools: bare: .*type hint.*; give the function"),
    ('def bare(a: int):\n    """Does."""\ntools = [bare]', "tools: bare: .*; give the function type hints, and a docstring with an"),
    ("tools = [lambda a: a]", "tools: <function <lambda>.* is not a named function; write it with def"),
    ("tools = ['math.sqrt']", "tools: 'math.sqrt' is not a named function; write it with def"),
    ("tools = [add, add]", r"tools: \['add', 'add'\] have not all a name of their own; rename one"),
    ("apply_chat_template = False", "tools are written into the prompt by the chat template; set apply_chat_template=True"),
    ("tool_call_parser = None", r"tool_call_parser=None: how does the model write a call\? set it to 'qwen25' for .* llama3, "),
    ("tool_call_parser = 'qwen2.5'", r"tool_call_parser='qwen2.5': how does .* or another of SGLang's names: .*, qwen25, "),
    ("tools = []", "tool_call_parser has no effect without tools or custom_generate_function; remove it"),
    ("custom_generate_function = 'math.sqrt'", "custom_generate_function runs the conversation itself; remove tools, or call"),
    ("loss_type = 'sft'", "tools are called by no one with loss_type='sft'; describe them in the rows"),
    ("max_turns = 0", "max_turns=0 must be positive; set it to 1 or more"),
    ("tool_timeout_s = 0.0", "tool_timeout_s=0.0 must be positive; every wait has a limit")])
def test_wrong_tools(load, text, message):
    with pytest.raises(ValueError, match=message):
        load(text=TOOL + text)


def test_eval_config(load):
    cfg = load(rollout_shuffle=True, rm_type="math", eval_prompt_data=dict(
        a="e.jsonl", b=dict(reasoning_gym="chain_sum", size=3), c=dict(prompt_data="f.jsonl", rm_type="f1", input_key="q")))
    a, b, c = (base.eval_config(cfg, name) for name in "abc")
    assert (a.prompt_data, a.rm_type, a.rollout_shuffle, a.input_key) == ("e.jsonl", "math", False, "input")
    assert b.prompt_data == dict(reasoning_gym="chain_sum", size=3)
    assert (c.prompt_data, c.rm_type, c.input_key, cfg.rm_type) == ("f.jsonl", "f1", "q", "math")


# ---- Megatron's and SGLang's own arguments -----------------------------------------------------------------------------
@pytest.mark.parametrize("settings, message", [
    (dict(megatron=dict(recompute_granularty="full")),
     r"megatron\['recompute_granularty'\] is not a field of TransformerConfig or .*; did you mean 'recompute_granularity'\?"),
    (dict(megatron=dict(adam_bias="x")), r"megatron\['adam_bias'\] is not a field"),
    (dict(megatron=dict(attention_dropout="none")), r"megatron\['attention_dropout'\]='none' is str, but its default is 0.1; give a float"),
    (dict(megatron=dict(overlap_grad_reduce=1)), r"megatron\['overlap_grad_reduce'\]=1 is int, but its default is False; give a bool"),
    (dict(megatron=dict(tensor_model_parallel_size=2)), r"megatron\['tensor_model_parallel_size'\] is set by nanoslime.*configs/base.py"),
    (dict(megatron=dict(optimizer_cpu_offload=True)), "from the GPU to the CPU; set device='cuda', or remove it"),
    (dict(megatron=dict(optimizer_cpu_offload=True), device="cuda", dtype="float32"), "set dtype='bfloat16'"),
    (dict(megatron=dict(use_precision_aware_optimizer=True)), "comes with optimizer_cpu_offload by itself.*; remove it"),
    (dict(megatron=dict(optimizer_offload_fraction=0.5)), "set both, it to at most 1.0"),
    (dict(megatron=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=1.5), device="cuda"), "set both, it to at most"),
    (dict(megatron=dict(expert_model_parallel_size=4)), r"megatron\['expert_model_parallel_size'\] is set by nanoslime"),
    (dict(megatron=dict(lr=1.0)), r"megatron\['lr'\] is set by nanoslime"),
    (dict(sglang=dict(mem_fraction_statc=0.5)),
     r"sglang\['mem_fraction_statc'\] is not a field of ServerArgs; did you mean 'mem_fraction_static'\?"),
    (dict(sglang=dict(zzzzzzzz=1)), r"sglang\['zzzzzzzz'\] is not a field of ServerArgs; see sglang"),
    (dict(sglang=dict(disable_radix_cache="yes")), r"sglang\['disable_radix_cache'\]='yes' is str, but its default is False; give a bool"),
    (dict(sglang=dict(port=3000)), r"sglang\['port'\] is set by nanoslime from its own settings; remove it there"),
    (dict(sglang=dict(disaggregation_mode="prefill")), "sglang: disaggregation_mode are for servers that do only a part.*remove them"),
    (dict(sglang=dict(tp_size=2)), r"sglang\['tp_size'\] is set by nanoslime")])
def test_wrong_passthrough(load, settings, message):
    with pytest.raises(ValueError, match=message):
        load(**settings)


def test_right_passthrough(load):
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    cfg = load("--sglang.mem_fraction_static=0.5", "--sglang.attention_backend=triton",
               megatron=recompute | dict(attention_dropout=0, overlap_grad_reduce=True, sgd_momentum=0.5))
    assert cfg.megatron["recompute_num_layers"] == 1 and cfg.sglang["attention_backend"] == "triton"


# ---- Showing and saving ------------------------------------------------------------------------------------------------
def test_saved_as_json(load, tmp_path):
    cfg = load(text="def custom_rm(args, sample): return 1.0\n"
                    "import functools\n"
                    "dynamic_sampling_filter = functools.partial(custom_rm, None)\n"
                    "eval_prompt_data = dict(a=dict(prompt_data=lambda: []))", rollout_stop_token_ids=[1, 2])
    assert isinstance(cfg.dynamic_sampling_filter, functools.partial)
    base.save(cfg, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.keys() == base.FIELDS.keys() and saved == json.loads(json.dumps(base.to_dict(cfg)))
    assert saved["custom_rm"] == "run_run.custom_rm" and saved["lr"] == cfg.lr and saved["rollout_stop_token_ids"] == [1, 2]
    assert "lambda" in saved["eval_prompt_data"]["a"]["prompt_data"] and "custom_rm" in saved["dynamic_sampling_filter"]
