"""What kernels are for, by names that an H200's profiler gave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sameday.kernels
from sameday.profile.kinds import OTHER, by_kind, by_name, kind_of, kind_words

NAMES = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matmuls",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x1_tn_align8>(...)": "matmuls",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)": "matmuls",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<..., cutlass::bfloat16_t>(...)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6x64x128x128_4x1x1_cga1x1x1": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "of_keys": "attention",
    "up_back": "LoRA",
    "triton_poi_fused_add_mul_shared_prefix_attention_3": "elementwise",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_7": "elementwise",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": "elementwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float>>": "optimizer",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy900<...>>(...)": "elementwise",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "a_kernel_that_nobody_knows": OTHER,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_a_kind(name: str) -> None:
    assert kind_of(name) == NAMES[name]


def test_kernels_of_ours_have_one() -> None:
    """A new one is told apart too."""
    folder = Path(next(iter(sameday.kernels.__path__)))
    kinds = {"lora_triton.py": "LoRA", "fused_attention_triton.py": "attention", "bdh_triton.py": "levels"}
    kinds |= {"host_rows_triton.py": "copies"}
    assert {path.name for path in folder.glob("*_triton.py")} == kinds.keys()
    for file, kind in kinds.items():
        names = re.findall(r"^@triton\.jit.*\ndef ([a-z]\w*)", (folder / file).read_text(), re.MULTILINE)
        assert names and {kind_of(name) for name in names} == {kind}, names


def test_times_are_added_up_and_said() -> None:
    found = by_kind([("of_keys", 0.002), ("nvjet_a", 0.05), ("Memset (Device)", 0.00001), ("forward", 0.001)])
    assert found == pytest.approx({"matmuls": 0.05, "attention": 0.003, "copies": 0.00001})
    assert kind_words(found) == "matmuls 50.0, attention 3.0"


def test_the_longest_are_known_by_name() -> None:
    kernels = [("of_keys", 0.002), ("nvjet_a", 0.001), ("forward", 0.001), ("nvjet_a", 0.004)]
    assert list(by_name(kernels, 2).items()) == [("nvjet_a", pytest.approx(0.005)), ("of_keys", 0.002)]
