"""mypy refuses an adapter that is not what the protocol says: `make check` fails, before anything runs."""

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
ADAPTERS = ("cpu", "cuda", "xla")
CHECKED = ["icl/core/backend.py", "icl/backends/__init__.py", *(f"icl/backends/{name}.py" for name in ADAPTERS)]


def check(folder: Path, shadows: dict[str, str]) -> str:
    """What mypy says of the adapters, with other texts in place of some; it follows no other import, which is quick."""
    command = ["--config-file=", "--strict", "--follow-imports=skip", f"--cache-dir={folder / 'cache'}"]
    for path, text in shadows.items():
        shadow = folder / Path(path).name
        shadow.write_text(text)
        command += ["--shadow-file", path, str(shadow)]
    out, err, _ = api.run(command + CHECKED)
    assert not err
    return out


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_adapters_are_what_the_protocol_says(tmp_path: Path) -> None:
    assert "incompatible" not in check(tmp_path, {})


WRONG = {
    "renamed": ("def synchronize(self)", "def synchronise(self)"),
    "another result": ("def counters(self) -> dict[str, float]", "def counters(self) -> list[float]"),
    "one argument less": ("def trace(self, directory: str)", "def trace(self)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_signature_is_refused_in_each_adapter(tmp_path: Path, wrong: str) -> None:
    right, changed = WRONG[wrong]
    shadows = {}
    for adapter in ADAPTERS:
        path = f"icl/backends/{adapter}.py"
        text = (ROOT / path).read_text()
        assert right in text
        shadows[path] = text.replace(right, changed)
    told = check(tmp_path, shadows)
    for adapter in ("CPUBackend", "CUDABackend", "XLABackend"):
        assert f'Incompatible return value type (got "{adapter}", expected "Backend")' in told
