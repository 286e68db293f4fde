"""RMS norms in one kernel are those of the library."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from sameday.models.norms import fuse_norms

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Qwen3VLTextRMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_is_six(kind: type[nn.Module], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"norm": kind(96, eps=1e-5)}).to(device, dtype)
    norm = layer["norm"]
    norm.weight.data.uniform_(0.5, 2)
    x = (3 * torch.randn(2, 5, 96)).to(device, dtype)
    plain = norm(x)
    fuse_norms(layer)
    fuse_norms(layer)
    assert isinstance(norm, kind) and type(norm) is not kind and list(layer.state_dict()) == ["norm.weight"]
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        fused = norm(x)
    assert fused.dtype == dtype
    rounding = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(fused, plain, rtol=rounding, atol=rounding)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), norm.weight.double(), 1e-5)
    assert (fused - exact).abs().max() <= (plain - exact).abs().max() * 1.5, "rounded once"
    assert torch.equal(norm(x), plain), "with a gradient it is the library's"
    with torch.no_grad():
        assert norm(x.double()).dtype == torch.promote_types(dtype, torch.float64), "as the library makes it"


def test_norms_of_another_form_are_left_alone() -> None:
    layer = nn.ModuleDict({"norm": Gemma3RMSNorm(8)})
    fuse_norms(layer)
    assert type(layer["norm"]) is Gemma3RMSNorm
