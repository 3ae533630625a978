"""
test_convert.py: convert.py against transformers' own checkpoints and Megatron's own parameters.

    tiny HF model --save_pretrained--> folder --convert--> shards --convert--> folder --from_pretrained--> equal?

Run:   pytest tests/test_convert.py       CPU only, no network, about 60 s (most of it imports)
Left out on purpose: shards of families with experts under each layout, which tests/test_families.py goes through.
The vocabulary of 101 is odd on purpose: padding is exercised at every TP size.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convert
import families
import fp8
import helpers
import test_families

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)

CASES = {  # name -> (config class, what differs from SIZES)
    "qwen3": ("Qwen3Config", dict(head_dim=32)),  # 4 heads of 32 in a hidden size of 64: o_proj is not square
    "qwen3_tied": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen2": ("Qwen2Config", dict()),
    "qwen2_tied": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "llama": ("LlamaConfig", dict(head_dim=32, rope_parameters=LLAMA3_ROPE)),
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True,
                                       rope_parameters=dict(rope_type="default", rope_theta=1e5))),
}


def make_config(case, **changes):
    import transformers

    cls, extra = CASES[case]
    return getattr(transformers, cls)(**(SIZES | extra | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per case, written by transformers: every parameter random, norms and biases too."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("models")
    for seed, case in enumerate(CASES):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(case))
        for p in model.parameters():  # NOTE: norms start at 1 and biases at 0, which would hide a swap
            torch.nn.init.normal_(p)
        model.save_pretrained(root / case)
        (root / case / "tokenizer.json").write_text("{}")  # carried over by save_hf
        (root / case / "optimizer.pt").write_text("x")  # not carried over
    return root


@pytest.fixture
def broken(folders, tmp_path):
    """A copy of the qwen3 folder in several shards, to be damaged by a test."""
    reader = convert.HFReader(folders / "qwen3")
    tensors = ((n, reader(n)) for n in reader.names())
    convert.save_hf(tmp_path / "m", folders / "qwen3", reader.hf_config, tensors, max_shard_bytes=100_000)
    return tmp_path / "m"


def megatron_names(cfg):
    """All parameters of an uncut Megatron model, by the table."""
    rules = families.family(cfg).rules(cfg)
    return {r.megatron.format(i=i) for r in rules if not r.load_only for i in range(cfg.num_hidden_layers)}


# ---- round trip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_exact(folders, case, tp_size):
    reader = convert.HFReader(folders / case)
    cfg, back = reader.hf_config, {}
    for name in sorted(megatron_names(cfg)):
        shards = [families.to_megatron(cfg, name, reader, r, tp_size) for r in range(tp_size)]
        assert len({s.shape for s in shards}) == 1, f"{name}: every TP rank has the same shape"
        for hf_name, tensor in families.to_hf(cfg, name, shards):
            assert hf_name not in back, f"{hf_name} written twice"
            back[hf_name] = tensor
    assert back.keys() == families.hf_names(cfg) == set(reader.names())
    for name, tensor in back.items():
        assert torch.equal(tensor, reader(name)), name


def test_tied_output_layer_loads_the_embedding_and_is_written_once(folders):
    # The last pipeline stage of a tied model owns a copy under the name output_layer.weight.
    reader = convert.HFReader(folders / "qwen3_tied")
    head = families.to_megatron(reader.hf_config, "output_layer.weight", reader, 0, 1)
    assert torch.equal(head[:101], reader("model.embed_tokens.weight"))
    assert families.to_hf(reader.hf_config, "output_layer.weight", [head]) == []


def test_tp1_copies_nothing_but_qkv(folders):
    reader = convert.HFReader(folders / "qwen3")
    for name in sorted(megatron_names(reader.hf_config)):
        shard = families.to_megatron(reader.hf_config, name, reader, 0, 1)
        ours = shard.untyped_storage().data_ptr()
        for hf_name, t in families.to_hf(reader.hf_config, name, [shard]):
            is_view = t.untyped_storage().data_ptr() == ours
            assert is_view == ("linear_qkv" not in name), hf_name


# ---- layout, by direct definition -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "llama"])
def test_qkv_computes_the_same_heads(folders, case, tp_size):
    """Cut each rank's fused projection as Megatron's attention does; compare every head with HF's projections."""
    reader = convert.HFReader(folders / case)
    cfg = reader.hf_config
    groups, heads, d = 2, 4, families.head_dim_of(cfg)
    x = torch.randn(5, 64, dtype=torch.float64)  # [T, H]
    hf = {}
    for p in "qkv":
        y = x @ reader(f"model.layers.1.self_attn.{p}_proj.weight").double().T
        if case == "qwen2":
            y = y + reader(f"model.layers.1.self_attn.{p}_proj.bias").double()
        hf[p] = y.view(5, -1, d)  # [T, heads, D]
    for r in range(tp_size):
        name = "decoder.layers.1.self_attention.linear_qkv."
        mixed = x @ families.to_megatron(cfg, name + "weight", reader, r, tp_size).double().T
        if case == "qwen2":
            mixed = mixed + families.to_megatron(cfg, name + "bias", reader, r, tp_size).double()
        mixed = mixed.view(5, groups // tp_size, heads // groups + 2, d)  # [T, G/tp, A/G + 2, D]
        for local in range(groups // tp_size):
            g = r * (groups // tp_size) + local
            torch.testing.assert_close(mixed[:, local, :2], hf["q"][:, 2 * g : 2 * g + 2])
            torch.testing.assert_close(mixed[:, local, 2], hf["k"][:, g])
            torch.testing.assert_close(mixed[:, local, 3], hf["v"][:, g])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_mlp_of_the_shards_sums_to_the_whole(folders, tp_size):
    reader = convert.HFReader(folders / "llama")
    cfg = convert.load_hf_config(folders / "llama")
    cfg.num_key_value_heads = 4  # only so that check_tp lets tp 4 pass: the MLP does not look at it
    w = {p: reader(f"model.layers.2.mlp.{p}_proj.weight").double() for p in ("gate", "up", "down")}
    x, silu = torch.randn(5, 64, dtype=torch.float64), torch.nn.functional.silu  # x [T, H]
    whole = (silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T  # [T, H]
    parts = 0
    for r in range(tp_size):
        names = [f"decoder.layers.2.mlp.linear_fc{k}.weight" for k in (1, 2)]
        fc1, fc2 = (families.to_megatron(cfg, name, reader, r, tp_size).double() for name in names)
        gate, up = (x @ fc1.T).chunk(2, dim=-1)  # [T, F/tp] each, as Megatron's gated linear unit cuts it
        parts = parts + (silu(gate) * up) @ fc2.T  # row-parallel: the all-reduce is this sum
    torch.testing.assert_close(parts, whole)


def test_vocabulary_padding_is_zeros_at_the_end(folders):
    assert [families.padded_vocab_size(v, t) for v, t in ((101, 1), (101, 2), (151936, 16), (128256, 8))] == [
        104, 112, 151936, 128256]
    reader = convert.HFReader(folders / "qwen3")
    shards = [families.to_megatron(reader.hf_config, "output_layer.weight", reader, r, 2) for r in range(2)]
    full = torch.cat(shards)  # [V_padded, H]
    assert full.shape == (112, 64) and torch.equal(full[:101], reader("lm_head.weight")) and not full[101:].any()
    tiny = torch.ones(3, 2)  # a vocabulary that ends before the last rank: that rank is all padding
    assert not families.VOCAB.shard(tiny, 1, 2).any() and families.VOCAB.shard(tiny, 1, 2).shape == (8, 2)


# ---- against a real Megatron model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron():
    """Megatron's groups on one process: a gloo world of one, from a file store (no port to collide on)."""
    import tempfile

    from megatron.core import parallel_state

    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_and_rope_match_a_real_gptmodel(folders, megatron, case):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from transformers import AutoModelForCausalLM

    reader = convert.HFReader(folders / case)
    cfg = reader.hf_config
    fields, gpt_kwargs = families.megatron_config(cfg)
    gpt_kwargs["vocab_size"] = families.padded_vocab_size(gpt_kwargs["vocab_size"], 1)
    config = TransformerConfig(**fields, use_cpu_initialization=True, persist_layer_norm=False)
    spec = get_gpt_layer_local_spec(qk_layernorm=fields["qk_layernorm"], normalization=fields["normalization"])
    model = GPTModel(config, spec, **gpt_kwargs)

    params = dict(model.named_parameters())
    assert params.keys() == megatron_names(cfg)
    for name, p in params.items():
        assert families.to_megatron(cfg, name, reader, 0, 1).shape == p.shape, name
    # Rope: the frequencies themselves, so theta, head_dim and llama3 scaling all agree with transformers.
    hf_rope = AutoModelForCausalLM.from_pretrained(folders / case).model.rotary_emb
    frequencies, factor = families.rope_frequencies(cfg)
    assert torch.equal(frequencies, hf_rope.inv_freq) and factor == hf_rope.attention_scaling == 1.0


def test_models_that_cannot_stand_where_they_are_given(folders, tmp_path):
    """A critic is no policy; a reference or a teacher has the trainer's shape. That critics load and are written: test_layouts.py."""
    policy = convert.load_hf_config(folders / "qwen3")
    critic = families.value_config(policy)
    assert families.hf_names(critic) == families.hf_names(policy) - {"lm_head.weight"} | {"score.weight"}
    assert not families.has_value_head(policy) and families.family(critic)
    families.check_policy(policy)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification, a critic or a reward model; give a causal language model"):
        families.check_policy(critic)
    convert.check_same_shape(policy, folders / "qwen3")
    for other, what in (("qwen2", "model_type = qwen2"), ("qwen3_tied", "tie_word_embeddings = True")):
        with pytest.raises(ValueError, match=f"has {what}, the trained model .*same shape .*opd_teacher_url"):
            convert.check_same_shape(policy, folders / other)


def test_transformer_engine_names_are_the_same_rules():
    cfg = make_config("qwen3")
    for te, local in (("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                      ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")):
        found = families.find_rule(cfg, f"decoder.layers.2.{te}")
        assert found == families.find_rule(cfg, f"decoder.layers.2.{local}") and found[1] == 2
    beyond, unknown = "decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.0.mlp.router.weight"
    for name in (beyond, unknown, "value_head.weight"):
        with pytest.raises(KeyError, match="no rule of qwen3 .3 layers. covers"):
            families.find_rule(cfg, name)


# ---- refusals, by name ----------------------------------------------------------------------------------------------

YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("qwen2", dict(use_sliding_window=True, sliding_window=64, max_window_layers=1), "layer_types.*sliding_att"),
        ("qwen2", dict(use_sliding_window=True, sliding_window=64, max_window_layers=3), "use_sliding_window"),
        ("qwen3", dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types"),
        ("qwen3", dict(rope_parameters=YARN), "rope type 'yarn' is not covered"),
        ("llama", dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), "partial_rotary_factor"),
        ("llama", dict(attention_bias=True), "attention_bias"),
        ("llama", dict(mlp_bias=True), "mlp_bias"),
        ("qwen3", dict(attention_bias=True), "attention_bias"),
        ("qwen3", dict(attention_dropout=0.1), "attention_dropout"),
        ("qwen3", dict(hidden_act="gelu"), "hidden_act"),
        ("qwen3", dict(architectures=["Qwen3ForTokenClassification"]), "architectures"),
        ("qwen3", dict(architectures=["Qwen3ForSequenceClassification"]), "id2label.*a critic has one label"),
        ("qwen2", dict(logit_softcap=30.0), "logit_softcap.*does not know this key"),
        ("llama", dict(sliding_window=64), "sliding_window.*does not know this key"),
    ],
)
def test_config_that_is_not_covered_is_refused_by_name(case, changes, message):
    cfg = make_config(case, **changes)
    with pytest.raises(ValueError, match=message):
        families.family(cfg)
    with pytest.raises(ValueError, match=message):  # so no model can be built from it either
        families.megatron_config(cfg)


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("deepseek_v3", dict(norm_topk_prob=False), "norm_topk_prob.*only True is covered"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func.*only 'sigmoid' is covered"),
        ("deepseek_v3", dict(topk_method="greedy"), "topk_method.*only 'noaux_tc' is covered"),
        ("deepseek_v3", dict(moe_layer_freq=2), "moe_layer_freq"),
        ("deepseek_v3", dict(topk_group=2), "topk_group.*its two best experts"),
        ("deepseek_v3", dict(attention_bias=True), "attention_bias"),
        ("deepseek_v3", dict(index_topk=2048), "index_topk.*does not know this key"),  # V3.2's sparse attention
        ("qwen3_moe", dict(mlp_only_layers=[1]), "mlp_only_layers.*SGLang gives every layer"),
        ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step.*SGLang gives every layer"),
        ("glm4", dict(rope_parameters=YARN), "rope type 'yarn' is not covered"),
    ],
)
def test_experts_and_attention_that_are_not_covered_are_refused_by_name(family, changes, message):
    import transformers

    cls, extra = test_families.FAMILIES[family]
    cfg = getattr(transformers, cls)(**(test_families.SIZES | extra | changes))
    with pytest.raises(ValueError, match=message):
        families.family(cfg)


def test_experts_and_stages_that_do_not_divide_are_refused():
    import transformers

    cls, extra = test_families.FAMILIES["qwen3_moe"]
    cfg = getattr(transformers, cls)(**(test_families.SIZES | extra))  # 8 experts of ffn 16, 4 layers
    for sizes, message in (((1, 3), "8 experts cannot be dealt to ep 3"), ((1, 1, 32), "ffn size 16 is no multiple of etp 32")):
        with pytest.raises(ValueError, match=message):
            families.check_tp(cfg, *sizes)
    with pytest.raises(ValueError, match="qwen3 has no experts; remove expert_model_parallel_size=2"):
        families.check_tp(make_config("qwen3"), 1, 2)
    first = "num_layers_in_first_pipeline_stage"
    for pp, vpp, megatron, message in ((3, None, {}, "4 layers cannot be dealt to pp 3"), (2, 3, {}, "no multiple of virtual"),
                                       (3, None, {first: 1}, r"\(3 over 2 of them\)"), (1, None, {first: 2}, "4 layers"),
                                       (3, None, {first: 4}, "4 layers"), (2, None, {first: 5}, "4 layers")):
        settings = helpers.make_cfg(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, megatron=megatron)
        with pytest.raises(ValueError, match=message):
            families.check_stages(cfg, settings)
    families.check_stages(cfg, helpers.make_cfg(pipeline_model_parallel_size=2, megatron={first: 1}))


def test_smollm2_and_old_rope_keys_pass(tmp_path):
    # The keys of SmolLM2's config.json as published: old rope keys and harmless extras.
    raw = dict(SIZES, model_type="llama", architectures=["LlamaForCausalLM"], is_llama_config=True, pretraining_tp=1,
               rope_interleaved=False, rope_scaling=None, rope_theta=100000, rms_norm_eps=1e-5, torch_dtype="bfloat16",
               tie_word_embeddings=True, attention_bias=False, mlp_bias=False, initializer_range=0.041,
               unk_token_id=0, _model_name_or_path="SmolLM2",
               **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    cfg = convert.load_hf_config(tmp_path)
    fields, gpt_kwargs = families.megatron_config(cfg)
    assert families.rope_frequencies(cfg)[0][1] == pytest.approx(100000 ** (-2 / 16))
    assert gpt_kwargs["share_embeddings_and_output_weights"] is True
    assert (fields["num_layers"], fields["kv_channels"], fields["layernorm_epsilon"]) == (3, 16, 1e-5)


def test_tp_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="2 kv heads .* cannot be cut over tp 4; set tensor_model_parallel_size"):
        families.check_tp(make_config("qwen3"), 4)
    with pytest.raises(ValueError, match="ffn size 97"):
        families.check_tp(make_config("qwen3", intermediate_size=97), 2)


def test_folders_and_types_that_are_not_there(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(name, allow_patterns):  # what snapshot_download does with no network, minus 25 s of retries
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for name, why in (("/no/such/folder", "no such folder"), ("Qwen/NoSuch", "the hub did not give it"),
                      (str(tmp_path), "holds no config.json")):
        with pytest.raises(ValueError, match=f"model folder {name} not found: .*{why}.*; give a folder with"):
            convert.load_hf_config(name)
    (tmp_path / "config.json").write_text('{"model_type": "mamba7"}')
    with pytest.raises(ValueError, match="'mamba7' has no rule table; .*: deepseek_v3, glm4, .*qwen3_moe; or add a table"):
        convert.load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="config.json cannot be read"):
        convert.load_hf_config(tmp_path)


def test_hub_name_is_read_from_its_snapshot(folders, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folders / "llama"))
    assert "lm_head.weight" in convert.HFReader("someone/llama").names()


# ---- reading damaged folders ----------------------------------------------------------------------------------------


def test_reader_on_a_sharded_folder(folders, broken):
    whole, sharded = convert.HFReader(folders / "qwen3"), convert.HFReader(broken)
    assert len(sharded.files) > 2 and set(sharded.names()) == set(whole.names())
    assert all(torch.equal(sharded(n), whole(n)) for n in whole.names())


def test_reader_refuses_a_missing_shard(broken):
    sorted(broken.glob("model-*"))[1].unlink()
    with pytest.raises(ValueError, match="model-00002-of-.*is missing"):
        convert.HFReader(broken)


@pytest.mark.parametrize("keep", [0, 4, 5000])
def test_reader_refuses_a_truncated_file(broken, keep):
    os.truncate(sorted(broken.glob("model-*"))[0], keep)
    with pytest.raises(ValueError, match="model-00001-of-.*is damaged or cut short"):
        convert.HFReader(broken)


def test_reader_accounts_for_every_name(broken):
    from safetensors.torch import load_file, save_file

    file = sorted(broken.glob("model-*"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(ValueError, match=f"lacks: {name}"):
        convert.HFReader(broken)
    save_file(tensors | {"model.layers.0.adapter.weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="unknown tensors: model.layers.0.adapter.weight"):
        convert.HFReader(broken)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}, file)  # an old buffer
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in convert.HFReader(broken).names()
    (broken / convert.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="index.json is damaged"):
        convert.HFReader(broken)
    (broken / convert.INDEX).unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        convert.HFReader(broken)


def test_stored_twin_of_a_tied_embedding_is_ignored(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    source = folders / "llama_tied"
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(101, 64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert set(convert.HFReader(tmp_path).names()) == set(tensors)


# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3", "llama_tied"])
@pytest.mark.parametrize("max_shard_bytes", [60_000, 5 * 10**9])
def test_save_hf_loads_in_transformers(folders, tmp_path, case, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    reader = convert.HFReader(folders / case)
    cfg = reader.hf_config

    def stream():  # as the trainer does: Megatron shards of 2 ranks, bf16, gathered one by one
        for name in sorted(megatron_names(cfg)):
            shards = [families.to_megatron(cfg, name, reader, r, 2).bfloat16() for r in (0, 1)]
            yield from families.to_hf(cfg, name, shards)

    convert.save_hf(tmp_path / "new" / "out", folders / case, cfg, stream(), max_shard_bytes)
    files = sorted(p.name for p in (tmp_path / "new" / "out").iterdir())
    assert "tokenizer.json" in files and "generation_config.json" in files and "optimizer.pt" not in files
    assert ("model.safetensors" in files) == (max_shard_bytes > 10**9)
    shards = list((tmp_path / "new" / "out").glob("*.safetensors"))
    assert all(s.stat().st_size < max_shard_bytes + 5_000 for s in shards)  # 5,000: the header
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "out"]  # nothing left over beside it

    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        if name in families.hf_names(cfg):
            assert torch.equal(tensor, reader(name).bfloat16()), name


def test_save_hf_never_leaves_half_a_checkpoint(folders, tmp_path):
    source = folders / "qwen3"
    reader = convert.HFReader(source)

    def killed():
        yield from [(n, reader(n)) for n in reader.names()[:5]]
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert.save_hf(out, source, reader.hf_config, killed())
    assert not list(tmp_path.iterdir())
    everything = [(n, reader(n)) for n in reader.names()]
    convert.save_hf(out, source, reader.hf_config, everything)
    with pytest.raises(AssertionError, match=f"missing: {everything[0][0]}; extra: ;"):
        convert.save_hf(out, source, reader.hf_config, everything[1:])
    with pytest.raises(AssertionError, match="given twice"):
        convert.save_hf(out, source, reader.hf_config, everything + everything[:1])
    assert len(convert.HFReader(out).names()) == len(everything)  # the older checkpoint stands
    # A kill between the two renames leaves only .old: the next save, even a failing one, puts it back first.
    out.rename(tmp_path / "out.old")
    with pytest.raises(KeyboardInterrupt):
        convert.save_hf(out, source, reader.hf_config, killed())
    assert len(convert.HFReader(out).names()) == len(everything)
    # A complete one replaces it, and none of the older files stays behind.
    convert.save_hf(out, source, reader.hf_config, everything, max_shard_bytes=100_000)
    (tmp_path / "out.old" / "left").mkdir(parents=True)  # a kill just after the second rename
    convert.save_hf(out, source, reader.hf_config, everything)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and not list(out.glob("model-*"))
    (tmp_path / "notes").mkdir()
    for path in (source, tmp_path / "notes"):  # never the source model, never a folder that is no checkpoint
        with pytest.raises(ValueError, match="is not replaced"):
            convert.save_hf(path, source, reader.hf_config, everything)
    assert convert.HFReader(source).names()


def test_save_hf_copies_what_it_is_given(folders, tmp_path):
    # The weight sync gathers every tensor into the same buffer, so what was yielded is overwritten by the next one.
    reader = convert.HFReader(folders / "qwen2")
    buffer = torch.empty(101 * 64)

    def stream():
        for name in reader.names():
            tensor = reader(name)
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    convert.save_hf(tmp_path / "out", folders / "qwen2", reader.hf_config, stream())
    saved = convert.HFReader(tmp_path / "out")
    assert all(torch.equal(saved(name), reader(name)) for name in reader.names())


# ---- command line ---------------------------------------------------------------------------------------------------


def test_check_command(folders, broken):
    report = convert.check(folders / "qwen3_tied")
    model_parameters = 101 * 64 + 64 + 3 * (2 * 64 + 2 * 32 + 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96)
    assert f"{model_parameters:,} in F32" in report and "qwen3: 3 layers, tied embeddings" in report
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"mystery_scale": 2.0}))
    with pytest.raises(ValueError, match="mystery_scale"):  # the reader alone refuses it, before any model is built
        convert.HFReader(broken)
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight \(64, 96\) instead of \(64, 128\)"):
        convert.check(broken)
    command = [sys.executable, "convert.py", "check", "/no/such"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and done.stderr.startswith("error: model folder /no/such not found"), done.stderr


def run_command(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "convert.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_tied"])
def test_compare_names_a_planted_tensor(folders, tmp_path, case):
    from safetensors.torch import load_file, save_file

    source, other = folders / case, tmp_path / "other"
    shutil.copytree(source, other)
    assert "compared, 0 differ" in convert.compare(source, other)
    tensors, name = load_file(other / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.001      # a smaller one, to be outranked
    tensors[name][3, 5] += 40.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = convert.compare(source, other)
    assert "compared, 2 differ" in report and f"most        {name}: " in report and "largest |a - b| = 4.00e+01" in report
    assert float(report.split("|a| = ")[1].split(",")[0]) == pytest.approx(
        40.0 / convert.HFReader(source)(name).norm().item(), rel=0.01)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert f"most        {name}: " in convert.compare(source, other)
    with pytest.raises(ValueError, match="not the same model: only one has .*; compare a model with its own conversion"):
        convert.compare(folders / "qwen2", folders / "qwen3")


def test_check_computes_with_the_folder(folders, tmp_path):
    """In a process each, as Megatron's groups are made once in a process. Two folders: transformers on both."""
    done = run_command("check", folders / "qwen2", "--log-probs", "--tokens=40")
    assert done.returncode == 0, done.stderr
    assert "log-probs   transformers and our model, 40 tokens in fp32" in done.stdout
    assert float(done.stdout.split("largest ")[1]) < 1e-4
    other = tmp_path / "other"
    shutil.copytree(folders / "qwen2", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))       # the same tensors, another computation
    assert "0 differ" in convert.compare(folders / "qwen2", other)
    assert float(convert.check_log_probs(folders / "qwen2", other, 16).split("largest ")[1]) > 1e-3
    assert float(convert.check_log_probs(other, other, 16).split("largest ")[1]) == 0


def test_a_killed_conversion_leaves_nothing_under_the_name(folders, tmp_path):
    """SIGKILL while the stream is half-way; the next one starts from the beginning."""
    code = ("import convert, os, signal, sys\n"
            "def shown(items, total, title):\n"
            "    for i, item in enumerate(items):\n"
            "        if i == total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        yield item\n"
            "convert.shown = shown\n"
            "convert.requantize(*sys.argv[1:], to_fp8=True)\n")
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, folders / "qwen3", out], cwd=ROOT, capture_output=True, timeout=500)
    assert done.returncode == -9 and [p.name for p in tmp_path.iterdir()] == ["out.tmp"]
    done = run_command("to-fp8", folders / "qwen3", out)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and convert.HFReader(out).fp8
    done = run_command("to-fp8", folders / "qwen3", tmp_path)                # a folder with other things in it
    assert done.returncode == 1 and "exists, and nothing is replaced here; give another path" in done.stderr and out.exists()


# ---- Megatron checkpoints -------------------------------------------------------------------------------------------


def save_checkpoints(rank, world, port, outs, changes):
    """outs: {model folder: its checkpoint}"""
    import model

    cfg = helpers.make_cfg(actor_num_gpus=world, tensor_model_parallel_size=2, **changes)
    grid = model.init_distributed(cfg, rank, world, "127.0.0.1", port)
    for folder, out in outs.items():
        model.MegatronModel(cfg, grid, folder, 1).save(Path(out), {"step": 0})


def load_checkpoint(rank, world, port, folder, other, checkpoint):
    """Under tp 2, into a model that began with other weights -> whether all of them are the folder's then."""
    import model

    cfg = helpers.make_cfg(actor_num_gpus=world, tensor_model_parallel_size=2)
    grid = model.init_distributed(cfg, rank, world, "127.0.0.1", port)
    ours = model.MegatronModel(cfg, grid, other, 1)
    ours.load(Path(checkpoint))
    have, reader = dict(ours.snapshot()), convert.HFReader(folder)
    return [name for name, tensor in have.items()
            if not torch.equal(tensor, families.to_megatron(reader.hf_config, name, reader, rank, 2))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder per family of test_families.py."""
    root = tmp_path_factory.mktemp("families")
    for name in test_families.FAMILIES:
        test_families.write(name, root / name)
    return root


@pytest.fixture(scope="module")
def checkpoint(folders, tiny, tmp_path_factory):
    """Of a model with a padded vocabulary and pieces of two ranks, sent through the trainers' own save."""
    out = tmp_path_factory.mktemp("checkpoint") / "iter_0000000"
    dense = test_families.FAMILIES.keys() - test_families.EXPERTS
    outs = {str(tiny / name): str(tiny / f"{name} checkpoint") for name in dense}      # for the tests at the end of the file
    helpers.run_workers(save_checkpoints, 2, {str(folders / "qwen2"): str(out)} | outs, {}, limit_s=300)
    return out


def test_megatron_to_hf_is_bit_exact(folders, checkpoint, tmp_path):
    out, reader = tmp_path / "out", convert.HFReader(folders / "qwen2")
    done = run_command("megatron-to-hf", checkpoint, out, f"--hf={folders / 'qwen2'}")
    assert done.returncode == 0, done.stderr
    saved = convert.HFReader(out)
    assert set(saved.names()) == set(reader.names())
    assert all(torch.equal(saved(name), reader(name)) for name in reader.names())


def test_megatron_to_hf_reads_one_layer_at_a_time(folders, checkpoint, monkeypatch):
    """Memory: a model of any depth needs one layer's matrix."""
    import checkpoints
    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: sizes.append(empty(*a, **kw)) or sizes[-1])
    for _ in checkpoints.CheckpointReader(checkpoint).hf_tensors(convert.load_hf_config(folders / "qwen2")):
        pass
    assert max(t.numel() for t in sizes) == 2 * 96 * 64                      # fc1 of one of the three layers


def test_megatron_to_hf_refuses_what_does_not_fit(folders, checkpoint, tmp_path):
    for source, message in (("qwen3", "of another model: .*; give the Hugging"), ("qwen2_tied", "embeddings are not tied; give")):
        with pytest.raises(ValueError, match=message):
            convert.megatron_to_hf(checkpoint, tmp_path / "out", folders / source)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    piece = max(broken.glob("*.distcp"), key=lambda p: p.stat().st_size)
    piece.write_bytes(piece.read_bytes()[:-100])
    with pytest.raises(ValueError, match="distcp is missing or cut short; copy"):
        convert.megatron_to_hf(broken, tmp_path / "out", folders / "qwen2")
    piece.unlink()
    with pytest.raises(ValueError, match="distcp is missing or cut short; copy"):
        convert.megatron_to_hf(broken, tmp_path / "out", folders / "qwen2")
    (broken / ".metadata").unlink()
    with pytest.raises(ValueError, match="no complete Megatron checkpoint .*; give a run's"):
        convert.megatron_to_hf(broken, tmp_path / "out", folders / "qwen2")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_hf_to_megatron_loads_under_another_layout(folders, tmp_path):
    done = run_command("hf-to-megatron", folders / "qwen3", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    other = tmp_path / "other"               # the same shapes, other weights
    reader = convert.HFReader(folders / "qwen3")
    convert.save_hf(other, folders / "qwen3", reader.hf_config, ((n, t * 0.5) for n, t in reader.items()))
    assert helpers.run_workers(load_checkpoint, 2, str(folders / "qwen3"), str(other), str(tmp_path / "out"), limit_s=300) == [[], []]
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="notes exists, and nothing is replaced here; give another path"):
        convert.hf_to_megatron(folders / "qwen3", tmp_path / "notes")


@pytest.mark.parametrize("source, out, message", [("run", "run", "run exists, and nothing is replaced"),
                                                  ("m.old", "m", "m.old exists, and nothing is replaced"),
                                                  ("m.tmp", "m", "m.tmp is replaced while .*m is written, and .* is there")])
def test_a_conversion_takes_nothing_away(folders, tmp_path, source, out, message):
    shutil.copytree(folders / "qwen3", tmp_path / source)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        convert.requantize(tmp_path / source, tmp_path / out, to_fp8=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


# ---- All families: experts, latent attention, layers that predict further tokens ----------------------------------------


def edit(folder, to, tensors=lambda t: t, **config) -> Path:
    """A copy with other tensors and keys in config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    save_file(tensors(load_file(to / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | config))
    return to


@pytest.mark.parametrize("name", test_families.FAMILIES)
def test_check_accounts_for_every_family(tiny, tmp_path, name):
    reader = convert.HFReader(tiny / name)
    assert f"tensors     {len(families.hf_names(reader.hf_config))} in 1 file(s): all covered" in convert.check(tiny / name)
    size = "moe_intermediate_size" if name in test_families.EXPERTS else "intermediate_size"
    wrong = edit(tiny / name, tmp_path / "wrong", **{size: 40})
    with pytest.raises(ValueError, match="down_proj.weight .*instead of .*, 40.; give|down_proj.weight .* and .* more; give"):
        convert.check(wrong)


@pytest.mark.parametrize("name", sorted(test_families.EXPERTS | {"mimo", "glm4"}))
def test_transformers_computes_with_an_fp8_folder_of_every_family(tiny, tmp_path, name):
    """Its model is filled by us there (experts stacked, other names), and by itself from the same numbers in bf16."""
    tokens = torch.randint(101, (20,), generator=torch.Generator().manual_seed(0))
    convert.requantize(tiny / name, tmp_path / "fp8", to_fp8=True)
    convert.requantize(tmp_path / "fp8", tmp_path / "plain", to_fp8=False)
    ours, theirs, exact = (convert.hf_log_probs(folder, tokens) for folder in (tmp_path / "fp8", tmp_path / "plain", tiny / name))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (theirs - exact).abs().max() > 1e-3                               # fp8 shows, so it was not the same folder


def written_from(root, name) -> str:
    """The checkpoint against the folder it was made of."""
    convert.megatron_to_hf(root / f"{name} checkpoint", root / f"{name} back", root / name)
    return convert.compare(root / name, root / f"{name} back")


@pytest.mark.parametrize("name", sorted(test_families.FAMILIES.keys() - test_families.EXPERTS))
def test_megatron_checkpoint_of_every_dense_family(tiny, checkpoint, name):
    assert f"{len(convert.HFReader(tiny / name).names())} compared, 0 differ" in written_from(tiny, name)


def test_megatron_checkpoint_of_every_family_with_experts(tiny, monkeypatch):
    """Written by two ranks, which have half of the heads, of the vocabulary and of the experts each."""
    import checkpoints

    outs = {str(tiny / name): str(tiny / f"{name} checkpoint") for name in test_families.EXPERTS}
    helpers.run_workers(save_checkpoints, 2, outs, dict(expert_model_parallel_size=2), limit_s=300)
    for name in test_families.EXPERTS:
        assert f"{len(convert.HFReader(tiny / name).names())} compared, 0 differ" in written_from(tiny, name), name
    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: sizes.append(empty(*a, **kw)) or sizes[-1])
    for _ in checkpoints.CheckpointReader(outs[str(tiny / "qwen3_moe")]).hf_tensors(convert.load_hf_config(tiny / "qwen3_moe")):
        pass
    assert max(t.numel() for t in sizes) == 4 * 2 * 16 * 32                  # memory: one rank's four of the eight experts


def test_what_comes_along_with_a_folder(tiny, tmp_path):
    """Keys that SGLang asks for and transformers drops; code and vocabularies that a published model brings."""
    keys = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, auto_map={"AutoConfig": "configuration_x.X"})
    source = edit(tiny / "kimi_k2", tmp_path / "source", **keys)
    for name in ("configuration_x.py", "tiktoken.model", "notes.txt"):
        (source / name).write_text("raise AssertionError('executed')")
    reader = convert.HFReader(source)
    convert.save_hf(tmp_path / "out", source, reader.hf_config, reader.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) and config["model_type"] == "kimi_k2"
    assert keys.items() <= config.items()
    assert {p.name for p in source.iterdir()} - {p.name for p in (tmp_path / "out").iterdir()} == {"notes.txt"}


EXTRA = {  # of one more layer: published name -> size
    "deepseek_v3": {f"model.layers.4.{name}": size for name, size in {
        "eh_proj.weight": (32, 64), "enorm.weight": (32,), "self_attn.q_a_proj.weight": (20, 32), "mlp.gate.weight": (8, 32),
        "mlp.experts.7.up_proj.weight": (16, 32), "shared_head.head.weight": (101, 32), "embed_tokens.weight": (101, 32)}.items()},
    "glm4_moe": {f"model.layers.4.{name}": size for name, size in {
        "eh_proj.weight": (32, 64), "self_attn.q_proj.bias": (64,), "mlp.shared_experts.up_proj.weight": (16, 32)}.items()},
    "mimo": {f"model.mtp_layers.0.{name}": size for name, size in {
        "input_proj.weight": (32, 64), "token_layernorm.weight": (32,), "self_attn.q_proj.weight": (32, 32)}.items()}}


@pytest.fixture(params=EXTRA)
def extra(request, tiny, tmp_path):
    """-> folder with a layer that predicts further tokens, names of its tensors"""
    g = torch.Generator().manual_seed(3)
    more = {name: torch.randn(size, generator=g) for name, size in EXTRA[request.param].items()}
    return edit(tiny / request.param, tmp_path / "extra", lambda t: t | more, num_nextn_predict_layers=1), set(more)


def test_layers_that_are_carried(extra, tmp_path):
    folder, names = extra
    reader = convert.HFReader(folder)
    assert set(reader.carried) == names and set(reader.names()) == families.hf_names(reader.hf_config)
    assert f"{len(names)} carried: layers that predict further tokens, not trained" in convert.check(folder)
    convert.save_hf(tmp_path / "out", folder, reader.hf_config, ((n, t.bfloat16()) for n, t in reader.items()), 20_000)
    saved = convert.HFReader(tmp_path / "out")
    assert set(saved.carried) == names and len(saved.files) > 2
    for name in names:                       # neither the trained dtype nor a value of it
        assert saved(name).dtype == torch.float32 and torch.equal(saved(name), reader(name)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    changed = edit(folder, tmp_path / "changed", lambda t: t | {min(names): t[min(names)] + 1})
    assert f"1 differ\nmost        {min(names)}: " in convert.compare(folder, changed)


def test_layers_that_are_carried_may_be_missing_but_nothing_else_may_be_there(extra, tmp_path):
    folder, names = extra
    dropped = edit(folder, tmp_path / "dropped", lambda t: {n: t[n] for n in t if n not in names})   # as transformers saves it
    reader = convert.HFReader(dropped)
    assert not reader.carried and "carried" not in convert.check(dropped)
    convert.save_hf(tmp_path / "out", dropped, reader.hf_config, reader.items())
    assert set(convert.HFReader(tmp_path / "out").where) == set(reader.names())
    assert "0 differ\nbeside      only one of them carries model." in convert.compare(folder, dropped)
    for i, (more, config) in enumerate([({"model.layers.5.enorm.weight": torch.ones(32)}, {}), ({}, dict(num_nextn_predict_layers=0))]):
        with pytest.raises(ValueError, match="unknown tensors: model"):
            convert.HFReader(edit(folder, tmp_path / f"wrong{i}", lambda t: t | more, **config))
    critic = families.value_config(reader.hf_config)                         # it drafts nothing
    tensors = [(n, t) for n, t in convert.HFReader(folder).items() if n != "lm_head.weight"] + [("score.weight", torch.zeros(1, 32))]
    convert.save_hf(tmp_path / "critic", folder, critic, tensors)
    assert not convert.HFReader(tmp_path / "critic").carried


def test_layers_that_are_carried_in_fp8(extra, tmp_path):
    folder, names = extra
    convert.requantize(folder, tmp_path / "fp8", to_fp8=True)
    plain, small = convert.HFReader(folder), convert.HFReader(tmp_path / "fp8")
    assert set(small.carried) == names
    quantised = {name for name in names if small.header(name)[1] == "F8_E4M3"}
    assert quantised == {name for name in names if fp8.is_quantized(name, plain(name))} and 0 < len(quantised) < len(names)
    assert all(torch.equal(small(name), plain(name)) for name in names - quantised)
    # Other weights from the fp8 folder: those of the extra layer are as stored, or as they are when multiplied out.
    convert.save_hf(tmp_path / "again", tmp_path / "fp8", small.hf_config, fp8.quantize_stream((n, -t) for n, t in small.items()))
    convert.save_hf(tmp_path / "wide", tmp_path / "fp8", small.hf_config, small.items())
    again, wide = convert.HFReader(tmp_path / "again"), convert.HFReader(tmp_path / "wide")
    for name in quantised:
        for stored in (name, name + fp8.SUFFIX):
            assert torch.equal(again._stored(stored).view(torch.uint8), small._stored(stored).view(torch.uint8))
        assert wide(name).dtype == torch.bfloat16 and torch.equal(wide(name), small(name))
    assert set(wide.carried) == names and not wide.scales
    with pytest.raises(ValueError, match="scales do not match: "):
        convert.HFReader(edit(tmp_path / "fp8", tmp_path / "bad", lambda t: {n: t[n] for n in t if n != min(quantised) + fp8.SUFFIX}))


# ---- Random models -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, changes", [
    ("Qwen/Qwen3-0.6B", {}),
    ("Qwen/Qwen3-30B-A3B", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    ("deepseek-ai/DeepSeek-V3", dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1,
                                     first_k_dense_replace=1, q_lora_rank=16))])
def test_random_models_are_whole(tmp_path, name, changes):
    """Most layers are written one by one: transformers finds each tensor, and no two layers are alike."""
    import transformers

    from configs.shapes import random_model
    random_model(name, num_hidden_layers=4, hidden_size=32, intermediate_size=32, vocab_size=128, num_attention_heads=4,
                 num_key_value_heads=4, **changes)(str(tmp_path))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()) and len(model.model.layers) == 4
    out = [layer.self_attn.o_proj.weight.float() for layer in model.model.layers]
    assert all(0.015 < x.std() < 0.025 for x in out) and not any(torch.equal(a, b) for a, b in zip(out, out[1:]))
    convert.HFReader(str(tmp_path))          # refuses what is incomplete
