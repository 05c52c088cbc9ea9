"""For tests of icl and of new backends: a strict backend, a strategy for specs, and the backend contract as a suite."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from icl.backends.cpu import CPUBackend
from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import Advance, Backend, Tree, identical
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, RunSpec, ScheduleSpec, SeedsSpec, Spec, StepsSpec, TrainingSpec
from icl.core.step import build_eval, build_train, fold_steps, init_state, train_step
from icl.core.tasks import sample_batches, sample_task_pool

_HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class StrictBackend(CPUBackend):
    """The CPU backend as the strictest device: consumed state is poisoned, and what a real device forbids is refused.

    `host_reads` counts reads of values (`.item()`, `.tolist()`, branching on a tensor) inside compiled functions.
    """

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        super().__init__(matmul_precision, threads)
        self.host_reads = 0

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        compiled = super().compile(fn)

        def strict(*trees: Tree) -> Tree:
            with self._watched():
                return compiled(*trees)

        return strict

    def compile_steps(self, step: Any, *, num_steps: int) -> Advance:
        advance = super().compile_steps(step, num_steps=num_steps)

        def strict(state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
            for leaf in batches.values():
                leaf[length:] = float("nan")
            with self._watched():
                new, metrics = advance(state, batches, length)
            for key, leaf in state.items():
                if any(leaf.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for out in new.values()):
                    raise AssertionError(f"compiled steps: the new state shares memory with the consumed {key!r}")
                leaf.fill_(float("nan") if leaf.is_floating_point() else -(2**31))
            return new, metrics

        return strict

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = global_generators()
        with _CountHostReads() as counter:  # type: ignore[no-untyped-call]
            yield
        self.host_reads += counter.count
        if global_generators() != before:
            raise AssertionError("compiled function: a global random generator was used")


class _CountHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _HOST_READS
        return func(*args, **(kwargs or {}))


def global_generators() -> tuple[str, ...]:
    """Digests of the states of Python's, NumPy's and PyTorch's global random generators."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
    return tuple(hashlib.sha256(repr(state).encode()).hexdigest() for state in states)


@contextmanager
def hostile_settings(*, older: bool) -> Iterator[None]:
    """Whatever a process or a `with` can set that changes what PyTorch computes, at once; nothing is set before.

    Args:
        older: say the precision of products in the older of two ways, of which PyTorch refuses a mixture.
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, "highest")
        if older:
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined, unused-ignore]
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(threads + 1)
        stack.callback(torch.set_default_dtype, torch.float32)
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for setting in (torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
            stack.enter_context(setting)
        yield


def process_settings() -> dict[str, object]:
    """What `hostile_settings` sets, as it is now."""
    try:
        older: object = torch.get_float32_matmul_precision()
    except RuntimeError:  # set in the newer way
        older = "mixed"
    return {
        "cuda": torch.backends.cuda.matmul.fp32_precision,
        "mkldnn": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined, unused-ignore]
        "older": older,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "device": torch.empty(0).device,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "inference": torch.is_inference_mode_enabled(),
        "gradients": torch.is_grad_enabled(),
    }


def tiny_spec(**changes: Any) -> Spec:
    """A spec that trains in a moment; `changes` replace whole sections (`model=Timaeus(...)`)."""
    sections: dict[str, Any] = {
        "task": LinearTask(task_dim=3, num_examples=4),
        "model": Timaeus(num_layers=2, num_heads=2, embed_dim=8),
        "training": TrainingSpec(total_steps=20, batch_size=8),
        "evaluation": EvaluationSpec(batch_size=16),
        "run": RunSpec(
            checkpoint_at=StepsSpec(linear=3),
            evaluate_at=StepsSpec(linear=3),
            log_every=7,
            save_state_every=6,
            max_chunk=4,
        ),
    }
    return Spec(**(sections | changes))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Small specs over the whole space of tasks, architectures and schedules."""
    heads = draw(st.integers(1, 3))
    sizes = {
        "num_layers": st.integers(1, 2),
        "num_heads": st.just(heads),
        "embed_dim": st.integers(1, 4).map(lambda size: heads * size),
        "mlp_dim": st.integers(1, 9),
    }
    return tiny_spec(
        task=LinearTask(
            task_dim=draw(st.integers(1, 5)),
            num_examples=draw(st.integers(1, 6)),
            num_tasks=draw(st.none() | st.integers(1, 9)),
            noise_variance=draw(st.sampled_from((0.0, 1e-12, 0.125, 2.0))),
        ),
        model=draw(
            st.builds(Timaeus, **sizes, layer_norm=st.booleans(), attention_output=st.booleans())
            | st.builds(Raventos, **sizes)
        ),
        training=TrainingSpec(
            total_steps=draw(st.integers(1, 12)),
            batch_size=draw(st.integers(1, 5)),
            schedule=ScheduleSpec(
                name=draw(st.sampled_from(("one_cycle", "triangle", "constant", "warmup_cosine"))),
                learning_rate=draw(st.sampled_from((0.0, 1e-3, 0.003))),
                warmup_fraction=draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
            ),
        ),
        seeds=SeedsSpec(init=draw(st.integers(0, 2**64 - 1)), sampling=draw(st.integers(0, 99))),
    )


class BackendContract:
    """The laws of `icl.core.backend.Backend`: subclass as `Test...`, give a `backend` fixture and a tolerance.

    Attributes:
        tolerance: how far results may be from `fold_steps` on the CPU, relative and absolute; 0 means bit for bit.
    """

    tolerance = 0.0
    spec = tiny_spec()

    def test_compiled_steps_are_the_fold(self, backend: Backend) -> None:
        advance = build_train(self.spec, backend)
        for length in (1, 3, 4):
            batches = self._batches(0, length)
            expected = fold_steps(lambda s, b: train_step(self.spec, s, b), init_state(self.spec), batches, length)
            found = advance(backend.to_device(init_state(self.spec)), backend.to_device(batches), length)
            for got, want in zip(found, expected, strict=True):
                self._assert_close(backend.to_cpu(got), want)

    def test_bits_do_not_depend_on_chunks(self, backend: Backend) -> None:
        ends = [
            self._train(backend, chunks) for chunks in ([4, 4, 4], [1] * 12, [4, 4, 2, 2], [1, 3] * 3, [3, 4, 4, 1])
        ]
        assert all(identical(end, ends[0]) for end in ends)

    def test_round_trip_is_exact_and_shares_no_memory(self, backend: Backend) -> None:
        payload = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("nan"), 1 / 3])
        tree = {"floats": payload, "transposed": torch.arange(6.0).view(2, 3).T, "count": torch.tensor(2**40)}
        there = backend.to_device(tree)
        back = backend.to_cpu(there)
        assert identical(back, tree)
        payload.fill_(7)
        assert not identical(back, tree)
        assert not identical(backend.to_cpu(there), tree)
        assert all(leaf.device.type == "cpu" for leaf in back.values())

    def test_other_shapes_are_refused(self, backend: Backend) -> None:
        good, bad = ({"x": torch.ones(2, width)} for width in (3, 4))
        double = backend.compile(lambda tree: {"y": tree["x"] * 2})
        add = backend.compile_steps(lambda s, b: ({"x": s["x"] + b["x"]}, {"m": b["x"].sum()}), num_steps=2)
        double(backend.to_device(good))
        add(backend.to_device({"x": torch.ones(3)}), backend.to_device(good), 2)
        for call in (
            lambda: double(backend.to_device(bad)),
            lambda: add(backend.to_device({"x": torch.ones(4)}), backend.to_device(bad), 2),
            lambda: add(backend.to_device({"x": torch.ones(3)}), backend.to_device({"x": torch.ones(1, 3)}), 1),
            lambda: add(backend.to_device({"x": torch.ones(3)}), backend.to_device(good), 3),
            lambda: add(backend.to_device({"x": torch.ones(3)}), backend.to_device(good), 0),
        ):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError("other shapes were accepted")

    def test_results_belong_to_the_caller(self, backend: Backend) -> None:
        advance = build_train(self.spec, backend)
        first, first_metrics = advance(
            backend.to_device(init_state(self.spec)), backend.to_device(self._batches(0, 3)), 3
        )
        kept, kept_metrics = backend.to_cpu(first), backend.to_cpu(first_metrics)
        advance(backend.to_device(init_state(self.spec)), backend.to_device(self._batches(3, 6)), 3)
        assert identical(backend.to_cpu(first), kept)
        assert identical(backend.to_cpu(first_metrics), kept_metrics)

    def test_no_global_generator_is_used(self, backend: Backend) -> None:
        before = global_generators()
        self._train(backend, [2, 2])
        build_eval(self.spec, backend, None)(backend.to_device(init_state(self.spec)))
        backend.manual_seed(3)
        assert global_generators() == before

    def test_device_draws_are_a_function_of_the_seed(self, backend: Backend) -> None:
        device = backend.to_device({"x": torch.zeros(1)})["x"].device

        def draw(seed: int) -> torch.Tensor:
            drawn = torch.randn(9, generator=backend.manual_seed(seed), device=device)
            return backend.to_cpu({"x": drawn})["x"]

        assert torch.equal(draw(5), draw(5))
        assert not torch.equal(draw(5), draw(6))

    def test_numerics_are_pinned_and_put_back(self, backend: Backend) -> None:
        state, batches = init_state(self.spec), self._batches(0, 4)
        plain = self._train(backend, [4])
        for older in (False, True):
            with hostile_settings(older=older):
                before = process_settings()
                new, _ = build_train(self.spec, backend)(backend.to_device(state), backend.to_device(batches), 4)
                found = backend.to_cpu(new)
                assert process_settings() == before
            assert identical(found, plain)

    def test_evaluation_agrees_with_the_reference(self, backend: Backend) -> None:
        pool = sample_task_pool(self.spec)
        state = init_state(self.spec)
        ours = build_eval(self.spec, backend, pool)(backend.to_device(state))
        reference = build_eval(self.spec, CPUBackend(), pool)(state)
        assert ours.keys() == reference.keys()
        values = [torch.tensor(list(rows.values()), dtype=torch.float64) for rows in (ours, reference)]
        self._assert_close({"x": values[0]}, {"x": values[1]})

    def test_description_names_the_backend(self, backend: Backend) -> None:
        described = backend.describe()
        assert described["backend"] == backend.name
        assert described["torch"] == torch.__version__
        assert all(type(value) is str for value in described.values())

    def _batches(self, start: int, stop: int) -> Tree:
        rows = self.spec.run.max_chunk
        return sample_batches(self.spec, range(start, stop), sample_task_pool(self.spec), rows)

    def _train(self, backend: Backend, chunks: list[int]) -> Tree:
        advance, state, step = build_train(self.spec, backend), backend.to_device(init_state(self.spec)), 0
        for length in chunks:
            state, _ = advance(state, backend.to_device(self._batches(step, step + length)), length)
            step += length
        return backend.to_cpu(state)

    def _assert_close(self, got: Tree, want: Tree) -> None:
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=self.tolerance, atol=self.tolerance)


def with_training(spec: Spec, **changes: Any) -> Spec:
    """`spec` with fields of its `training` section replaced."""
    return attrs.evolve(spec, training=attrs.evolve(spec.training, **changes))
