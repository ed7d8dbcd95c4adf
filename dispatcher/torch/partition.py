"""A graph of ATen operators in groups that run here, as large as possible, and what PyTorch keeps."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatcher.errors import DispatcherError, UnsupportedError
from dispatcher.problem.operator import DTYPES
from dispatcher.torch.draft import RefusedError
from dispatcher.torch.graph import NO_STEP, Constant, base_of, describe, operator_name
from dispatcher.torch.importing import Imported, translate
from dispatcher.torch.layers import HANDLERS
from dispatcher.torch.patterns import PARTS

#: Operators that rearrange: alone they end no group, but a group may go on behind them.
_LAYOUT = ("permute", "transpose", "movedim", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
           "expand", "contiguous", "alias", "detach", "to", "_unsafe_view", "t", "swapaxes", "moveaxis")  # fmt: skip
#: What makes a group worth a launch; the others are left to PyTorch where they stand alone.
_HEAVY = ("conv", "norm", "pool", "softmax", "logsumexp", "linear", "mean", "sum", "amax", "amin")
#: Why a product of matrices stays in PyTorch.
_PRODUCT = "a product of matrices is faster in PyTorch where no convolution goes along"


@dataclass
class Candidate:
    """Nodes that may run together.

    Attributes:
        nodes: in the graph's order.
        good: those of them, from the first on, that were seen to make a problem.
    """

    nodes: list[Any]
    good: list[Any] = field(default_factory=list)


@dataclass
class Piece:
    """A group on its own.

    Attributes:
        module: the group's nodes as a module of its own, for PyTorch.
        inputs: nodes of the whole graph that it reads, in the order of the module's arguments.
        output: the node whose value it makes.
        nodes: in order.
    """

    module: torch.fx.GraphModule
    inputs: list[Any]
    output: Any
    nodes: list[Any]

    def translated(self, weights: Mapping[Any, torch.Tensor], name: str) -> Imported:
        """The problem that it computes.

        Args:
            weights: what those of the inputs hold that are weights and buffers.
            name: of the problem.

        Raises:
            UnsupportedError: it computes something else than problems can say.
        """
        own = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        tensors: dict[Any, Any] = {}
        inputs = []
        for node, outer in zip(own, self.inputs, strict=True):
            value = outer.meta["val"]
            if outer in weights:
                data = weights[outer].detach()
                tensors[node] = Constant(outer.name, data, tuple(data.shape), outer.op == "get_attr")
            elif isinstance(value, torch.Tensor):
                if not value.ndim:
                    raise RefusedError(f"{outer.name} is a number that is given anew in each call")
                inputs.append(node)
            else:
                tensors[node] = value
        (result,) = [node.args[0] for node in self.module.graph.nodes if node.op == "output"]
        nodes = list(self.module.graph.nodes)
        title = f"{name}, compiled from PyTorch"
        return translate(nodes, tensors, inputs, [result.name], title, name, freely=True)


def without_writes(graph: torch.fx.Graph) -> None:
    """Compute in place nothing that can be computed anew: ``relu_`` of a value that nobody sees otherwise."""
    for node in list(graph.nodes):
        name = operator_name(node.target).removeprefix("aten.") if node.op == "call_function" else ""
        if not name.endswith("_") or name.endswith("__"):
            continue
        target = node.args[0]
        packet = getattr(torch.ops.aten, name[:-1], None)
        overload = getattr(packet, node.target._overloadname, None)
        own = target.op == "call_function" and not any(map(_may_alias, (target, *(set(target.users) - {node}))))
        if overload is not None and own:
            later = [user for user in target.users if user is not node and _comes_after(user, node)]
            node.target = overload
            for user in later:
                user.replace_input_with(target, node)


def fold(module: torch.fx.GraphModule) -> dict[Any, torch.Tensor]:
    """Compute at once what depends on no input, such as ``torch.ones(4, 1, 1)``; gives the nodes that hold it."""
    graph, known = module.graph, dict[Any, torch.Tensor]()
    # What somebody writes into, or may do once it is returned, has to be new in every call.
    ends = [node for node in graph.nodes if _writes(node) or node.op == "output"]
    written = {base_of(each) for node in ends for each in node.all_input_nodes}
    for node in list(graph.nodes):
        value = None
        if node.op == "get_attr":
            value = getattr(module, node.target)
        elif node.op == "call_function" and known.keys() >= set(node.all_input_nodes) and _is_repeatable(node):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            value = node.target(*args, **kwargs)
        if not isinstance(value, torch.Tensor) or base_of(node) in written:
            continue
        holder = node
        if node.op != "get_attr":
            name = f"_folded_{len(known)}"
            module.register_buffer(name, value, persistent=False)
            with graph.inserting_before(node):
                holder = graph.get_attr(name)
            holder.meta = dict(node.meta)
            node.replace_all_uses_with(holder)
            graph.erase_node(node)
        known[holder] = value
    return known


def _is_repeatable(node: Any) -> bool:
    """Whether a node gives the same for the same, and does nothing else."""
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) and not _writes(node)


def _may_alias(node: Any) -> bool:
    """Whether the result of a node may share memory with what it reads."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # getitem, ...
        return bool(node.op == "call_function")
    return any(each.alias_info is not None for each in schema.returns) or "dropout" in operator_name(node.target)


def _comes_after(one: Any, other: Any) -> bool:
    return bool(other < one)


def pieces_of(graph: torch.fx.Graph, weights: Mapping[Any, torch.Tensor]) -> tuple[list[Piece], list[tuple[Any, str]]]:
    """Groups of a graph that can run here.

    Args:
        graph: of ATen operators, without dead code; each node has ``meta["val"]``.
        weights: what nodes hold that are weights, buffers and constants.

    Returns:
        The groups; and the nodes that stay in PyTorch, with the reason.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    left = {node: reason for node in graph.nodes if (reason := _refused(node)) is not None}
    parts = {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in left}
    epoch, epochs = 0, {}
    for node in graph.nodes:
        epochs[node] = epoch
        epoch += _writes(node)
    out = {*left, *parts}
    free = [n for n in graph.nodes if n.op == "call_function" and n not in out and _first_tensor(n) is not None]
    found: list[Candidate] = []
    rest: list[Any] = []
    while _worth_it(free):
        made = _grown(free, order, epochs, weights, left)
        found += made
        taken = {node for candidate in made for node in candidate.good}
        free = [node for node in free if node not in taken and node not in left]
        if not made:  # the first result that others read too keeps all behind it from being a group of one result
            ends = (
                i
                for i, node in enumerate(free, 1)
                if _is_part(node) or _is_product(node) or not set(node.users) <= set(free)
            )
            cut = next(ends, len(free))
            rest, free = rest + free[:cut], free[cut:]
    for node in [*rest, *free]:
        left.setdefault(node, _PRODUCT if _is_product(node) else "alone it is too little work for a launch of its own")
    pieces = [piece for each in found if (piece := _piece(each.good)) is not None]
    whole = [entry for entry in left.items() if entry[0].target is not operator.getitem]
    return pieces, sorted(whole, key=lambda entry: order[entry[0]])


def _grown(
    free: Sequence[Any],
    order: Mapping[Any, int],
    epochs: Mapping[Any, int],
    weights: Mapping[Any, torch.Tensor],
    left: dict[Any, str],
) -> list[Candidate]:
    """Groups out of the free nodes, grown in the graph's order; nodes that turn out to have no counterpart go to
    ``left``."""
    home: dict[Any, Candidate] = {}
    for node in free:
        before = {id(home[each]): home[each] for each in node.all_input_nodes if each in home}
        joined = [c for c in before.values() if all(epochs[other] == epochs[node] for other in c.nodes)]
        while True:
            nodes = sorted({node, *(other for c in joined for other in c.nodes)}, key=order.__getitem__)
            if not joined or (_convex(nodes, order)):
                break
            joined.pop()
        good = max((c.good for c in joined), key=len, default=[])
        outputs = _outputs(nodes)
        if len(outputs) == 1:
            reason = _reason(nodes, weights)
            if reason == "":
                good = nodes
            elif reason is not None and operator_name(node.target).removeprefix("aten.") not in _LAYOUT:
                alone = _reason([node], weights)
                if alone:  # else it only does not fit what stands before it
                    left[node] = alone
                    continue
                nodes, good, joined = [node], [] if alone is None else [node], []
        candidate = Candidate(nodes, good)
        for other in nodes:
            home[other] = candidate
    made = {id(c): c for c in home.values() if _worth_it(c.good)}
    return [c for c in made.values() if len(_outputs(c.good)) == 1]


def _reason(nodes: Sequence[Any], weights: Mapping[Any, torch.Tensor]) -> str | None:
    """Why nodes make no problem; empty when they do; None when only their end is not one yet."""
    piece = _piece(nodes)
    if piece is None:
        return None
    try:
        products = piece.translated(weights, "group").arranged
    except UnsupportedError as error:
        found: list[Any] = list(error.nodes)
        last = [each for each in found if each.node.name == piece.nodes[-1].name]
        reason = str((last or found)[0].reason)
        # The end has no layout of its own yet, or holds what a later step takes in, as a convolution does a ``cat``.
        return None if reason.startswith("the result") or (reason == NO_STEP and _is_part(found[0].node)) else reason
    except DispatcherError as error:
        return str(error)
    except Exception as error:  # a symbol where only a number will do
        return f"{type(error).__name__}: {error}"
    # Products of matrices alone are left to PyTorch, whose library for them is faster than a convolution.
    names = [operator_name(node.target) for node in nodes]
    return None if products and not any("conv" in name or "pool" in name for name in names) else ""


def _is_part(node: Any) -> bool:
    """Whether a node makes what only a later step gives a meaning."""
    return any(part in operator_name(node.target) for part in PARTS)


def _is_product(node: Any) -> bool:
    return operator_name(node.target).removeprefix("aten.") in ("linear", "addmm", "mm", "bmm", "matmul")


def _worth_it(nodes: Sequence[Any]) -> bool:
    names = [operator_name(node.target) for node in nodes]
    return any(part in name for name in names for part in _HEAVY)


def _outputs(nodes: Sequence[Any]) -> list[Any]:
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _convex(nodes: Sequence[Any], order: Mapping[Any, int]) -> bool:
    """Whether no way leads out of the nodes and back in."""
    inside, last = set(nodes), order[nodes[-1]]
    reached = [user for node in nodes for user in node.users if user not in inside]
    seen = set(reached)
    while reached:
        for user in reached.pop().users:
            if user in inside:
                return False
            if user not in seen and order[user] <= last:
                seen.add(user)
                reached.append(user)
    return True


def _piece(nodes: Sequence[Any]) -> Piece | None:
    """Nodes as a module of their own; None where they have several results."""
    outputs = _outputs(nodes)
    if len(outputs) != 1:
        return None
    inside = set(nodes)
    inputs = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    for outer in inputs:
        copies[outer] = graph.placeholder(outer.name)
        copies[outer].meta = dict(outer.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[outputs[0]])
    return Piece(torch.fx.GraphModule({}, graph), inputs, outputs[0], list(nodes))


def _refused(node: Any) -> str | None:
    """Why a node cannot be in a group whatever stands around it, or None."""
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    if node.op != "call_function":
        return f"it is a {node.op}"
    name = operator_name(node.target).removeprefix("aten.")
    if _first_tensor(node) is None or node.target is operator.getitem:
        return None
    if _updates_statistics(node):
        return "in training mode it updates running statistics"
    if _writes(node):
        return "it writes into a tensor that others may see"
    if name not in HANDLERS:
        return NO_STEP
    tensors = [_first_tensor(each) for each in (node, *node.all_input_nodes)]
    kinds = {str(each.dtype).removeprefix("torch.") for each in tensors if each is not None and each.ndim}
    if len(kinds) != 1 or not kinds <= set(DTYPES):
        return f"its dtypes are {', '.join(sorted(kinds)) or 'none'}; expected one of {', '.join(DTYPES)}"
    return None


def _first_tensor(node: Any) -> Any:
    """The tensor that a node makes, or the first of several; None where it makes a number or nothing."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first if isinstance(first, torch.Tensor) else None


def _writes(node: Any) -> bool:
    """Whether a node changes a tensor; batch norms change their running statistics."""
    schema = getattr(node.target, "_schema", None)
    return bool((schema is not None and schema.is_mutable) or _updates_statistics(node))


def _updates_statistics(node: Any) -> bool:
    is_norm = node.op == "call_function" and operator_name(node.target) == "aten.batch_norm"
    return is_norm and bool(node.args[5]) and node.args[3] is not None


def places(nodes: Iterable[tuple[Any, str]]) -> list[str]:
    """What stays in PyTorch, for people."""
    return [str(describe(node, reason)) for node, reason in nodes]
