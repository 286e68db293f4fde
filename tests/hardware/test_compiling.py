"""What is counted of torch.compile, with the compiler that runs use: kernels are really made, and found on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo

from sameday.hardware.compiling import Graphs, cache_folder, graphs, in_words
from sameday.spec.errors import CompileFailed


@pytest.mark.soak
def test_graphs_are_found_on_disk_by_who_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting what this process compiled stands for a process that begins anew."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = []
    for _ in range(2):
        torch._dynamo.reset()
        before = graphs()
        torch.compile(lambda x: (2 * x).cos())(torch.ones(8))
        done.append(graphs().since(before))
    assert done == [Graphs(made=1, found=0, kept=1), Graphs(made=1, found=1, kept=0)]
    assert cache_folder() == str(tmp_path)


def test_only_errors_of_the_compiler_are_put_into_words() -> None:
    other = ValueError("no such file")
    assert in_words(other) is other
    failed = in_words(torch._dynamo.exc.TorchDynamoException("no such\n  instruction"))
    assert isinstance(failed, CompileFailed) and failed.alone
    assert str(failed).startswith("torch.compile failed: TorchDynamoException: no such instruction; with plan.compile")
