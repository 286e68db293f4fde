"""How much memory a process could still take: never more than the bounds that it is under leave."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sets
import torch

from sameday.commands.session import Session, Specs
from sameday.hardware.memory import _of_groups, free_memory, idle_in_graphs, segments_grow
from sameday.spec.plan import Plan
from sameday.tasks.setup import TRAINING

DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_it_is_a_part_of_what_there_is(device: torch.device) -> None:
    free, total = free_memory(device)
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("name", "value", "grow"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_the_environment_says_whether_segments_grow(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, grow: bool
) -> None:
    for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert segments_grow() == grow


def test_only_what_graphs_of_this_device_hold_and_no_tensor_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 1000 * size, "allocated_size": 100 * size}
        for device, pool, size in ((0, (0, 0), 1), (0, (0, 3), 2), (0, (4, 0), 4), (1, (0, 3), 8))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert idle_in_graphs(torch.device("cuda", 0)) == 900 * 6 and idle_in_graphs(torch.device("cuda", 1)) == 900 * 8
    assert idle_in_graphs(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert idle_in_graphs(torch.device("cuda", 0)) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU records no graphs")
def test_a_recorded_graph_holds_what_it_computes_with() -> None:
    device, size = torch.device("cuda", torch.cuda.current_device()), 2**28
    before, graph = idle_in_graphs(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(size, dtype=torch.uint8, device=device).add_(1)
    assert idle_in_graphs(device) >= before + size
    del graph
    torch.cuda.empty_cache()
    assert idle_in_graphs(device) < before + size


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_bounds_of_groups_and_of_those_above_them(tmp_path: Path) -> None:
    job = tmp_path / "slurm" / "job_7"
    write(tmp_path / "slurm", {"memory.max": "5000", "memory.current": "900"})
    write(job / "step_0", {"memory.max": "max", "memory.current": "300"})
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("400\n")
    listed = tmp_path / "listed"
    listed.write_text("0::/slurm/job_7/step_0\n")
    assert list(_of_groups(tmp_path, listed)) == [(1000, 400), (5000, 900)]
    listed.write_text("0::/of/the/host\n")
    assert list(_of_groups(tmp_path, listed)) == [], "in a container, whose own folder is the root"
    write(tmp_path / "memory" / "job", {"memory.limit_in_bytes": "2000", "memory.usage_in_bytes": "10"})
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("50")
    listed.write_text("12:cpuset:/job\n4:cpu,memory:/job\n0::/\n")
    assert list(_of_groups(tmp_path, listed)) == [(2000, 10), (9223372036854771712, 50)]
    assert list(_of_groups(tmp_path, tmp_path / "nowhere")) == []


def test_pages_of_files_are_as_good_as_free(tmp_path: Path) -> None:
    """In a container, data that was read fills the rest."""
    listed, stat = tmp_path / "listed", "anon 100\nfile 850\nshmem 50\n"
    write(tmp_path / "job", {"memory.max": "1000", "memory.current": "950"})
    (tmp_path / "job" / "memory.stat").write_text(stat + "inactive_file 600\nactive_file 200\n")
    listed.write_text("0::/job\n")
    assert list(_of_groups(tmp_path, listed)) == [(1000, 150)]
    first = tmp_path / "memory" / "job"
    write(first, {"memory.limit_in_bytes": "2000", "memory.usage_in_bytes": "1900"})
    (first / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 900\ntotal_active_file 100\n")
    listed.write_text("4:memory:/job\n")
    assert list(_of_groups(tmp_path, listed)) == [(2000, 900)]
    (first / "memory.stat").write_text("not what it was\n")
    assert list(_of_groups(tmp_path, listed)) == [(2000, 1900)]


@pytest.mark.slow
def test_the_bound_of_a_process() -> None:
    code = (
        "import resource, torch; from sameday.hardware.memory import free_memory\n"
        "has = 4096 * int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (has + 2**28, has + 2**28))\n"
        "free, total = free_memory(torch.device('cpu'))\n"
        "print(0 < free <= 2**28 and total <= has + 2**28)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "True\n", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU's memory has no peak")
def test_what_was_needed_before_a_model_is_loaded_is_free_again(tmp_path: Path) -> None:
    """A stage's features and activations are no measure of what the next one needs."""
    specs = Specs(sets.tiny_recipe(), sets.write_set(tmp_path), Plan(device="cuda"))
    with closing(Session.start(specs, print, splits=TRAINING)) as session:
        large = torch.empty(2**30, dtype=torch.uint8, device=session.device)
        del large
        torch.cuda.empty_cache()
        before, _ = free_memory(session.device)
        session.load()
        after, _ = free_memory(session.device)
    assert after >= before + 2**29
