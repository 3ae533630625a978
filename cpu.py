"""
cpu.py: what lets SGLang run with no GPU? A platform plug-in of its own kind. (Megatron: gloo.py)

    sglang (all processes) --entry point "sglang.srt.platforms"--> activate() --"cpu.CpuPlatform"--> the class below
                                                                       |
                                                          None where there is a GPU: nothing of this file is used

Run:   nothing to run; `pip install -e .` registers the entry point, SGLang's processes find it by package metadata.
Test:  pytest tests/test_cpu.py
Knows nothing about: the rest of nanoslime; engines.py chooses the server arguments that go with it.
Left out on purpose: tensor parallelism of one engine (SGLang's pynccl insists on CUDA), page sizes above 1, Mamba, sparse
attention.

SGLang ships a CPU engine of its own, but it needs kernels that no package registry carries. Its interface for new
hardware is public, and plain torch can be that hardware: slow, exact, and the same server, scheduler and endpoints.
"""


# ---- SGLang: the platform plug-in -----------------------------------------------------------------------------------
def activate() -> str | None:
    """SGLang's entry point: the name of the platform class, or None to leave a machine with a GPU alone."""
    import torch                             # SGLang has it loaded already
    return None if torch.cuda.is_available() else "cpu.CpuPlatform"


def __getattr__(name: str):
    """Makes `cpu.CpuPlatform` on demand: its base classes live in SGLang, which takes seconds to import."""
    if name == "CpuPlatform":
        return platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def platform_class() -> type:
    """An SRTPlatform that computes everything with plain torch ("native") operations."""
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT             # out of tree: SGLang asks the methods below instead of its own tables

        def get_dispatch_key_name(self) -> str:
            return "native"                  # every fused layer's forward_native, written in torch

        def get_default_attention_backend(self) -> str:
            return "torch_native"            # scaled_dot_product_attention, one sequence at a time

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self):
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
            # index_head_dim is None here: sparse attention has a pool of its own.
            return lambda *args, index_head_dim, **kwargs: MLATokenToKVPool(*args, **kwargs)

        def get_paged_allocator_cls(self):
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

            def allocator(size, page_size, dtype, device, kvcache, need_sort):
                assert page_size == 1, f"page_size {page_size} on CPU; leave page_size unset in the sglang settings"
                return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
            return allocator

        def is_pin_memory_available(self, device=None) -> bool:
            return False                     # pinned memory is memory a GPU may read

        def empty_cache(self) -> None:
            pass                             # SGLang's own runs the garbage collector: a second at each flush_cache

        def apply_server_args_defaults(self, server_args) -> None:
            from sglang.srt.server_args import add_deterministic_attention_backend_choices
            add_deterministic_attention_backend_choices(["torch_native"])

        def init_backend(self) -> None:      # runs in every worker, before a model exists
            replace_gpu_parts()

    return CpuPlatform


def replace_gpu_parts() -> None:
    """The places where SGLang calls CUDA or Triton, or shapes things for Intel's kernels, without asking the platform."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    import sglang.srt.layers.rotary_embedding.factory as rope_factory
    import sglang.srt.layers.sampler as sampler
    import sglang.srt.model_executor.model_runner as model_runner
    import sglang.srt.state_capturer.base as capturer
    import torch
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    torch.cuda.synchronize = lambda device=None: None              # /weights_checker waits for "the GPU" first
    # NOTE: it rounds a layer's width up to a multiple of 32, and in experts what was added stays uninitialised.
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda model_config, *unused: model_config
    # MLA: without a rope scaling too, and always over the cached latents, which is all that torch_native can read.
    rope_factory.get_rope_cpu = lambda *args: rope_factory.get_rope(*args[:-1])                # the last is the device
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    capture_routing(capturer)
    # These two run only with enable_deterministic_inference:
    batch_invariant_ops.enable_batch_invariant_mode = make_products_batch_invariant
    sampler.murmur_hash32 = murmur_hash32


def capture_routing(capturer) -> None:
    """Makes `return_routed_experts` work: SGLang notes each token's experts in pinned memory, and copies them late."""
    import types
    import torch
    base, at_end = capturer.BaseTopkCapturer, capturer.BaseTopkCapturer.on_forward_end

    def init(self, num_tokens, max_batch_size, num_layers, topk_size, device, name, device_topk_size=None):
        self.num_layers, self.topk_size = num_layers, topk_size
        slots = torch.zeros(num_tokens, num_layers, topk_size, dtype=torch.int32)       # of the KV cache
        self.host_cache = types.SimpleNamespace(buffer=slots)
        # As many rows for one batch, because prompts are not cut here.
        self.device_cache = capturer.BaseDeviceCache(num_tokens, num_layers, device_topk_size or topk_size, device, name)

    base.__init__ = init
    # NOTE: "later" is after the next forward pass, and the copy from the CPU to the CPU is none: it would show that pass.
    base.on_forward_end = lambda self, no_copy_to_cpu, **batch: at_end(self, **batch)


def make_products_batch_invariant(*unused) -> None:
    """Matrix products whose rows do not depend on how many rows there are, in the last bit too.

    NOTE: MKL has other kernels for few rows and for what is over a multiple of 4 (with two threads: up to 12 rows). How
    many requests decode together is a matter of arrival times, so without this the same seeds would not give the same
    tokens twice. At multiples of 16 rows, on AVX2 and AVX-512, every row came out the same; so we fill up with zeros.
    """
    import torch

    def filled_up(multiply):
        def product(x, weight, *args, **kwargs):                   # x [T, H]
            rows = x.shape[0]
            if x.dim() != 2 or weight.dim() != 2 or rows % 16 == 0:
                return multiply(x, weight, *args, **kwargs)
            x = torch.nn.functional.pad(x, (0, 0, 0, -rows % 16))  # [T rounded up, H]
            return multiply(x, weight, *args, **kwargs)[:rows]     # [T, out]
        return product

    torch.nn.functional.linear = filled_up(torch.nn.functional.linear)   # every layer
    torch.matmul = filled_up(torch.matmul)                               # the vocabulary


def murmur_hash32(seed, positions, columns):
    """MurmurHash3 (x86, 32 bit) of (seed, position, column): the same numbers as SGLang's Triton kernel of this name.

    seed [N] 64 bit, positions [N], columns [V] -> [N, V] int64 holding 32-bit values. It is the random source of a
    request with a `sampling_seed`: noise for each (token position, vocabulary entry), whatever else is in the batch.
    """
    import torch
    mask = 0xFFFFFFFF

    def rotate(x, bits):                     # left, within 32 bits
        return ((x << bits) | (x >> (32 - bits))) & mask

    def mix(h, block):                       # products wrap at 64 bits, which leaves the low 32 right
        block = rotate((block * 0xCC9E2D51) & mask, 15)
        return (rotate(h ^ (block * 0x1B873593 & mask), 13) * 5 + 0xE6546B64) & mask

    seed, positions = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]  # [N, 1]
    h = torch.zeros_like(seed)
    for block in (seed & mask, (seed >> 32) & mask, positions & mask, columns.to(torch.int64)[None, :]):
        h = mix(h, block)                    # [N, 1], and [N, V] after the last
    h = h ^ 16                               # the length of what was hashed, in bytes
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    return h ^ (h >> 16)                     # [N, V]
