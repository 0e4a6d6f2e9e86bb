"""quantize_params: each projection quantized and padded alone, layer by layer, once; what stays unquantized; paths that match nothing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.compile import compile
from jetrl_jax.errors import UserError
from jetrl_jax.flow import untagged_float8_casts
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.qparams import PRODUCTS, check_paths, operators_dtype, quantize_params
from jetrl_jax.precision import Format, make_policy
from jetrl_jax.quantize import QTensor, dequantize, quantize, quantize_p

# Every size is ragged: 48 columns (padded to 128), q of 60 rows beside k and v of 20, a feed-forward of 150 (two blocks).
CONFIG = ModelConfig(
    family="qwen2", vocab_size=7, hidden_size=48, intermediate_size=150, num_layers=3, num_heads=3, num_kv_heads=1, head_dim=20,
    rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position=64, qkv_bias=True, qk_norm=False, tie_embeddings=True,
)
UNTIED = ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": False})
# Without XLA's optimizations it compiles twice as fast.
quantized = jax.jit(quantize_params, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})


def master(config=CONFIG):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * np.exp2(rng.integers(-3, 3)), jnp.float32), config.param_shapes())


def padded(w):
    n, k = w.shape
    return np.pad(w, ((0, -n % 128), (0, -k % 128)))


@pytest.mark.parametrize("name", ["jet_fp8", "fp8_rowwise", "fp8_tensorwise"])
def test_each_projection_of_each_layer_is_quantized_and_padded_alone(name):
    flow, params = make_policy(name).train, master()
    fmt, (segment,) = flow.base.weight, quantized(flow, CONFIG, params)["segments"]
    for module, products in PRODUCTS.items():
        for product, projections in products.items():
            w = segment[module][product]
            assert (w.fprop.site, w.fprop.fmt) == (f"layers/{module}/{product}.w", fmt)
            for layer in range(3):
                values, scales = np.asarray(w.fprop.values[layer], np.float32), np.asarray(w.fprop.scales[layer])
                scales, at = np.repeat(scales, values.shape[0] // scales.shape[0], 0), 0
                for p in projections:
                    matrix = np.asarray(params["layers"][module][p][layer])
                    alone = quantize(jnp.asarray(padded(matrix)), "", fmt)
                    rows = alone.values.shape[0]
                    np.testing.assert_array_equal(values[at:at + rows], np.asarray(alone.values, np.float32))
                    np.testing.assert_array_equal(scales[at:at + rows], np.repeat(alone.scales, rows // alone.scales.shape[0], 0))
                    assert not values[at + matrix.shape[0]:at + rows].any() and not values[at:at + rows, matrix.shape[1]:].any()
                    at += rows
                assert at == values.shape[0]
            chex.assert_trees_all_close(  # the scales belong to these payloads
                dequantize(w.fprop)[0, :20, :48], params["layers"][module][projections[0]][0, :20, :48], rtol=2.0**-4, atol=0.05)


@pytest.mark.parametrize("name", ["jet_fp8", "fp8_tensorwise", "fp8_rowwise"])
def test_dgrad_reads_the_transposed_payload_but_for_row_scales(name):
    flow = make_policy(name).train
    (segment,) = quantized(flow, CONFIG, master())["segments"]
    for product in (segment["attn"]["qkv"], segment["mlp"]["down"]):
        if name != "fp8_rowwise":
            assert product.dgrad is None
            continue
        assert product.dgrad.fmt == Format(block=(1, 0)) and product.dgrad.site.endswith(".wT")
        assert product.dgrad.values.shape == product.fprop.T.values.shape
        assert product.dgrad.scales.shape == (*product.dgrad.values.shape[:-1], 1)  # per input channel, over all projections side by side
        chex.assert_trees_all_close(dequantize(product.dgrad), jnp.swapaxes(dequantize(product.fprop), -1, -2), rtol=0.13, atol=0.05)


def test_every_projection_is_quantized_exactly_once():
    flow = make_policy("jet_fp8").train
    jaxpr = jax.make_jaxpr(lambda p: quantize_params(flow, CONFIG, p))(CONFIG.param_shapes()).jaxpr
    sites = [e.params["site"] for e in jaxpr.eqns if e.primitive is quantize_p]
    assert sorted(sites) == sorted([*["layers/attn/qkv.w"] * 3, "layers/attn/o.w", *["layers/mlp/gate_up.w"] * 2, "layers/mlp/down.w"])
    assert not untagged_float8_casts(jaxpr)


def test_what_stays_unquantized_is_in_the_operators_dtype():
    params = master()
    q = quantized(make_policy("jet_fp8").train, CONFIG, params)
    (segment,) = q["segments"]
    for got, want in [
        (q["embed"], params["embed"]), (q["final_norm"], params["final_norm"]), (segment["attn_norm"], params["layers"]["attn_norm"]),
        (segment["mlp_norm"], params["layers"]["mlp_norm"]),
        *((segment["attn"][b], params["layers"]["attn"][b]) for b in ("q_bias", "k_bias", "v_bias")),
    ]:
        chex.assert_type(got, jnp.bfloat16)
        chex.assert_trees_all_equal(got, want.astype(jnp.bfloat16))
    assert set(segment["attn"]) == {"qkv", "o", "q_bias", "k_bias", "v_bias"} and set(segment["mlp"]) == {"gate_up", "down"}


def test_bf16_weights_lie_side_by_side_without_padding():
    params = master()
    (segment,) = quantized(make_policy("bf16").train, CONFIG, params)["segments"]
    qkv = segment["attn"]["qkv"].fprop
    chex.assert_trees_all_equal(qkv.values, jnp.concatenate([params["layers"]["attn"][n] for n in "qkv"], 1).astype(jnp.bfloat16))
    chex.assert_trees_all_equal(qkv.scales, jnp.ones((3, 1, 1)))


def test_lm_head_is_the_embedding_where_tied_and_of_one_format():
    params, untied = master(), master(UNTIED)
    assert quantized(make_policy("jet_fp8").train, CONFIG, params)["lm_head"] is None
    own = quantized(make_policy("jet_fp8").train, UNTIED, untied)["lm_head"]
    chex.assert_trees_all_equal(own.values, untied["lm_head"].astype(jnp.bfloat16))
    assert isinstance(own, QTensor) and own.site == "lm_head.w"
    float32 = quantized(make_policy("jet_fp8", logits="float32").train, CONFIG, params)["lm_head"]
    chex.assert_trees_all_equal(float32.values, params["embed"])


def test_segments_cut_the_stack_where_the_policy_changes():
    policy, params = make_policy("jet_fp8", paths=("layers/0/*=bf16", "layers/-1/mlp/down=bf16")), master()
    first, middle, last = quantized(policy.train, CONFIG, params)["segments"]
    (whole,) = quantized(make_policy("jet_fp8").train, CONFIG, params)["segments"]
    assert not first["attn"]["qkv"].fprop.fmt.quantized and first["attn"]["qkv"].fprop.values.shape == (1, 100, 48)
    assert middle["mlp"]["down"].fprop.fmt.quantized and not last["mlp"]["down"].fprop.fmt.quantized
    assert last["attn"]["o"].fprop.site == "layers[2:3]/attn/o.w"
    for layer, segment in ((1, middle), (2, last)):
        got, want = segment["attn"]["o"].fprop, whole["attn"]["o"].fprop
        chex.assert_trees_all_equal(got.values[0].view(jnp.uint8), want.values[layer].view(jnp.uint8))
        chex.assert_trees_all_equal(segment["attn_norm"][0], whole["attn_norm"][layer])


def test_float64_operators():
    assert operators_dtype(make_policy("jet_fp8").train) == jnp.bfloat16
    with jax.enable_x64(True):
        q = jax.eval_shape(lambda p: quantize_params(make_policy("float64").train, CONFIG, p), CONFIG.param_shapes())
        assert {leaf.dtype for leaf in jax.tree.leaves(q)} == {np.dtype("float64"), np.dtype("float32")}  # float32: the scales, all one
        assert q["segments"][0]["mlp"]["down"].fprop.values.dtype == jnp.float64


def test_nothing_recompiles_from_step_to_step():
    f = compile(chex.assert_max_traces(quantize_params, n=1), static_argnums=(0, 1))
    for scale in (1, 2):
        f(make_policy("bf16").train, CONFIG, jax.tree.map(lambda w, s=scale: np.asarray(w) * s, master()))


@pytest.mark.parametrize("good", ["layers/0/*=bf16", "layers/-3/mlp/down=bf16", "layers/*/attn/kv_cache=kv_cache:e4m3 1xall"])
def test_paths_that_match_pass(good):
    check_paths(make_policy("jet_fp8", paths=(good,)).train, CONFIG)


@pytest.mark.parametrize("bad", ["layers/3/*", "layers/-4/mlp/down", "layers/0/mlp/up", "lm_head", "layer/0/*"])
def test_paths_that_match_nothing_are_refused(bad):
    with pytest.raises(UserError, match="matches nothing in a model of 3 layers; paths are layers/INDEX/SITE with SITE one of attn/qkv"):
        check_paths(make_policy("jet_fp8", paths=("layers/0/*=bf16", f"{bad}=bf16")).train, CONFIG)
