"""Environment variables: those that something knows by its whole name, and those that nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest
import sets
import torch
from typer.testing import CliRunner

from sameday.cli import app
from sameday.hardware.kernels import kernels
from sameday.hardware.machine import Machine
from sameday.hardware.variables import installed_files, judged, knowers, of_libraries
from sameday.spec.load import dump_yaml


def test_names_are_whole(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"\x7fELF\0NCCL_P2P_DISABLE\0XNCCL_ALGO\0NCCL_ALGORITHM\0")
    (tmp_path / "code.py").write_text('os.environ.get("NCCL_ALGO")')
    (tmp_path / "empty.so").touch()
    files = [*tmp_path.iterdir(), tmp_path / "gone.so"]
    found = knowers(["NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_AL"], files)
    assert found == {"NCCL_P2P_DISABLE": ["lib.so"], "NCCL_ALGO": ["code.py"], "NCCL_AL": []}
    assert knowers([], files) == {}


def test_what_is_said_of_them(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.py").write_text("OMP_NUM_THREADS")
    (tmp_path / "lib.so").write_bytes(b"OMP_NUM_THREADS\0NVIDIA_TF32_OVERRIDE")
    asked = {"OMP_NUM_THREADS": "1", "FLASH_ATTENTION_FORCE_ENABLE": "1", "NVIDIA_TF32_OVERRIDE": "1"}
    known, nothing, numeric = judged(asked, tmp_path.iterdir())
    assert known == "OMP_NUM_THREADS=1: known to lib.so, 0.py and 3 more"
    assert nothing.startswith("FLASH_ATTENTION_FORCE_ENABLE=1: read by nothing")
    assert "set recipe.precision instead" in numeric
    (long,) = judged({"NVIDIA_REQUIRE_CUDA": "x" * 4000}, [])
    assert len(long) < 150 and "x…: read by nothing" in long


def test_only_libraries_variables_are_looked_at() -> None:
    assert of_libraries({"HOME": "/", "TORCH_LOGS": "x", "CUDA_VISIBLE_DEVICES": "", "PATH": ""}) == {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_LOGS": "x",
    }


def test_the_libraries_that_are_installed_know_their_own() -> None:
    some = [path for path in installed_files() if path.name in ("libtorch_cpu.so", "dataloader.py", "__init__.py")]
    found = knowers(["OMP_NUM_THREADS", "FLASH_ATTENTION_FORCE_ENABLE"], some)
    assert found["OMP_NUM_THREADS"] and not found["FLASH_ATTENTION_FORCE_ENABLE"]


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_kernels_of_a_machine_without_a_gpu(precision: str) -> None:
    found = {each.name: each for each in kernels(Machine("cpu", "CPU", 2**33, 2, False), precision)}
    assert found["attention sdpa"].there and not found["attention flex"].there and not found["cuda_graphs"].there
    assert found["attention flex"].why == "no GPU"


def test_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets.write_set(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    monkeypatch.setenv("FLASH_ATTENTION_FORCE_ENABLE", "1")
    monkeypatch.setattr("sameday.hardware.variables.installed_files", lambda: iter([Path(torch.__file__)]))
    done = CliRunner().invoke(app, ["profile", str(tmp_path / "recipe.yaml"), "--hardware"], catch_exceptions=False)
    assert done.exit_code == 0
    for words in ("float32 products", "GB/s", "attention flex", "level_kernel: plain, because", "read by nothing"):
        assert words in done.output, done.output
