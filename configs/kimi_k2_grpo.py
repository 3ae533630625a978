"""
GSPO on Kimi-K2-Instruct (1T-A32B) with 32 nodes of 8 H200, both sides sharing them in turns.

    python train.py configs/kimi_k2_grpo.py --dry-run            on a laptop: what would run where, and whether it fits
    python train.py configs/kimi_k2_grpo.py --ray_address=auto --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "moonshotai/Kimi-K2-Instruct"
prompt_data = "data/dapo-math-17k.jsonl"  # yours, as zhuzilin/dapo-math-17k: {"prompt": [chat messages], "label": "34"}
input_key = "prompt"
label_key = "label"
apply_chat_template = True
rm_type = "deepscaler"
on_reward_error = "skip"          # math-verify gives up on some odd answers: count them, go on

# 128 prompts x 8 samples = 1,024 samples = 4 optimizer steps of 256
rollout_batch_size = 128
n_samples_per_prompt = 8
num_steps_per_rollout = 4
num_rollout = 500
rollout_shuffle = True
over_sampling_batch_size = 256
dynamic_sampling_filter = "hooks.check_reward_nonzero_std"
rollout_max_response_len = 32768

# tp 8 x pp 8 x cp 4 x dp 1; 61 layers = 7 x 8 + 5; 12 of a layer's 384 experts on each GPU
actor_num_gpus = 256
tensor_model_parallel_size = 8
sequence_parallel = True          # required with experts
pipeline_model_parallel_size = 8
context_parallel_size = 4
expert_model_parallel_size = 32   # = tp * cp * dp: each expert once
max_tokens_per_gpu = 16384        # x cp 4 = 65,536 tokens a micro-batch
colocate = True
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
                num_layers_in_last_pipeline_stage=5)
rollout_quantization = "fp8"      # as the published checkpoint, which training reads as bf16
rollout_num_gpus_per_engine = 16  # 16 engines, each of 8 attention groups of 2 GPUs; 1,029 GB of weights:
#                                   63 GB of experts a GPU, and half of all else
sglang = dict(mem_fraction_static=0.7, enable_dp_attention=True, dp_size=8, trust_remote_code=True)   # its tokenizer is code
sglang_server_concurrency = 1024  # 128 a group

advantage_estimator = "gspo"      # one ratio for the whole answer: a token's own changes with the experts it is sent to
eps_clip, eps_clip_high = 3e-4, 4e-4
use_tis, tis_level = True, "geometric"   # trainer and engine may choose other experts for the same token
lr = 1e-6
save_interval = 20
