"""A loop of steps as one XLA program. The only file that calls private functions of torch_xla, and those are few."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from icl.core.backend import Step, Tree

Ops = list[Any]  # of xb.Op


def barrier(tensors: Iterable[Tensor]) -> None:
    """Compile, unless done before, and hand to the device what these tensors wait for, as one graph; return at once.

    Unlike `torch_xla.sync()` it leaves alone whatever else in the process is pending.
    """
    torch_xla._XLAC._xla_sync_multi(list(tensors), devices=[], wait=False, sync_xla_data=True)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of device tensors in CPU memory, all in one transfer."""
    fetched: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors(list(tensors))
    return fetched


class FoldProgram:
    """The fold of a step over a run-time number of batches: one While, traced once, the same for every length.

    The trip count is an input. A constant one would need a program for each length, and XLA inlines a loop of one trip
    and fuses it differently, so that the bits would depend on how a run is cut into chunks.
    """

    def __init__(self, step: Step, state: Tree, batches: Tree, device: torch.device) -> None:
        self._state_keys, self._batch_keys = list(state), list(batches)
        self._metric_keys: list[str] = []
        body, sources, metrics = self._lower(step, state, batches)
        self._constants = [value.to(device) for value in sources.values() if isinstance(value, Tensor)]
        self._computation = self._build_loop(body, list(sources.values()), metrics, state, batches)

    def __call__(self, state: Tree, batches: Tree, length: Tensor) -> tuple[Tree, Tree]:
        """The state after `length` () int64 steps and the stacked metrics, pending until the next barrier."""
        inputs = [
            length,
            *(state[key] for key in self._state_keys),
            *(batches[key] for key in self._batch_keys),
            *self._constants,
        ]
        outputs = torch_xla._XLAC._xla_user_computation("icl::fold", inputs, self._computation)
        num_leaves = len(self._state_keys)
        return (
            dict(zip(self._state_keys, outputs[:num_leaves], strict=True)),
            dict(zip(self._metric_keys, outputs[num_leaves:], strict=True)),
        )

    def _lower(self, step: Step, state: Tree, batches: Tree) -> tuple[Any, dict[int, Any], list[Tensor]]:
        """The step as a computation, where each of its parameters comes from, and metrics on the meta device.

        A source is an index into (state leaves, batch leaves), or the value of a number that PyTorch made a parameter.
        """
        fakes = [xb.create_placeholder_tensor(leaf.shape, leaf.dtype) for leaf in state.values()]
        fakes += [xb.create_placeholder_tensor(leaf.shape[1:], leaf.dtype) for leaf in batches.values()]
        num_leaves = len(state)
        new, metrics = step(
            dict(zip(self._state_keys, fakes[:num_leaves], strict=True)),
            dict(zip(self._batch_keys, fakes[num_leaves:], strict=True)),
        )
        self._metric_keys = list(metrics)
        for key, leaf in state.items():
            if new[key].shape != leaf.shape or new[key].dtype != leaf.dtype:
                raise ValueError(
                    f"compiled steps: got the new state {key!r} as {tuple(new[key].shape)} {new[key].dtype}; expected "
                    f"{tuple(leaf.shape)} {leaf.dtype} as before the step. Correct the step."
                )
        outputs = [*(new[key] for key in self._state_keys), *metrics.values()]
        drawn, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
        if torch_xla._XLAC._get_seed_info_id() in drawn:
            raise ValueError(
                "compiled steps: got a step that draws random numbers; expected one that is a function of state and "
                "batch, since the draws would be the same in every step. Draw them into the batch."
            )
        context = torch_xla._XLAC.lowering.LoweringContext("step")
        context.build(outputs)
        sources: dict[int, Any] = dict(context.device_parameter_id_tensor_mapping())
        for index, fake in enumerate(fakes):
            parameter = context.tensor_parameter_id(fake)
            if parameter != -1:
                sources[parameter] = index
        body = xb.computation_from_module_proto("step", context.hlo())
        return body, dict(sorted(sources.items())), [metric.detach().to("meta") for metric in metrics.values()]

    def _build_loop(self, body: Any, sources: list[Any], metrics: list[Tensor], state: Tree, batches: Tree) -> Any:
        num_rows = next(iter(batches.values())).shape[0]
        builder = xb.create_builder("fold")
        inputs = _parameters(builder, [torch.tensor(0), *state.values(), *batches.values(), *self._constants])
        length, rest = inputs[0], inputs[1:]
        stacked = [
            xb.Op.zero(builder, dtype=xb.Op.from_torch_type(metric.dtype)).broadcast([num_rows, *metric.shape])
            for metric in metrics
        ]
        num_leaves, num_outputs = len(state), len(state) + len(metrics)

        def more(index: Any, length: Any, *_: Any) -> Any:
            return index < length

        def one_step(index: Any, length: Any, *carried: Any) -> tuple[Any, ...]:
            outputs, others = list(carried[:num_outputs]), carried[num_outputs:]
            rows = [_row(leaf, index) for leaf in others[: len(batches)]]
            leaves, constants = [*outputs[:num_leaves], *rows], iter(others[len(batches) :])
            arguments = [leaves[source] if isinstance(source, int) else next(constants) for source in sources]
            result = xb.Op.call(body, arguments)
            values = [result.get_tuple_element(i) for i in range(num_outputs)]
            for i in range(num_leaves, num_outputs):
                values[i] = _with_row(outputs[i], values[i], index)
            one = xb.Op.scalar(index.builder(), 1, dtype=xb.Type.S64)
            return (index + one, length, *values, *others)

        zero = xb.Op.scalar(builder, 0, dtype=xb.Type.S64)
        carried = (zero, length, *rest[:num_leaves], *stacked, *rest[num_leaves:])
        end = xb.Op.mkwhile(carried, more, one_step)
        return xb.Op.tuple([end.get_tuple_element(2 + i) for i in range(num_outputs)]).build("fold")


def _parameters(builder: Any, like: Iterable[Tensor]) -> Ops:
    shapes = [xb.mkshape(xb.Op.from_torch_type(leaf.dtype), leaf.shape) for leaf in like]
    return [xb.mkparam(builder, number, shape) for number, shape in enumerate(shapes)]


def _row(stacked: Any, index: Any) -> Any:
    sizes = list(stacked.shape().sizes)
    start = [index, *[index.zeros_like()] * (len(sizes) - 1)]
    return stacked.dynamic_slice(start, [1, *sizes[1:]]).reshape(sizes[1:])


def _with_row(stacked: Any, row: Any, index: Any) -> Any:
    start = [index, *[index.zeros_like()] * (stacked.shape().rank - 1)]
    return stacked.dynamic_update_slice(row.broadcast([1]), start)


PRIVATE: tuple[Callable[[], object], ...] = (
    lambda: torch_xla._XLAC._xla_sync_multi,
    lambda: torch_xla._XLAC._xla_get_cpu_tensors,
    lambda: torch_xla._XLAC._xla_user_computation,
    lambda: torch_xla._XLAC._get_tensors_xla_device_data_node,
    lambda: torch_xla._XLAC._get_seed_info_id,
    lambda: torch_xla._XLAC.lowering.LoweringContext,
)
"""Every private function used here, so that a test can say which one a new torch_xla has lost."""
