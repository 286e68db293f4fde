"""Environment variables: those that something knows by its whole name, and those that nothing does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sets
import torch
from typer.testing import CliRunner

from sameday.cli import app
from sameday.hardware.kernels import kernels
from sameday.hardware.machine import Machine
from sameday.hardware.variables import installed_files, judged, knowers, of_libraries
from sameday.spec.document import dump_yaml

NOTHING = "its name is in no library that is installed here, so nothing here reads it"


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
    assert nothing == f"FLASH_ATTENTION_FORCE_ENABLE=1: {NOTHING}"
    assert "set recipe.precision instead" in numeric
    (long,) = judged({"NVIDIA_OF_MINE": "x" * 4000}, [])
    assert len(long) < 150 and f"x…: {NOTHING}" in long


@pytest.mark.parametrize("name", ["VISIBLE_DEVICES", "DRIVER_CAPABILITIES", "REQUIRE_CUDA", "REQUIRE_DRIVER"])
def test_what_a_container_is_started_with(name: str) -> None:
    (said,) = judged({f"NVIDIA_{name}": "all"}, [])
    assert said == f"NVIDIA_{name}=all: read by the container runtime, when the container starts"


def test_names_that_are_joined(tmp_path: Path) -> None:
    """As oneDNN does it, whose messages name a variable of its own; the beginnings need stand nowhere."""
    (tmp_path / "dnnl.so").write_bytes(b"\0set ONEDNN_VERBOSE=all\0MAX_CPU_ISA\0XJIT_DUMP\0")
    (tmp_path / "other.so").write_bytes(b"\0VERBOSE\0MAX_CPU_ISA\0ONEDNN_VERBOSELY\0JIT_DUMP\0")
    names = ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_JIT_DUMP", "MKL_MAX_CPU_ISA"]
    assert list(knowers(names, tmp_path.iterdir()).values()) == [["dnnl.so"], ["dnnl.so"], [], []]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("HF_API_KEY", True),
        ("TRANSFORMERS_SECRET", True),
        ("HF_PASSWORD", True),
        ("CUDA_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_HOME", False),
    ],
)
def test_secrets_are_not_shown(name: str, secret: bool) -> None:
    (said,) = judged({name: "hf_abc"}, [])
    assert ("hf_abc" in said) != secret and said.startswith(f"{name}={'(hidden)' if secret else 'hf_abc'}: ")


def test_only_libraries_variables_are_looked_at() -> None:
    assert of_libraries({"HOME": "/", "TORCH_LOGS": "x", "CUDA_VISIBLE_DEVICES": "", "PATH": ""}) == {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_LOGS": "x",
    }


@pytest.mark.slow
def test_the_libraries_that_are_installed_know_their_own() -> None:
    some = [path for path in installed_files() if path.name in ("libtorch_cpu.so", "dataloader.py", "__init__.py")]
    found = knowers(["OMP_NUM_THREADS", "FLASH_ATTENTION_FORCE_ENABLE", "ONEDNN_NO_SUCH_THING"], some)
    assert found["OMP_NUM_THREADS"] and not found["FLASH_ATTENTION_FORCE_ENABLE"] and not found["ONEDNN_NO_SUCH_THING"]
    if torch.backends.mkldnn.is_available():
        assert "libtorch_cpu.so" in knowers(["ONEDNN_MAX_CPU_ISA"], some)["ONEDNN_MAX_CPU_ISA"]


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_kernels_of_a_machine_without_a_gpu(precision: str) -> None:
    found = {each.name: each for each in kernels(Machine("cpu", "CPU", 2**33, 2, False), precision)}
    assert found["attention sdpa"].there and not found["attention flex"].there and not found["cuda_graphs"].there
    assert found["attention flex"].why == "no GPU"


def test_triton_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed as pytorch-triton too, and as triton-windows."""
    machine = Machine("cuda", "a GPU", 2**36, 2, True)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0+git"))
    assert {each.name: each for each in kernels(machine, "float32")}["attention flex"].why == "Triton 3.6.0+git"
    monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported
    assert "Triton" in {each.name: each for each in kernels(machine, "float32")}["attention flex"].why


@pytest.mark.slow
def test_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets.write_set(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    monkeypatch.setenv("FLASH_ATTENTION_FORCE_ENABLE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr("sameday.hardware.variables.installed_files", lambda: iter([Path(torch.__file__)]))
    words = ["profile", str(tmp_path / "recipe.yaml"), "--hardware", "--set", "plan.device=cpu"]
    words += ["--set", "plan.pin_memory=true", "--set", "plan.eval_steps=null"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the other tests have it
    assert done.exit_code == 0 and max(map(len, done.output.splitlines())) <= 100
    for words in ("float32 matmuls", "GB/s", "attention flex", "level_kernel: plain, because", NOTHING.split(",")[0]):
        assert words in done.output, done.output
    assert "plan.pin_memory: true, because" in done.output and "plan.eval_steps: null, because" in done.output
    assert "HF_TOKEN=(hidden)" in done.output and "hf_abc" not in done.output
    assert "TOKENIZERS_PARALLELISM" not in done.output, "the program sets it, and not the user"
