"""One checkpoint as the two earlier public trainers name, lay out and store it. Nothing is executed when it is read."""

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import Tree
from icl.core.errors import SpecError
from icl.core.model import parameter_shapes
from icl.core.spec import Spec
from icl.io.errors import CheckpointError

_COPIES = 3  # of the parameters: beside them the original trainer's own files hold Adam's two moments
_SLACK = 2**20  # bytes of names and headers beside the tensors


@attrs.frozen
class Format:
    """A foreign format: `entries(model)` gives (our name, its name, ours -> its, its -> ours) of every parameter.

    Files and trees hold parameters in the order of `parameter_shapes`, whatever the order of `entries`, then buffers.
    """

    name: str
    suffix: str
    entries: Callable[[Any], list["Entry"]]
    buffers: Callable[[Spec], Tree]
    write: Callable[[Tree], bytes]
    read: Callable[[bytes], Mapping[str, Any]]


@attrs.frozen
class Entry:
    """One parameter under both names, and the two ways between the layouts."""

    ours: str
    theirs: str
    export: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]


def encode_params(kind: Format, spec: Spec, params: Tree) -> bytes:
    """The file of one checkpoint: parameters (float32, names of `parameter_shapes`) and what else the format holds."""
    tree = {entry.theirs: entry.export(params[entry.ours]).contiguous().clone() for entry in _in_order(kind, spec)}
    return kind.write(tree | kind.buffers(spec))


def decode_params(kind: Format, spec: Spec, data: bytes, where: str) -> Tree:
    """The parameters in such a file, bit for bit.

    Raises: CheckpointError, naming `where`, for anything but exactly the entries of this spec's architecture.
    """
    shapes = parameter_shapes(spec)
    entries, buffers = _in_order(kind, spec), kind.buffers(spec)
    expected = {entry.theirs: entry.export(torch.empty(shapes[entry.ours])).shape for entry in entries}
    expected |= {name: value.shape for name, value in buffers.items()}
    try:
        _require_small(data, 4 * _COPIES * sum(map(math.prod, expected.values())) + _SLACK)
        tree = kind.read(data)
        found = {name: (_dtype(value), tuple(value.shape)) for name, value in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise CheckpointError(
            f"{where}: got {reason}; expected a {kind.name} file. It is damaged or foreign."
        ) from None
    except UnpicklingError:
        raise CheckpointError(
            f"{where}: got a pickle that holds more than tensors; expected a {kind.name} file. It was not executed."
        ) from None
    wanted = {name: ("float32", tuple(shape)) for name, shape in expected.items()}
    faults = [f"no {name}" for name in wanted.keys() - found.keys()]
    faults += [f"an unknown {name}" for name in found.keys() - wanted.keys()]
    faults += [
        f"{name} {found[name]} for {wanted[name]}"
        for name in wanted.keys() & found.keys()
        if found[name] != wanted[name]
    ]
    tensors = {name: torch.as_tensor(tree[name]) for name in wanted.keys() & found.keys()} if not faults else {}
    faults += [f"another {name}" for name, value in buffers.items() if not faults and not tensors[name].equal(value)]
    if faults:
        raise CheckpointError(
            f"{where}: got {', '.join(sorted(faults)[:8])}; expected the {kind.name} entries of this spec. "
            "Correct the spec, or choose the file that belongs to it."
        )
    return {entry.ours: entry.restore(tensors[entry.theirs]).contiguous().clone() for entry in entries}


def _in_order(kind: Format, spec: Spec) -> list[Entry]:
    entries = {entry.ours: entry for entry in kind.entries(spec.model)}
    return [entries[name] for name in parameter_shapes(spec)]


def _require_small(data: bytes, limit: int) -> None:
    """Refuse an archive that unpacks to more than it may hold, before it is unpacked."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(item.file_size for item in archive.infolist())
    if size > limit:
        raise ValueError(f"an archive of {size} bytes for at most {limit}")


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _same(value: Tensor) -> Tensor:
    return value


def _transposed(value: Tensor) -> Tensor:
    return value.T


def _timaeus_entries(model: Timaeus) -> list[Entry]:
    root = "token_sequence_transformer."
    heads, embed = model.num_heads, model.embed_dim

    def by_head(value: Tensor) -> Tensor:
        return value.view(3, heads, embed // heads, embed).transpose(0, 1).reshape(3 * embed, embed)

    def by_use(value: Tensor) -> Tensor:
        return value.view(heads, 3, embed // heads, embed).transpose(0, 1).reshape(3 * embed, embed)

    entries = [
        Entry("token_embedding.weight", f"{root}token_embedding.weight", _same, _same),
        Entry("position_embedding.weight", f"{root}postn_embedding.weight", _transposed, _transposed),
    ]
    pairs = [("unembedding", "unembedding.1" if model.layer_norm else "unembedding")]
    pairs += [("final_layer_norm", "unembedding.0")] if model.layer_norm else []
    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        attention = f"{block}.attention"
        entries.append(Entry(f"{attention}.qkv.weight", f"{root}{attention}.attention.weight", by_head, by_use))
        if model.attention_output:
            entries.append(Entry(f"{attention}.output.weight", f"{root}{attention}.output.weight", _same, _same))
        pairs += [(f"{block}.mlp.hidden", f"{block}.compute.0"), (f"{block}.mlp.output", f"{block}.compute.2")]
        if model.layer_norm:
            norms = ("attention_layer_norm", "mlp_layer_norm")
            pairs += [(f"{block}.{norm}", f"{block}.layer_norms.{index}") for index, norm in enumerate(norms)]
    for ours, theirs in pairs:
        entries += [Entry(f"{ours}.{leaf}", f"{root}{theirs}.{leaf}", _same, _same) for leaf in ("weight", "bias")]
    return entries


def _timaeus_buffers(spec: Spec) -> Tree:
    tokens = 2 * spec.task.num_examples
    mask = torch.full((tokens, tokens), -math.inf, dtype=torch.float32).triu(1)
    return {
        f"token_sequence_transformer.blocks.{layer}.attention.causal_mask": mask.clone()
        for layer in range(spec.model.num_layers)
    }


def _raventos_entries(model: Raventos) -> list[Entry]:
    entries = [
        Entry("token_embedding.weight", "_in/kernel", _transposed, _transposed),
        Entry("position_embedding.weight", "_h/wpe/embedding", _same, _same),
        Entry("unembedding.weight", "_out/kernel", _transposed, _transposed),
    ]
    norms = [("final_layer_norm", "_h/ln_f")]
    for layer in range(model.num_layers):
        block, theirs = f"blocks.{layer}", f"_h/hs_{layer}"
        norms += [(f"{block}.attention_layer_norm", f"{theirs}/ln_1"), (f"{block}.mlp_layer_norm", f"{theirs}/ln_2")]
        for ours, name in (
            ("attention.qkv", "attn/c_attn"),
            ("attention.output", "attn/c_proj"),
            ("mlp.hidden", "mlp/c_fc"),
            ("mlp.output", "mlp/c_proj"),
        ):
            entries.append(Entry(f"{block}.{ours}.weight", f"{theirs}/{name}/kernel", _transposed, _transposed))
            entries.append(Entry(f"{block}.{ours}.bias", f"{theirs}/{name}/bias", _same, _same))
    for ours, name in norms:
        entries += [
            Entry(f"{ours}.weight", f"{name}/scale", _same, _same),
            Entry(f"{ours}.bias", f"{name}/bias", _same, _same),
        ]
    return entries


def _write_torch(tree: Tree) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def _read_torch(data: bytes) -> Mapping[str, Any]:
    loaded: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # The original trainer's own files hold the optimiser and the scheduler beside the model.
    tree = (
        loaded["model"]
        if isinstance(loaded, Mapping) and set(loaded) == {"model", "optimizer", "scheduler"}
        else loaded
    )
    if not isinstance(tree, Mapping):
        raise ValueError(f"{type(tree).__name__} for a state dict")
    return tree


def _write_arrays(tree: Tree) -> bytes:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: value.numpy() for name, value in tree.items()}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _read_arrays(data: bytes) -> Mapping[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


FORMATS = {
    "timaeus": Format("timaeus", ".pt", _timaeus_entries, _timaeus_buffers, _write_torch, _read_torch),
    "raventos": Format("raventos", ".npz", _raventos_entries, lambda spec: {}, _write_arrays, _read_arrays),
}
"""By the architecture that each of them can hold."""


def format_of(spec: Spec) -> Format:
    """The foreign format of a spec's architecture. Raises SpecError for one that has none."""
    name = spec.model.architecture
    if name not in FORMATS:
        raise SpecError(
            f"format: got architecture {name}, which no earlier trainer has; expected {' or '.join(FORMATS)}. "
            "Export the whole run: --format icl."
        )
    return FORMATS[name]
