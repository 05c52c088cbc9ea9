"""The laws of a backend as a suite of tests that pytest runs on any adapter."""

from pathlib import Path

import torch

from icl.backends.cpu import CPUBackend
from icl.core.backend import Backend, Tree, identical
from icl.core.step import build_eval, build_train, fold_steps, init_state, train_step
from icl.core.tasks import sample_batches, sample_task_pool
from icl.testing.settings import global_generators, hostile_settings, process_settings
from icl.testing.specs import tiny_spec


class BackendContract:
    """The laws of `icl.core.backend.Backend`: subclass as `Test...`, give a `backend` fixture and a tolerance.

    Attributes:
        tolerance: how far results may be from `fold_steps` on the CPU, relative and absolute; 0 means bit for bit.
    """

    tolerance = 0.0
    spec = tiny_spec()

    def test_compiled_steps_are_the_fold(self, backend: Backend) -> None:
        advance = build_train(self.spec, backend, num_steps=self.spec.run.max_chunk)
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
        advance = build_train(self.spec, backend, num_steps=self.spec.run.max_chunk)
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
                new, _ = build_train(self.spec, backend, num_steps=self.spec.run.max_chunk)(
                    backend.to_device(state), backend.to_device(batches), 4
                )
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

    def test_synchronize_waits_and_changes_nothing(self, backend: Backend) -> None:
        batches = backend.to_device(self._batches(0, 4))
        state, _ = build_train(self.spec, backend, num_steps=self.spec.run.max_chunk)(
            backend.to_device(init_state(self.spec)), batches, 4
        )
        backend.synchronize()
        backend.synchronize()  # with nothing left to wait for
        assert identical(backend.to_cpu(state), self._train(backend, [4]))

    def test_counters_only_grow_and_say_their_unit(self, backend: Backend) -> None:
        before = backend.counters()
        self._train(backend, [2, 2])
        after = backend.counters()
        assert before.keys() <= after.keys()
        for name, value in after.items():
            assert type(value) is float
            assert 0 <= before.get(name, 0.0) <= value
            assert value.is_integer() or name.endswith("_seconds"), f"{name} is no count and ends in no unit"

    def test_a_trace_is_written_and_changes_no_bit(self, backend: Backend, tmp_path: Path) -> None:
        folder = tmp_path / "trace"
        with backend.trace(str(folder)):
            traced = self._train(backend, [2, 2])
        assert any(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert identical(traced, self._train(backend, [2, 2]))

    def _batches(self, start: int, stop: int) -> Tree:
        rows = self.spec.run.max_chunk
        return sample_batches(self.spec, range(start, stop), sample_task_pool(self.spec), rows)

    def _train(self, backend: Backend, chunks: list[int]) -> Tree:
        advance, state, step = (
            build_train(self.spec, backend, num_steps=self.spec.run.max_chunk),
            backend.to_device(init_state(self.spec)),
            0,
        )
        for length in chunks:
            state, _ = advance(state, backend.to_device(self._batches(step, step + length)), length)
            step += length
        return backend.to_cpu(state)

    def _assert_close(self, got: Tree, want: Tree) -> None:
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=self.tolerance, atol=self.tolerance)
