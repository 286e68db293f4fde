"""Vision-BDH on one GPU: training steps of several plans in one run, and the kernels' tiles.

python bench/bdh.py steps      # images/s, ms per step, share of the floor, peak memory
python bench/bdh.py tiles      # each kernel under several tile sizes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sameday.kernels import bdh
from sameday.models.vision_bdh import VisionBDH, forward_flops
from sameday.models.vit import ViT
from sameday.models.vit import forward_flops as vit_flops
from sameday.spec.classify import BdhModel, VitModel

CLASSES, SIZE = 10, 32


def make_step(model: torch.nn.Module, batch: int) -> Callable[[], Tensor]:
    """Forward and backward of one batch of noise, in bf16 as the recipe means it."""
    pixels = torch.randn(batch, 3, SIZE, SIZE, device="cuda")
    labels = torch.randint(CLASSES, (batch,), device="cuda")
    keys = torch.arange(batch, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(pixels, keys)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        return loss

    return step


def milliseconds(step: Callable[[], Any], repeats: int = 20, warm: int = 3) -> list[float]:
    for _ in range(warm):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def by_kernel(step: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Device time of each kernel in milliseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    return {e.key: e.device_time_total / 1000 / repeats for e in found.key_averages() if e.device_time_total > 0}


def matmul_ceiling() -> float:
    """FLOP/s of a large bf16 product on this device."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (statistics.median(milliseconds(lambda: a @ b)) / 1000)


def check() -> None:
    """Fused against plain on this device: float32, and bf16 by its distance from float32."""
    shape = BdhModel()
    model = VisionBDH(shape, SIZE, CLASSES, 0).cuda()
    pixels = torch.randn(8, 3, SIZE, SIZE, device="cuda")
    keys = torch.arange(8, dtype=torch.int32, device="cuda")

    def gradients(kernel: str, low: bool) -> dict[str, Tensor]:
        model.kernel = kernel
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            logits = model(pixels, keys)
        (logits * torch.linspace(-1, 1, CLASSES, device="cuda")).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def distance(a: dict[str, Tensor], b: dict[str, Tensor], name: str) -> float:
        return float((a[name] - b[name]).norm() / b[name].norm())

    torch.set_float32_matmul_precision("highest")
    plain, fused = gradients("plain", False), gradients("fused", False)
    low_plain, low_fused = gradients("plain", True), gradients("fused", True)
    print("relative distance of gradients: fused from plain in float32; plain and fused in bf16 from plain in float32")
    for name in plain:
        figures = (fused, plain), (low_plain, plain), (low_fused, plain)
        print(f"  {name:16s} " + "  ".join(f"{distance(a, b, name):8.1e}" for a, b in figures))


VARIANTS: dict[str, list[bdh.Launch]] = {
    "attend": [bdh.Launch(0, 32, 4, 3, 168), bdh.Launch(0, 32, 4, 3, 128), bdh.Launch(0, 64, 4, 2, 168)],
    "gate": [bdh.Launch(128, 16, 8, 3)],
    "ungate": [bdh.Launch(64, 64, 4, 3, 128), bdh.Launch(128, 64, 8, 3, 128)],
    "unattend": [
        bdh.Launch(1, 32, 4, 4, 168),
        bdh.Launch(1, 32, 4, 3, 128),
        bdh.Launch(2, 32, 4, 3, 128),
        bdh.Launch(1, 64, 8, 3, 128),
        bdh.Launch(4, 32, 4, 2, 128),
    ],
}


def tiles(batch: int) -> None:
    model = VisionBDH(BdhModel(), SIZE, CLASSES, 0).cuda()
    model.kernel = "fused"
    step = make_step(model, batch)
    began = time.perf_counter()
    first = by_kernel(step)
    print(f"batch {batch}: {statistics.median(milliseconds(step)):.2f} ms a step, compiled and profiled in "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    for name, value in sorted(first.items(), key=lambda item: -item[1])[:24]:
        print(f"  {value:7.3f} ms  {name[:100]}")
    kept = bdh.TILES
    for field, values in VARIANTS.items():
        names = ("join", "unjoin") if field == "join" else (field,)
        for value in (getattr(kept, field), *values):
            bdh.TILES = kept._replace(**{field: value})
            try:
                found = by_kernel(step)
                print(f"{field:9s} {tuple(value)!s:26s} {sum(found.get(n, 0) for n in names):7.3f} ms", flush=True)
            except Exception as error:  # too much shared memory, say: the others are still worth having
                print(f"{field:9s} {tuple(value)!s:26s} {str(error)[:80]}", flush=True)
    bdh.TILES = kept


def graphed(step: Callable[[], Tensor], model: torch.nn.Module) -> Callable[[], Any]:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


KINDS = {
    "plain": "plain, eager",
    "compiled": "plain, torch.compile",
    "autotuned": "plain, torch.compile max-autotune",
    "fused": "fused",
    "graphed": "fused, CUDA graph",
    "vit": "ViT-Tiny, torch.compile",
}


def measured(kind: str, batch: int) -> tuple[list[float], float, float]:
    """Milliseconds of each step, peak GiB, and the seconds that the first step took."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    model: Any = ViT(VitModel(), SIZE, CLASSES, 0) if kind == "vit" else VisionBDH(BdhModel(), SIZE, CLASSES, 0)
    model = model.cuda()
    model.cached_rotary = True
    run: Any = model
    if kind in ("fused", "graphed"):
        model.kernel = "fused"
    elif kind != "plain":
        run = torch.compile(model, mode="max-autotune" if kind == "autotuned" else None)
    step: Callable[[], Any] = make_step(run, batch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    if kind == "graphed":
        step = graphed(step, model)
    times = milliseconds(step)
    # max-autotune's own graphs live outside the allocator's count of tensors: what is reserved is what is taken.
    peak = torch.cuda.max_memory_allocated() if kind != "autotuned" else torch.cuda.max_memory_reserved()
    return times, (peak - before) / 2**30, first


def steps(batches: list[int], kinds: list[str]) -> None:
    ceiling = matmul_ceiling()
    flops = {"vit": vit_flops(VitModel(), SIZE, CLASSES)}
    print(f"{torch.cuda.get_device_name()}: bf16 products at {ceiling / 1e12:.0f} TFLOP/s")
    for kind in kinds:
        for batch in batches:
            floor = 3 * flops.get(kind, forward_flops(BdhModel(), SIZE, CLASSES)) / ceiling
            try:
                times, peak, first = measured(kind, batch)
            except Exception as error:  # the others are still worth having
                print(f"{KINDS[kind]:34s} batch {batch:5d}  {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            middle = statistics.median(times)
            print(
                f"{KINDS[kind]:34s} batch {batch:5d}  {1000 * batch / middle:8,.0f} images/s  {middle:7.2f} ms "
                f"({min(times):.2f}-{max(times):.2f})  {100 * 1000 * floor * batch / middle:4.1f}% of the floor  "
                f"{peak:5.2f} GiB  first step {first:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "tiles", "check"))
    parser.add_argument("--batch", type=int, nargs="+", default=[256])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    {"steps": lambda: steps(args.batch, args.kinds), "tiles": lambda: tiles(args.batch[0]), "check": check}[args.what]()


if __name__ == "__main__":
    main()
