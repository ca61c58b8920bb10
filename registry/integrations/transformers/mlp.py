"""The gated MLPs of transformers (Llama, Mistral, Qwen, Gemma) by the registry's products.

    from registry.integrations import transformers
    transformers.fuse(model)          # and transformers.unfuse(model)

`act(gate(x)) * up(x)` becomes one product whose kernel ends with the activation and the gate: what lies between is
never written. It is `registry.matmul(..., gated=True)`, and takes both weights as one matrix, so `fuse` lays each
pair side by side in memory, once; the parameters stay what they are to optimizers, state dicts and `.to()`. Training
has the library's products, and the gate in one pass between them. Whatever else is left to the library (an activation
that is none of a kernel's, as Gemma's, adapters, hooks, a few rows, sizes far from all that were measured) is computed
by its own modules, and counted by `registry.record()` under "elsewhere".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

import registry
from registry.dispatch.scope import current, went_elsewhere
from registry.dispatch.select import Moment
from registry.dispatch.traced import is_exporting
from registry.errors import InvalidArgument
from registry.notices import notice
from registry.ops.parts.counting import counted
from registry.ops.parts.products import activate
from registry.ops.tensors import plain

_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ORDINARY = (torch.Tensor, nn.Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuse(model: nn.Module) -> tuple[str, ...]:
    """Let the gated MLPs of a model run by the registry, in place; the names of those that now do.

    Those that cannot are left as they are, which a notice tells with the reason; a model in which there is none that
    can is an error. Again after weights have moved apart (`parameter.data = ...`), it lays them side by side anew.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument("model", type(model).__name__, "a torch.nn.Module of transformers")
    fused, left, taken = [], [], set[int]()
    for parent, key, name, module in list(_children(model)):
        if isinstance(module, GatedMlp):
            module.lay_side_by_side()
            fused.append(name)
        elif all(hasattr(module, part) for part in (*_PROJECTIONS, "act_fn")):
            weights = {id(parameter) for parameter in module.parameters()}
            why = "it shares weights with another" if weights & taken else _why_not(module)
            taken |= weights
            if why is None:
                parent._modules[key] = GatedMlp(module)
                fused.append(name)
            else:
                left.append(f"{name}: {why}")
    if not fused:
        found = "; ".join(left) or "none of its modules has gate_proj, up_proj, down_proj and act_fn"
        raise InvalidArgument(
            "model", found, "a model with MLPs that compute down_proj(act_fn(gate_proj(x)) * up_proj(x))"
        )
    for each in left:
        notice(f"transformers.fuse leaves {each}")
    return tuple(fused)


def unfuse(model: nn.Module) -> tuple[str, ...]:
    """Undo `fuse`: the library's own modules again, with the parameters and the parts that they have by now."""
    undone = []
    for parent, key, name, module in list(_children(model)):
        if isinstance(module, GatedMlp):
            parent._modules[key] = module.given_back()
            undone.append(name)
    return tuple(undone)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """(parent, its name for the child, the child's full name, the child)."""
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            yield parent, key, f"{name}.{key}" if name else key, child


class GatedMlp(nn.Module):
    """Stands where a gated MLP of transformers stood, with its parts under its names."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        own = {name: value for name, value in vars(theirs).items() if name not in vars(self)}
        vars(self).update(own, training=theirs.training, _theirs=theirs)  # nobody's child: its children are here
        for kept in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            getattr(self, kept).update(getattr(theirs, kept))
        self.lay_side_by_side()
        self.register_load_state_dict_post_hook(_side_by_side_again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down, act_fn = self._parts()
        if _is_few(x):  # a step of decoding waits for the host: fewer calls than theirs
            went_elsewhere("transformers", _TOO_FEW)
            return down(act_fn(_by_itself(gate, x)) * _by_itself(up, x))  # type: ignore[no-any-return]
        why = _taken_hold_of(gate) or _taken_hold_of(up)
        activation = _activation_of(act_fn)
        if why is not None:
            why = f"with {why}"
        elif activation is None:
            why = f"whose activation is {type(act_fn).__name__}, or looked at"
        elif gate.bias is not None or up.bias is not None:
            why = "with biases"
        elif torch.is_grad_enabled() and (x.requires_grad or gate.weight.requires_grad or up.weight.requires_grad):
            why = "that needs gradients"
        elif plain(x, gate.weight, up.weight):
            return down(_gated_product(x, gate.weight, up.weight, activation))  # type: ignore[no-any-return]
        elif _in_a_graph(x):
            found = torch.ops.registry.gated_product(x, gate.weight, up.weight, activation)
            return down(found)  # type: ignore[no-any-return]
        else:
            why = "under autocast, a mode or an export"
        went_elsewhere("transformers", f"a gated MLP {why}")
        first, second = gate(x), up(x)
        if activation is not None and _has_kernels(first, second):
            from registry.integrations.transformers.gate import gated

            return down(gated(first, second, activation))  # type: ignore[no-any-return]
        return down(act_fn(first) * second)  # type: ignore[no-any-return]

    def _parts(self) -> tuple[Any, Any, Any, Any]:
        parts = self._modules
        return parts["gate_proj"], parts["up_proj"], parts["down_proj"], parts["act_fn"]

    def lay_side_by_side(self) -> None:
        """The two weights as halves of one new matrix, where they are ordinary and do not lie so."""
        first, second, _, _ = self._parts()
        if _taken_hold_of(first) or _taken_hold_of(second):
            return
        gate, up = first.weight, second.weight
        if gate.is_meta or type(gate.data) is not torch.Tensor or not _alike(gate, up) or _both(gate, up) is not None:
            return
        with torch.no_grad():
            whole = torch.cat((gate.data, up.data))
            gate.data, up.data = whole.split(len(gate))

    def given_back(self) -> nn.Module:
        theirs: Any = self._theirs
        theirs._modules.update(self._modules)
        theirs.training = self.training
        return theirs  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GatedMlp:
        """What `.to()`, `.half()`, `.to_empty()` come to."""
        super()._apply(fn, recurse)
        self.lay_side_by_side()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a copy and an unpickled module come to."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lay_side_by_side()


def _side_by_side_again(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, GatedMlp)
    module.lay_side_by_side()


# --- what can be fused ------------------------------------------------------------------------------------------------


def _llama(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _at_once(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _text(code: CodeType) -> tuple[Any, ...]:
    """What a function does, whatever its names for its arguments."""
    return code.co_code, code.co_names, code.co_argcount, code.co_kwonlyargcount


_KNOWN = {_text(function.__code__) for function in (_llama, _at_once)}


def _why_not(module: nn.Module) -> str | None:
    """Why a module with the parts of a gated MLP cannot be fused; None where it can."""
    code = getattr(type(module).forward, "__code__", None)
    if "forward" in vars(module) or code is None or _text(code) not in _KNOWN:
        return f"{type(module).__name__}.forward is another than down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks"
    for name in _PROJECTIONS[:2]:
        why = _taken_hold_of(getattr(module, name))
        if why:
            return f"{name} is {why}"
    if not _alike(module.gate_proj.weight, module.up_proj.weight):  # type: ignore[union-attr, arg-type]
        return "the weights of gate_proj and up_proj differ in shape, dtype or device"
    return None


def _taken_hold_of(linear: nn.Module) -> str | None:
    """What makes of a projection more than the product with its weight."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__}"
    own = vars(linear)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return "a Linear with hooks"
    if "forward" in own:
        return "a Linear with a forward of its own"
    kind = type(linear._parameters.get("weight"))
    return None if kind in _ORDINARY else f"a {kind.__name__}"


def _by_itself(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a projection gives; without the call of a module, which takes longer than its product, where that is all."""
    if _taken_hold_of(linear):
        return linear(x)  # type: ignore[no-any-return]
    given = linear._parameters
    return nn.functional.linear(x, given["weight"], given["bias"])  # type: ignore[arg-type]


_ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("torch.nn.modules.activation", "ReLU"): "relu",
    ("transformers.activations", "SiLUActivation"): "silu",
}


def _activation_of(module: nn.Module) -> str | None:
    """What kernels call an activation; None where they have none, or where somebody looks at it."""
    kind = type(module)
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    return _ACTIVATIONS.get((kind.__module__, kind.__qualname__))


# --- products ---------------------------------------------------------------------------------------------------------


def _has_kernels(*tensors: torch.Tensor) -> bool:
    """Whether the gate's own kernels can do it, and need be: nothing but training asks for them."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    return plain(*tensors) and all(t.is_cuda and t.is_contiguous() and t.dtype in _DTYPES for t in tensors)


def _in_a_graph(x: torch.Tensor) -> bool:
    """Whether a compiler is at work that runs its graph here: an exported one has what `import registry` defines."""
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    return not torch.is_autocast_enabled(x.device.type)


def _alike(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device


def _both(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """The two as one matrix, where they lie so in memory."""
    if not _alike(gate, up) or not gate.is_contiguous() or not up.is_contiguous():
        return None
    if up.data_ptr() != gate.data_ptr() + gate.numel() * gate.element_size() or not _is_alias_of(gate, up):
        return None
    rows, columns = gate.shape
    return gate.detach().as_strided((2 * rows, columns), (columns, 1))


def _gated_product(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    why = "of a size for which no fused kernel was measured to be the fastest"
    if _is_worth_it(x, gate, up, activation):
        both = _both(gate, up)
        if both is not None:
            return registry.matmul(x, both.t(), activation=activation, gated=True)
        why = "whose weights were moved apart: call fuse(model) again"
    went_elsewhere("transformers", f"a gated MLP {why}")
    linear = torch.nn.functional.linear
    return activate(linear(x, gate), activation).mul_(linear(x, up))


def _is_worth_it(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> bool:
    """Whether a kernel that ends with its gate was measured to be the fastest for sizes like these: elsewhere a
    library's grouped product would come first, which is slower for one group than its plain products."""
    global _known
    if not x.is_cuda:
        return True
    rows, moment = x.numel() // max(1, x.shape[-1]), Moment.now()
    if _known[0] is not moment:
        _known = moment, {}
    key = rows, gate.shape, x.dtype, x.device, activation, current.get().key
    found = _known[1].get(key)
    if found is None:
        both = _both(gate, up)
        if both is None:
            return True  # and there it is said why not
        decision = registry.matmul.explain(x.flatten(0, -2), both.t(), activation=activation, gated=True)
        found = _known[1][key] = decision.problem.op != registry.matmul.name
    return found


def _is_few(x: torch.Tensor) -> bool:
    """Whether there are so few rows that none would be asked for them, and nobody wants to be."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    scope = current.get()
    return x.numel() < FEW * x.shape[-1] and not scope.preferred and scope.forced_for("grouped_mm") is None


FEW = 64
"""Rows below which a step waits for the host, and a grouped product takes it longer than plain ones."""
_TOO_FEW = f"a gated MLP of fewer than {FEW} rows"
_known: tuple[Any, dict[Any, bool]] = (None, {})
"""What was found out under the tables of a moment."""
_library = torch.library.Library("registry", "FRAGMENT")
_library.define(
    "gated_product(Tensor x, Tensor gate, Tensor up, str activation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("gated_product", _gated_product, "CompositeExplicitAutograd")


def _fake(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


torch.library.register_fake("registry::gated_product", _fake, lib=_library)
counted("gated_product", lambda x, gate, up, *rest, **out: 2 * x.numel() * (len(gate) + len(up)))

__all__ = ["GatedMlp", "fuse", "unfuse"]
