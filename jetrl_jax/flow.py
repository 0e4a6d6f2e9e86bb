"""The flow graph, read from traced programs: which number format reaches which product, and whether rollout's graph lies in training's.

Jet-RL (arXiv 2601.14243) asks for `G_rollout ⊆ G_train_forward`. An edge is found by following the data from each `quantize_p` (or from a
payload that enters as an argument, named by its QTensor's static fields) through layout changes to the product that consumes it. Graphs
are compared as sets.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jetrl_jax.errors import UserError
from jetrl_jax.kernels import flash, products, vocab
from jetrl_jax.precision import Format, PrecisionPolicy
from jetrl_jax.quantize import QTensor, quantize_p, storage


class Edge(NamedTuple):
    """path: module path without layer index; operator: the consuming product; operand: which of its inputs; fmt: the number format."""

    path: str
    operator: str
    operand: str
    fmt: Format

    def __str__(self) -> str:
        return f"{self.path:<24} {self.operator:<12} {self.operand:<8} {self.fmt}"


# What hands a payload on unchanged but for layout, padding, scale (mul) or choice: a label passes through.
_PASSES = frozenset((
    "reshape", "transpose", "convert_element_type", "slice", "dynamic_slice", "squeeze", "broadcast_in_dim", "mul", "copy", "copy_p",
    "optimization_barrier", "pad", "concatenate", "gather", "dynamic_update_slice", "scatter", "select_n", "expand_dims", "rev",
    "reduce_precision", "stop_gradient", "sharding_constraint", "split",
))  # fmt: skip
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "attention"))
# On Hopper both products of attention are one operator, cuDNN's or ours: one name, and q, k, v its first operands.
_ATTENTION = frozenset((flash.FULL, flash.DECODE))
Labels = frozenset[tuple[str, Format]]
_NONE: Labels = frozenset()
_NAMES = {"bfloat16": "bf16"}  # what Format calls a dtype that jax calls otherwise


def _subjaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for v in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(v, "jaxpr", v)
            if hasattr(inner, "eqns"):
                yield inner


def _scan_inputs(params: dict, ins: list[Labels]) -> list[list[Labels]]:
    """A scan's inputs as constants, carry and scanned; jax 0.11 keeps them as a tree of its own, earlier ones as two counts."""
    if "ft_in" in params:
        return [list(part) for part in params["ft_in"].update(ins).unpack()]
    consts, carry = params["num_consts"], params["num_carry"]
    return [ins[:consts], ins[consts:consts + carry], ins[consts + carry:]]


class _Walk:
    """Carries label sets through one program; `found` collects what reaches a product."""

    def __init__(self):
        self.found: set[tuple[str, Format, str]] = set()

    def run(self, jaxpr: Any, labels: list[Labels]) -> list[Labels]:
        at: dict[Any, Labels] = dict(zip(jaxpr.invars, labels, strict=True))

        def get(v):
            return _NONE if isinstance(v, jex.Literal) else at.get(v, _NONE)

        for eqn in jaxpr.eqns:
            at.update(zip(eqn.outvars, self._eqn(eqn, [get(v) for v in eqn.invars]), strict=True))
        return [get(v) for v in jaxpr.outvars]

    def _eqn(self, eqn: Any, ins: list[Labels]) -> list[Labels]:
        name, p, n = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if eqn.primitive is quantize_p:
            return [frozenset({(p["site"], p["fmt"])}), _NONE]
        if "declares" in p:  # a fused operator says what it quantizes, and is held to its output types
            return [_declared(d, v.aval) for d, v in zip(p["declares"], eqn.outvars, strict=True)]
        invars = eqn.invars
        if name in products.NAMES:  # payload, scales, payload, scales[, layer]
            name, ins, invars = "dot_general", ins[0:3:2], invars[0:3:2]
        elif name in vocab.NAMES:  # hidden states, lm_head, …
            name, ins, invars = "dot_general", ins[:2], invars[:2]
        elif name in _ATTENTION:
            name, ins, invars = "attention", ins[:3], invars[:3]
        if name in _PRODUCTS:
            self.found.update((site, fmt, name) for labels in ins for site, fmt in labels)
            paths = {site.rpartition(".")[0] for labels in ins for site, _ in labels} or {"?"}
            for v, labels in zip(invars, ins, strict=True):
                if not labels and jnp.issubdtype(v.aval.dtype, jnp.floating):
                    # An operand that passed no quantize_p, or lost its label in an operation that changes numbers, is an edge too:
                    # left out, a phase that skips a quantization would seem to lie in the other.
                    fmt = Format(_NAMES.get(str(v.aval.dtype), str(v.aval.dtype)), (0, 0))
                    self.found.update((f"{path}.unlabelled", fmt, name) for path in paths)
            return [_NONE] * n
        if name == "scan":
            return self._loop(getattr(p["jaxpr"], "jaxpr", p["jaxpr"]), *_scan_inputs(p, ins))
        if name == "while":
            self.run(p["cond_jaxpr"].jaxpr, ins[:p["cond_nconsts"]] + ins[p["cond_nconsts"] + p["body_nconsts"]:])
            ins = ins[p["cond_nconsts"]:]
            return self._loop(p["body_jaxpr"].jaxpr, ins[:p["body_nconsts"]], ins[p["body_nconsts"]:], [])
        if name == "cond":
            outs = [self.run(b.jaxpr, ins[1:]) for b in p["branches"]]
            return [frozenset().union(*o) for o in zip(*outs, strict=True)]
        inner = next((j for j in _subjaxprs(eqn) if len(j.invars) == len(ins)), None)
        if inner is not None:  # jit, remat, custom_vjp: called with its own arguments
            return self.run(inner, ins)
        return [frozenset().union(*ins) if name in _PASSES else _NONE] * n

    def _loop(self, body: Any, consts: list[Labels], carry: list[Labels], xs: list[Labels]) -> list[Labels]:
        before = set(self.found)
        while True:  # to the fixed point: labels only grow, and only its own pass counts
            self.found = set(before)
            outs = self.run(body, [*consts, *carry, *xs])
            grown = [a | b for a, b in zip(carry, outs, strict=False)]
            if grown == carry:
                return [*carry, *outs[len(carry):]]
            carry = grown


def _declared(label: tuple[str, Format] | None, aval: Any) -> Labels:
    if label is None:
        return _NONE
    if aval.dtype != storage(label[1]):
        raise TypeError(f"an operator declares {label[0]} as {label[1]}, and gives {aval.dtype}")
    return frozenset({label})


def edges(fun: Callable, *args: Any) -> frozenset[Edge]:
    """The edges of `fun(*args)`; args may be abstract (ShapeDtypeStruct leaves), QTensors among them carry their own label."""
    closed = jax.make_jaxpr(fun)(*args)
    labels: list[Labels] = []
    for leaf in jax.tree.leaves(args, is_leaf=lambda a: isinstance(a, QTensor)):
        labels += [frozenset({(leaf.site, leaf.fmt)}), _NONE] if isinstance(leaf, QTensor) else [_NONE]
    walk = _Walk()
    walk.run(closed.jaxpr, labels)
    found = set()
    for site, fmt, operator in walk.found:
        path, _, operand = site.rpartition(".")
        found.add(Edge(path, operator, operand, fmt))
    return frozenset(found)


def untagged_float8_casts(jaxpr: Any) -> list[str]:
    """Every cast to FP8 that is not inside `quantize_p`: such a cast has an FP8 cotangent without a scale (design.md "Numerics" 4)."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and "float8" in str(eqn.params["new_dtype"]):
            found.append(str(eqn))
        for inner in _subjaxprs(eqn):
            found += untagged_float8_casts(inner)
    return found


@dataclasses.dataclass(frozen=True)
class Verdict:
    rollout: frozenset[Edge]
    train: frozenset[Edge]
    backward: frozenset[Edge]  # what only the gradient adds: G_train_backward

    @property
    def extra(self) -> list[Edge]:
        """Rollout edges that training's forward lacks."""
        return sorted(self.rollout - self.train, key=str)

    @property
    def holds(self) -> bool:
        return not self.extra


def verdict(policy: PrecisionPolicy, config: Any, length: int = 128) -> Verdict:
    """Traces a model's rollout (prefill and decode, without sampling) and update (forward; with its gradient for `backward`) under a
    policy."""
    from jetrl_jax.models.head import HeadSpec, logits
    from jetrl_jax.models.qparams import quantize_params
    from jetrl_jax.models.transformer import Transformer, weight_of_head
    from jetrl_jax.rollout.decode import decode_step, prefill
    from jetrl_jax.train.update import Batch, completion_logprobs

    params = config.param_shapes()
    flows = {"rollout": policy.rollout, "train": policy.train}
    views = {name: jax.eval_shape(lambda p, f=flow: quantize_params(f, config, p), params) for name, flow in flows.items()}
    sampler, learner = Transformer(config, policy.rollout), Transformer(config, policy.train)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def head(q, hidden):
        return logits(hidden, weight_of_head({"q": q}, policy.rollout)[0], HeadSpec.of(policy.rollout))

    def first(q, tokens, lengths):
        caches, hidden = prefill(sampler, q, tokens, lengths, length)
        return caches, head(q, hidden)

    def step(q, tokens, positions, caches):
        caches, hidden = decode_step(sampler, q, tokens, positions, caches)
        return caches, head(q, hidden)

    q, prompts = views["rollout"], (ints(1, length), ints(1))
    caches, _ = jax.eval_shape(first, q, *prompts)
    rollout = edges(first, q, *prompts) | edges(step, q, ints(1), ints(1), caches)

    floats: Any = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    advantages: Any = jax.ShapeDtypeStruct((1,), jnp.float32)
    batch = Batch(ints(1, length), ints(1), ints(1, 8), floats, floats, floats, advantages)

    def forward(params, q, batch):
        return completion_logprobs(learner, {"params": params, "q": q}, batch, HeadSpec.of(policy.train))[0]

    train = edges(forward, params, views["train"], batch)
    both = edges(jax.grad(lambda *a: forward(*a).sum()), params, views["train"], batch)
    return Verdict(rollout, train, both - train)


def require(policy: PrecisionPolicy, config: Any) -> str:
    """The check at the start of every run -> one line that says what holds.

    Raises:
      UserError: the policy is unified, and yet rollout's graph is not contained in training's.
    """
    found = verdict(policy, config)
    if found.holds:
        return f"precision flow: rollout's {len(found.rollout)} edges all lie in training's forward ({policy.name})"
    if policy.unified:
        raise UserError(f"policy {policy.name!r} says it is unified, but its rollout has an edge that training lacks: {found.extra[0]}")
    return f"precision flow: {policy.name} is off-policy by design: {len(found.extra)} rollout edges differ from training's"


def report(policy: PrecisionPolicy, found: Verdict) -> str:
    """Both graphs and the verdict, as text."""
    lines = [f"policy {policy.name}{' (unified)' if policy.unified else ''}"]
    graphs = {"G_rollout (prefill, decode)": found.rollout, "G_train_forward": found.train, "G_train_backward": found.backward}
    for title, graph in graphs.items():
        lines += [f"\n{title}: {len(graph)} edges", f"  {'path':<24} {'operator':<12} {'operand':<8} format block scale"]
        lines += [f"  {e}" for e in sorted(graph, key=str)]
    if found.holds:
        return "\n".join([*lines, "\nG_rollout ⊆ G_train_forward: holds"])
    e = found.extra[0]
    has = [str(t.fmt) for t in found.train if t[:3] == e[:3]]
    lines.append("\nG_rollout ⊆ G_train_forward: does NOT hold; first edge: "
                 f"{e.path}.{e.operand} is {e.fmt} in rollout, {' and '.join(has) or 'absent'} in training")
    if not policy.unified:
        lines.append(f"{policy.name} is off-policy by design")
    return "\n".join(lines)


def main_report(config: Any) -> tuple[str, int]:
    """`jetrl flow`: the text, and exit code 0 if the verdict holds, else 1. config: the run's ConfigDict."""
    from jetrl_jax.models.config import ModelConfig
    from jetrl_jax.train.setup import policy_of

    model = ModelConfig.from_hf(config.model.path)
    policy = policy_of(config, model)
    found = verdict(policy, model)
    return report(policy, found), 0 if found.holds else 1
