"""
GSPO on GLM-4.5 (355B-A32B) with 8 nodes of 8 H200, both sides sharing them in turns.

    python train.py configs/glm4p5_355b_a32b_grpo.py --dry-run       on a laptop: what would run where, and whether it fits
    python train.py configs/glm4p5_355b_a32b_grpo.py --ray_address=auto --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "zai-org/GLM-4.5"
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

# tp 8 x pp 4 x cp 2 x dp 1; 92 layers = 4 x 23, of which 3 are dense; 10 of a layer's 160 experts on each GPU
actor_num_gpus = 64
tensor_model_parallel_size = 8
sequence_parallel = True          # required with experts
pipeline_model_parallel_size = 4
context_parallel_size = 2
expert_model_parallel_size = 16   # = tp * cp * dp: each expert once, so its optimizer state is not split further
max_tokens_per_gpu = 16384        # x cp 2 = 32,768 tokens a micro-batch
colocate = True
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
rollout_num_gpus_per_engine = 32  # 2 engines, each of 4 attention groups of 8 GPUs; 706 GB of weights:
#                                   21 GB of experts a GPU, and an eighth of all else
sglang = dict(mem_fraction_static=0.7, enable_dp_attention=True, dp_size=4)

advantage_estimator = "gspo"      # one ratio for the whole answer: a token's own changes with the experts it is sent to
eps_clip, eps_clip_high = 1e-4, 2e-4
use_tis, tis_level = True, "geometric"   # trainer and engine may choose other experts for the same token
lr = 1e-6
save_interval = 20
