"""The bar: where it is shown, how often it is written, and that bars in threads do not meet."""

import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import icl
from icl.progress import progress_bar
from icl.testing import tiny_spec, with_training


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_training_shows_its_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = icl.train(tiny_spec(), store=tmp_path)
    shown = capsys.readouterr().err
    assert "20/20" in shown
    assert all(f"{word}=" in shown for word in ("loss", "mse", "true mse"))
    loss = run.metrics()["train/loss"][20]
    assert f"loss={loss:.4g}" in shown.splitlines()[-1]
    icl.train(tiny_spec(), store=tmp_path)  # already complete
    assert "20/20" in capsys.readouterr().err


def test_false_is_silent_and_a_function_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[int, set[str]] = {}
    icl.train(tiny_spec(), store=tmp_path / "one", progress=False)
    icl.train(tiny_spec(), store=tmp_path / "two", progress=lambda step, row: told.setdefault(step, set()).update(row))
    assert capsys.readouterr().err == ""
    assert {"train/loss", "pretrain/mse", "true/delta_dmmse"} <= told[20]
    assert max(told) == 20


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress_bar(5000, leave=True) as progress:
        for step in range(5001):
            progress(step, {"train/loss": 1.0})
    # At the start, at the end, and once each half minute, of which there are not fifty before the test is given up.
    assert 2 <= log.getvalue().count("/5000") < 50


def test_steps_without_metrics_move_the_bar_and_keep_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(10, leave=True) as progress:
        progress(0, {"pretrain/mse": 2.5})
        progress(4, {})
        progress(10, {"train/loss": 1.25})
    assert "loss=1.25, mse=2.5" in terminal.getvalue().split("\r")[-1]


def test_what_an_earlier_attempt_did_counts_for_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tqdm[None]] = []

    def make(**options: Any) -> "tqdm[None]":
        made.append(tqdm(**options))
        return made[0]

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("icl.progress._bar_class", lambda: make)
    with progress_bar(1000, leave=True) as progress:
        progress(990, {})
        progress(995, {})
    assert (made[0].initial, made[0].n) == (990, 995)


def test_two_trainings_in_threads(tmp_path: Path) -> None:
    specs = [with_training(tiny_spec(), batch_size=size) for size in (7, 9)]
    ended: dict[int, str] = {}

    def train(index: int) -> None:
        ended[index] = icl.train(specs[index], store=tmp_path).status

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == {0: "complete", 1: "complete"}


NOTEBOOK = """
import sys, types
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules.update({"IPython": ipython, "ipykernel": types.ModuleType("ipykernel"), "ipywidgets": None})
from icl.progress import progress_bar
with progress_bar(2, leave=True) as progress:
    progress(1, {})
    progress(2, {})
"""


def test_a_notebook_without_widgets_has_a_text_bar_and_no_advice() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", NOTEBOOK], capture_output=True, text=True, check=True
    )
    assert "2/2" in result.stderr
    assert "Warning" not in result.stderr
