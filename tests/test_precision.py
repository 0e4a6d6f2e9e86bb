"""Policies as data: presets and their two views, formats from text and back, overrides by path, segments, and what is refused."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.precision import BF16, FP8, PRESETS, SCALES, SITES, Flow, Format, Precision, make_policy, matches

W, A = Format(block=(128, 128)), Format(block=(1, 128))
# name -> (weight, activation, gradient, saved_activation, kv_cache) of rollout and of train, from design.md's list of presets
JET = (W, A, A, "requantize", BF16)
PLAIN = (BF16, BF16, BF16, "bf16", BF16)
F64 = Format("float64", (0, 0))
EXPECTED = {
    "bf16": (PLAIN, PLAIN),
    "jet_fp8": (JET, JET),
    "fp8_rollout_only": (JET, PLAIN),
    "jet_fp8_kv8": ((*JET[:4], Format(block=(1, 0))),) * 2,
    "jet_fp8_hybrid": ((W, A, Format("e5m2"), "requantize", BF16),) * 2,
    "fp8_rowwise": ((*(Format(block=(1, 0)),) * 3, "requantize", BF16),) * 2,
    "fp8_tensorwise": ((*(Format(block=(0, 0)),) * 3, "requantize", BF16),) * 2,
    "jet_fp8_pow2": ((*(dataclasses.replace(f, scale="pow2") for f in (W, A, A)), "requantize", BF16),) * 2,
    "float64": ((F64, F64, F64, "bf16", F64),) * 2,
}


def view(p: Precision) -> tuple:
    return p.weight, p.activation, p.gradient, p.saved_activation, p.kv_cache


@pytest.mark.parametrize("name", EXPECTED)
def test_every_preset_is_what_the_design_says(name):
    policy = make_policy(name)
    assert (view(policy.rollout.base), view(policy.train.base)) == EXPECTED[name]
    assert policy.unified == (policy.rollout is policy.train) == (name != "fp8_rollout_only")
    assert policy.rollout.base.logits == policy.train.base.logits == (F64 if name == "float64" else BF16)
    assert policy == make_policy(name) and hash(policy) == hash(make_policy(name)) and {policy: 1}[make_policy(name)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"  # type: ignore[misc]


def test_presets_differ_from_each_other():
    assert len({make_policy(n).train for n in PRESETS} | {make_policy("fp8_rollout_only").rollout}) == len(PRESETS) - 1
    assert tuple(EXPECTED) == (*PRESETS, "float64")


@pytest.mark.parametrize("block", ["2x128", "128x128"])
def test_a_scale_over_several_tokens_is_refused(block):
    """A decode step has one row: such a scale would be another there, and in training see tokens to come."""
    with pytest.raises(UserError, match="several tokens"):
        make_policy("jet_fp8", activation=f"e4m3 {block}")


formats = st.builds(Format, st.sampled_from(sorted(FP8)), st.tuples(st.integers(0, 300), st.integers(0, 300)), st.sampled_from(SCALES))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(formats | st.sampled_from([BF16, F64, Format("float32", (0, 0))]))
def test_a_format_reads_back_from_its_text(fmt):
    assert Format.parse(str(fmt)) == fmt
    assert fmt.along_tokens.along_tokens == fmt and fmt.along_tokens.block == fmt.block[::-1]
    assert fmt.quantized == (fmt.dtype in ("e4m3", "e5m2"))


def test_shorthand_of_formats():
    assert Format.parse("e4m3") == A
    assert Format.parse("e5m2 128x128") == Format("e5m2", (128, 128), "float32")
    assert Format.parse("e4m3 1xall pow2") == Format("e4m3", (1, 0), "pow2")
    assert str(Format(block=(1, 0))) == "e4m3 1xall float32" and str(BF16) == "bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m", "'e4m'.*did you mean 'e4m3'"),
        ("fp8", "field='fp8'.*known are"),
        ("", "number format in field=''"),
        ("bf16 1x128", "bf16 has no block"),
        ("e4m3 128", "write dtype, block and scale type"),
        ("e4m3 1x-1", "write dtype, block and scale type"),
        ("e4m3 1x128 pow2 twice", "write dtype, block and scale type"),
        ("e4m3 1x128 powr2", "scale type.*did you mean 'pow2'"),
    ],
)
def test_a_bad_format_names_the_field_and_the_remedy(text, message):
    with pytest.raises(UserError, match=message):
        Format.parse(text, "field")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "jet_fp9"}, "policy 'jet_fp9': did you mean 'jet_fp8'"),
        ({"reductions": "float46"}, "reductions 'float46': did you mean 'float64'"),
        ({"activaton": "bf16"}, "'activaton': did you mean 'activation'"),
        ({"activation": "e4m4"}, "policy_overrides.activation='e4m4'"),
        ({"saved_activation": "requantise"}, "saved_activation 'requantise': did you mean 'requantize'"),
        ({"activation": "e4m3 1x64"}, "cut the contracted axis differently"),
        ({"gradient": "e4m3 1x64"}, "cut DGrad's contracted axis differently.*second block 128"),
        ({"weight": "e4m3 1x128"}, "cut DGrad's contracted axis differently.*second block 1"),
        ({"weight": "e4m3 256x128"}, "divides 128"),
        ({"weight": "bf16", "gradient": "e4m3 1x64"}, "group the tokens of WGrad differently"),
        ({"logits": "e4m3 1x128"}, "lm_head stays unquantized"),
        ({"kv_cache": "e4m3 1x128"}, "one scale per token and head.*'e4m3 1xall'"),
        ({"paths": ("layers/0/*",)}, "write 'PATTERN=PRESET'"),
        ({"paths": ("=bf16",)}, "write 'PATTERN=PRESET'"),
        ({"paths": ("layers/0/*=bf61",)}, "'bf61': did you mean 'bf16'"),
        ({"paths": ("layers/0/*=weigth:bf16",)}, "'weigth': did you mean 'weight'"),
        ({"paths": ("layers/0/*=weight:e4m3 128",)}, "policy_overrides.weight='e4m3 128'"),
        ({"paths": ("layers/0/*=saved_activation:both",)}, "saved_activation 'both'"),
        ({"paths": ("*=logits:float32",)}, "policy_overrides.logits='float32'"),
    ],
)
def test_what_a_policy_refuses(arguments, message):
    with pytest.raises(UserError, match=message):
        make_policy(**{"name": "jet_fp8", **arguments})


def test_fields_change_everywhere_and_in_both_views():
    policy = make_policy("jet_fp8", gradient="e5m2 1x128", saved_activation="dual", activation=None, reductions="float64")
    assert policy.unified
    assert view(policy.train.base) == (W, A, Format("e5m2"), "dual", BF16)
    assert policy.rollout.reductions == "float64"
    assert not make_policy("fp8_rollout_only", kv_cache="e4m3 1xall").unified


def test_later_paths_win_and_negative_indices_count_from_the_end():
    paths = ("layers/*/mlp/down=activation:bf16", "layers/-1/*=bf16", "layers/2/mlp/down=activation: e4m3 1x128 ")
    flow = make_policy("jet_fp8", paths=paths).train
    assert flow.at("layers/0/mlp/down", 4).activation == BF16 and flow.at("layers/0/mlp/down", 4).weight == W
    assert flow.at("layers/2/mlp/down", 4) == flow.base
    assert view(flow.at("layers/3/mlp/down", 4)) == PLAIN
    assert view(flow.at("layers/3/attn/qkv", 4)) == PLAIN
    assert view(flow.at("layers/2/attn/qkv", 3)) == PLAIN  # the last layer of a model of three
    assert flow.at("layers/0/attn/o", 4) == flow.base
    assert flow.at("layers/3/attn/qkv") == flow.base  # without a size nothing counts from the end


def test_a_preset_at_a_path_keeps_its_own_two_views():
    policy = make_policy("bf16", paths=("layers/0/*=fp8_rollout_only",))
    assert not policy.unified
    assert view(policy.rollout.at("layers/0/mlp/down", 2)) == JET
    assert view(policy.train.at("layers/0/mlp/down", 2)) == PLAIN
    assert make_policy("bf16", paths=("layers/0/*=jet_fp8",)).unified


def test_patterns():
    assert matches("layers/0/*", "layers/0/attn/o") and not matches("layers/1/*", "layers/10/attn/o")
    assert matches("layers/-2/mlp/*", "layers/3/mlp/down", 5) and not matches("layers/-2/mlp/*", "layers/3/mlp/down", 4)
    assert matches("layers/[01]/attn/?", "layers/1/attn/o") and not matches("layers/0/ATTN/o", "layers/0/attn/o")


def test_segments_are_runs_of_equal_layers():
    plain = make_policy("jet_fp8").train
    assert plain.segments(4) == ((0, 4),) and plain.label((0, 4), 4) == "layers"
    ends = make_policy("jet_fp8", paths=("layers/0/*=bf16", "layers/-1/*=bf16")).train
    assert ends.segments(4) == ((0, 1), (1, 3), (3, 4)) and ends.label((1, 3), 4) == "layers[1:3]"
    assert ends.segments(2) == ((0, 2),) and ends.segments(1) == ((0, 1),)
    one = make_policy("jet_fp8", paths=("layers/1/attn/kv_cache=kv_cache:e4m3 1xall",)).train
    assert one.segments(3) == ((0, 1), (1, 2), (2, 3))
    assert dict(one.layer(1, 3))["attn/kv_cache"].kv_cache == Format(block=(1, 0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.sets(st.integers(0, 6), max_size=4))
def test_segments_cover_the_layers_and_are_as_long_as_they_can_be(layers, changed):
    flow = make_policy("jet_fp8", paths=tuple(f"layers/{i}/mlp/down=bf16" for i in changed)).train
    segments = flow.segments(layers)
    assert [i for a, b in segments for i in range(a, b)] == list(range(layers))
    kinds = [{i in changed for i in range(a, b)} for a, b in segments]
    assert all(len(k) == 1 for k in kinds) and all(k != m for k, m in zip(kinds, kinds[1:], strict=False))


def test_a_flow_is_hashable_with_its_overrides():
    a, b = (make_policy("jet_fp8", paths=("layers/0/*=bf16",)).train for _ in range(2))
    assert isinstance(a, Flow) and hash(a) == hash(b) and a == b != make_policy("jet_fp8").train
    assert [site for site, _ in a.layer(0, 2)] == list(SITES)
