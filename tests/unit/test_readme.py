"""The examples of the README and of docs/notebook.md run as they stand, from an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from icl.exit_codes import ExitCode

README = Path(__file__).parents[2] / "README.md"


def test_the_notebook_example(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    code += "print(run.status, run.steps[-1], len(metrics), tuple(ys_pred.shape))\n"
    code += "from icl.core.model import predict\n"
    code += "assert (predict(run.spec.model, run.params(300), batch['xs'], batch['ys']) == ys_pred).all()\n"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert result.stdout.split("\n")[0] == "complete 300 301 (256, 8, 1)"
    assert (tmp_path / "runs").is_dir()


def test_the_notebook_page(tmp_path: Path) -> None:
    """Block after block, as one notebook; everything it names is there."""
    text = (README.parent / "docs" / "notebook.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    code += "print(sorted(seen), tuple(to_first_y.shape), tuple(ws.shape), tuple(ridge.shape), tuple(dmmse.shape))\n"
    code += "assert {name for name, _ in model.named_modules()} >= set(seen)\n"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert result.stdout == (
        "['blocks.0', 'blocks.0.attention.output', 'blocks.1.mlp.hidden'] (64,) (32, 3) (32, 4, 1) (32, 4, 1)\n"
    )


def test_the_exit_codes_are_those_of_the_program() -> None:
    """The table, and what the help of each command says."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    assert rows == [(str(int(code)), code.meaning) for code in ExitCode]
    for command in ("run", "store", "sweep", "fleet"):
        helped = subprocess.run(
            [sys.executable, "-m", f"icl.{command}", "--help"], capture_output=True, text=True, check=True
        ).stdout
        shown = re.findall(r"^  (\d+) +(.*)$", helped[helped.index("exit codes:") :], re.MULTILINE)
        assert ("0", ExitCode.COMPLETE.meaning) in shown
        assert set(shown) <= set(rows)


def test_the_tree_lists_every_module() -> None:
    text = README.read_text()
    for module in (README.parent / "icl").rglob("*.py"):
        folder = module.parent.name
        named = f"{folder}/: a file each" if folder in ("architectures", "families", "optimizers") else module.name
        assert module.name == "__init__.py" or named in text, module
