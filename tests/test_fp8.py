"""
test_fp8.py: is a weight in 8 bits what everybody else takes it for? Against a loop over its numbers, transformers' reader and
SGLang's own formula; then the folders of convert.py, and what the weight sync sends and expects.

    random matrix --fp8--> (q, scale) --each judge--> matrix, within 1/16 of every number

Run:   pytest tests/test_fp8.py        CPU only, about 20 s (most of it imports)
Left out on purpose: an engine that computes in fp8, which needs a GPU.
"""
import ast
import json
import math
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import fp8
import weights_sync
from helpers import make_cfg

SHAPES = [(128, 128), (256, 384), (200, 300), (1, 5), (130, 127)]     # the last three: blocks that are cut off at an edge


# ---- One matrix ------------------------------------------------------------------------------------------------------
def random_matrix(shape, seed=0) -> torch.Tensor:
    """Rows of very different size, so that blocks need different scales."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * 10 ** torch.linspace(-4, 2, shape[0])[:, None]


def e4m3(x: float) -> float:
    """The nearest number of 1 sign, 4 exponent and 3 mantissa bits (ties to even), from the definition of the format."""
    if x == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return math.copysign(round(abs(x) / step) * step, x)


@pytest.mark.parametrize("shape", [(200, 300), (130, 127)])
def test_against_a_loop_over_the_numbers(shape):
    w = random_matrix(shape)
    q, scale = fp8.quantize_block(w)
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            block = w[128 * r:128 * (r + 1), 128 * c:128 * (c + 1)]
            assert scale[r, c].item() == pytest.approx(max(abs(x) for x in block.flatten().tolist()) / 448, rel=1e-6)
            part = (block / scale[r, c]).flatten().tolist()                  # the same fp32 division, then plain Python
            want = [e4m3(max(-448.0, min(448.0, x))) for x in part]
            assert q[128 * r:128 * (r + 1), 128 * c:128 * (c + 1)].float().flatten().tolist() == want


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_within_its_bound(shape, dtype):
    w = random_matrix(shape).to(dtype)
    q, scale = fp8.quantize_block(w)
    wide = torch.kron(scale, torch.ones(128, 128))[:shape[0], :shape[1]]
    far = (fp8.dequantize_block(q, scale, torch.float32) - w.float()).abs()
    assert (far <= 1.001 * torch.maximum(w.float().abs() / 16, wide * 2**-10)).all()     # 3 mantissa bits; below that, steps
    assert far.norm() < 0.03 * w.float().norm()
    again, same = fp8.quantize_block(fp8.dequantize_block(q, scale, torch.float32))
    assert torch.equal(again.float(), q.float())                                         # a second time changes nothing
    torch.testing.assert_close(same, scale)


def test_zeros_extremes_and_strides():
    q, scale = fp8.quantize_block(torch.zeros(129, 3))
    assert (q.float() == 0).all() and (scale > 0).all() and scale.isfinite().all()
    for size in (1e-40, 1e-30, 3e38):
        q, scale = fp8.quantize_block(torch.full((2, 2), size))
        assert scale.isfinite().all() and q.float().isfinite().all()
    assert (fp8.dequantize_block(*fp8.quantize_block(torch.full((2, 2), 3e38)), torch.float32) / 3e38 - 1).abs().max() < 1e-6
    w = random_matrix((300, 200))
    for a, b in zip(fp8.quantize_block(w.t()), fp8.quantize_block(w.t().contiguous())):  # a view, as convert gives them
        assert torch.equal(a.float(), b.float()) and a.is_contiguous()


def sglang_formula():
    """Taken out of its source: the module itself wants a GPU's libraries."""
    import importlib.util
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/layers/quantization/fp8_utils.py"
    tree = ast.parse(source.read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "block_quant_dequant")
    space = {"torch": torch, "List": list}
    exec(compile(ast.Module([function], []), str(source), "exec"), space)
    return lambda q, scale: space["block_quant_dequant"](q, scale, [128, 128], torch.bfloat16)


def test_sglang_multiplies_the_same_numbers():
    """Checksums need equal bits."""
    q, scale = fp8.quantize_block(random_matrix((256, 384)))
    assert torch.equal(fp8.dequantize_block(q, scale), sglang_formula()(q, scale))


@pytest.mark.parametrize("tp", [1, 2])
def test_checksums_of_experts_are_those_of_sglang(tp):
    """Its fused experts are w13 [E, 2F/tp, H] with scales [E, 2F/tp/128, H/128] (and w2 [E, H, F/tp]), and it hashes the product
    in bf16: weight_checker.py's _build_quantized_set finds them, as their scale's name is theirs + "_scale_inv"."""
    E, F, H, layer = 3, 256, 384, "model.layers.1.mlp.experts."
    plain = {f"{layer}{e}.{part}_proj.weight": random_matrix((H, F) if part == "down" else (F, H), seed=10 * e + len(part))
             for e in range(E) for part in ("gate", "up", "down")}
    sent = dict(fp8.quantize_stream(plain.items()))
    assert len(sent) == 2 * len(plain)
    expected = weights_sync.expected_checksums(fp8.dequantized(sent), tp, 1, "cpu")
    for rank in range(tp):
        def held(parts, dim, what):          # this rank's half of each, one above the other, then expert upon expert
            return torch.stack([torch.cat([sent[f"{layer}{e}.{part}_proj.weight{what}"].chunk(tp, dim)[rank] for part in parts])
                                for e in range(E)])
        for name, parts, dim in (("w13_weight", ("gate", "up"), 0), ("w2_weight", ("down",), 1)):
            q, scale = (held(parts, dim, what) for what in ("", "_scale_inv"))
            theirs = sglang_formula()(q, scale)
            assert theirs.shape == ((E, 2 * F // tp, H) if dim == 0 else (E, H, F // tp)) and theirs.dtype == torch.bfloat16
            assert expected[rank][layer + name] == weights_sync.checksum(theirs, "cpu"), (name, rank)


@pytest.mark.parametrize("name, quantised", [
    ("self_attn.q_proj", True), ("mlp.experts.127.down_proj", True), ("mlp.shared_experts.up_proj", True),
    ("self_attn.kv_a_proj_with_mqa", True), ("self_attn.q_a_proj", True), ("mlp.gate_up_proj", True),
    ("mlp.gate", False), ("input_layernorm", False), ("self_attn.q_norm", False), ("mlp.shared_expert_gate", False),
    ("eh_proj", False), ("input_proj", False)])
def test_which_tensors(name, quantised):
    assert fp8.is_quantized(f"model.layers.3.{name}.weight", torch.zeros(2, 2)) == quantised
    assert not fp8.is_quantized(f"model.layers.3.{name}.bias", torch.zeros(2))
    assert fp8.is_quantized("model.mtp_layers.0.mlp.up_proj.weight", torch.zeros(2, 2))
    for other in ("model.embed_tokens.weight", "lm_head.weight", "score.weight", "model.norm.weight"):
        assert not fp8.is_quantized(other, torch.zeros(2, 2))


# ---- Folders ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3 in bf16. All sizes are multiples of 128: see the NOTE in fp8.py."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=101, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, max_position_embeddings=128)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    folder = tmp_path_factory.mktemp("fp8") / "model"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model) -> Path:
    convert.requantize(model, model.parent / "out", to_fp8=True)
    return model.parent / "out"


def test_transformers_reads_the_folder_alike(model, folder):
    """An independent reader of the format, down to the last bit of bf16."""
    from transformers import AutoModelForCausalLM
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128] and config["dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    reader, source = convert.HFReader(folder), convert.HFReader(model)
    assert set(reader.names()) == set(source.names()) == set(theirs)
    for name in reader.names():
        assert torch.equal(reader(name), theirs[name]), name
        quantised = "_proj" in name
        assert torch.equal(reader(name), source(name)) != quantised
        far = (reader(name).float() - source(name).float()).norm() / source(name).float().norm()
        assert far < 0.03, name
    assert reader.num_parameters() == source.num_parameters() and len(reader.scales) == 14
    assert "14, one of each fp8 tensor" in convert.check(folder)


def test_there_and_back(model, folder, tmp_path):
    convert.requantize(folder, tmp_path / "plain", to_fp8=False)
    config, reader = json.loads((tmp_path / "plain" / "config.json").read_text()), convert.HFReader(folder)
    assert "quantization_config" not in config and not list((tmp_path / "plain").glob("*.tmp"))
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    assert saved.keys() == set(reader.names())
    assert all(saved[name].dtype == torch.bfloat16 and torch.equal(saved[name], reader(name)) for name in saved)
    for source, to_fp8, message in ((folder, True, "in fp8 already"), (model, False, "not quantised")):
        with pytest.raises(ValueError, match=message):
            convert.requantize(source, tmp_path / "x", to_fp8)
    assert not (tmp_path / "x").exists()


def damage(folder, to: Path, change) -> Path:
    """A copy of the folder after change(tensors, config)."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    to.mkdir()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return to


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("change, message", [
    (lambda t, c: t.pop(NAME + "_scale_inv"), f"do not match: {NAME} F8_E4M3"),
    (lambda t, c: t.update({NAME + "_scale_inv": torch.ones(3, 1)}), f"do not match: {NAME} F8_E4M3"),
    (lambda t, c: t.update({"model.norm.weight_scale_inv": torch.ones(2)}), "do not match: model.norm.weight BF16"),
    (lambda t, c: t.update({"model.layers.7.mlp.up_proj.weight_scale_inv": torch.ones(2)}), "do not match: model.layers.7.mlp"),
    (lambda t, c: t.update({NAME: t[NAME].bfloat16()}), f"do not match: {NAME} BF16"),
    (lambda t, c: t.update({NAME: t[NAME].to(torch.float8_e5m2)}), f"do not match: {NAME} F8_E5M2"),
    (lambda t, c: t.pop(NAME), f"lacks: {NAME}"),
    (lambda t, c: c.pop("quantization_config"), "unknown tensors: .*_scale_inv.*and 9 more"),
    (lambda t, c: c["quantization_config"].update(weight_block_size=[64, 64]), r"weight_block_size.: \[64, 64\].*give the unq"),
    (lambda t, c: c["quantization_config"].update(quant_method="gptq"), "gptq.*only fp8 .* can be read; give the unquantized"),
    (lambda t, c: c["quantization_config"].pop("weight_block_size"), "only fp8 .* in blocks of 128 x 128"),
])
def test_a_damaged_fp8_folder_is_refused(folder, tmp_path, change, message):
    bad = damage(folder, tmp_path / "bad", change)
    with pytest.raises(ValueError, match=message):
        convert.HFReader(bad)
    with pytest.raises(ValueError, match=message):           # before anything is written
        convert.requantize(bad, tmp_path / "out", to_fp8=False)
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_engine_folder(model, folder, tmp_path):
    made = convert.engine_folder(model, tmp_path)
    assert made == str(tmp_path / "engine_model") and convert.HFReader(made).fp8
    before = (tmp_path / "engine_model" / "model.safetensors").stat().st_mtime_ns
    assert convert.engine_folder(model, tmp_path) == made                    # a resumed run
    assert (tmp_path / "engine_model" / "model.safetensors").stat().st_mtime_ns == before
    assert convert.engine_folder(folder, tmp_path) == str(folder)            # fp8 as it is


EXPERTS = dict(model_type="qwen3_moe", moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[])
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_attention_heads=4)


@pytest.mark.parametrize("changes, tp, message", [
    (dict(), 1, None), (dict(), 2, None), (dict(), 4, "kv heads . head_dim / tp = 64"), (dict(), 16, "intermediate_size / tp = 192"),
    (dict(hidden_size=576), 1, "hidden_size = 576"), (dict(head_dim=32), 2, "kv heads . head_dim / tp = 32"),
    (EXPERTS, 2, None), (EXPERTS | dict(intermediate_size=100), 2, None),      # which no layer uses
    (EXPERTS | dict(decoder_sparse_step=2, intermediate_size=100), 2, "intermediate_size / tp = 50"),
    (EXPERTS | dict(head_dim=128), 4, "moe_intermediate_size / tp . ep = 192 with tp 4 is no multiple.*set a smaller"),
    (EXPERTS | dict(head_dim=128, ep_size=4), 4, None), (EXPERTS | dict(head_dim=128, ep_size=2), 4, None),
    (dict(head_dim=64, num_key_value_heads=4), 4, "kv heads . head_dim / tp = 64"),
    (dict(head_dim=64, num_key_value_heads=4, dp_size=2), 4, None),            # two groups of 2 GPUs: two heads on each
    (LATENT, 2, None), (LATENT, 4, r"heads . qk_head_dim / tp = 192"), (LATENT | dict(dp_size=2), 4, None),
    (dict(model_type="llama"), 1, "drops it; set rollout_quantization=None")])
def test_what_sglang_cannot_cut(changes, tp, message):
    config = types.SimpleNamespace(**dict(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=2, head_dim=128 if tp < 4 else 64) | changes)
    sizes = tp, changes.get("dp_size", 1), changes.get("ep_size", 1)
    if message is None:
        return fp8.check_engine(config, *sizes)
    with pytest.raises(ValueError, match=message):
        fp8.check_engine(config, *sizes)


# ---- The weight sync -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["distributed", "tensor", "disk"])
def test_what_a_push_sends_and_expects(model, tmp_path, monkeypatch, transport):
    """The sending methods replaced by a notebook; all else is the trainer's code. Expected checksums are those of the numbers
    that an engine computes with: weight times scale in bf16, fused as SGLang fuses them."""
    source = convert.HFReader(model)
    cfg = make_cfg(rollout_quantization="fp8", update_weight_transport=transport, update_weight_buffer_size=300_000)
    fake = types.SimpleNamespace(away={}, hf_config=source.hf_config, hf_folder=str(model), device=torch.device("cpu"),
                                 grid=types.SimpleNamespace(rank=0, dp_rank=0, pp_rank=0, pp_size=1, tp_size=1))
    sent, posts = {}, []
    monkeypatch.setattr(weights_sync, "hf_tensors", lambda model, stage: source.items())
    monkeypatch.setattr(weights_sync, "takes_part", lambda model: True, raising=False)
    sync = weights_sync.WeightSync(cfg, fake, tmp_path)
    monkeypatch.setattr(sync, "connect", lambda urls: None)
    monkeypatch.setattr(sync, "send_distributed", lambda bucket, urls: sent.update(bucket.tensors()))
    monkeypatch.setattr(sync, "send_tensor", lambda bucket, urls, *rest: sent.update(bucket.tensors()))
    monkeypatch.setattr(sync, "post", lambda urls, path, payloads: posts.append((path, payloads)))
    answer = sync.push(3, ["one"], [[0]], True)
    if transport == "disk":
        sent = load_file(tmp_path / "weights_3" / "model.safetensors")
        assert convert.HFReader(tmp_path / "weights_3").fp8 and posts[0][0] == "/update_weights_from_disk"
    assert set(sent) == set(source.names()) | {n + "_scale_inv" for n in source.names() if "_proj" in n}
    for name in source.names():
        if "_proj" in name:
            q, scale = fp8.quantize_block(source(name))
            assert torch.equal(sent[name].float(), q.float()) and torch.equal(sent[name + "_scale_inv"], scale), name
        else:
            assert torch.equal(sent[name], source(name)), name
    assert answer["bytes"] == sum(t.numel() * t.element_size() for t in sent.values())
    [expected] = answer["expected"]
    fused = [fp8.dequantize_block(sent[n], sent[n + "_scale_inv"])
             for n in (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")]
    assert expected["model.layers.0.self_attn.qkv_proj.weight"] == weights_sync.checksum(torch.cat(fused), "cpu")
    assert not [name for name in expected if "scale" in name]
