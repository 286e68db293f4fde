"""Vision-BDH on one GPU: training steps of several plans in one run, and the kernels' tiles.

python bench/bdh.py steps      # images/s, ms per step, share of the floor, peak memory
python bench/bdh.py tiles      # each kernel under several tile sizes
python bench/bdh.py check      # gradients of the fused kernels against the plain model's
python bench/bdh.py compiled   # gradients by torch.compile, of the whole model and of each level, against eager's
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.kernels import bdh
from sameday.models.compiled import Compiled
from sameday.models.vision_bdh import VisionBDH, forward_flops
from sameday.models.vit import ViT
from sameday.models.vit import forward_flops as vit_flops
from sameday.spec.plan import Plan
from sameday.spec.vision import BdhModel, VitModel

CLASSES, SIZE = 10, 32


class StreamedDropout(nn.Module):
    """torch's own, which knows no keys."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, _rows: None) -> Tensor:
        return F.dropout(x, self.p, self.training)


class UsualBDH(VisionBDH):
    """The plain model as people have it: it pays for no keys."""

    def __init__(self, shape: BdhModel) -> None:
        super().__init__(shape, SIZE, CLASSES, 0)
        self.dropout = StreamedDropout(shape.dropout)

    def row_keys(self, keys: Tensor) -> list[None]:
        return [None] * self.shape.levels


def make_step(model: nn.Module, batch: int) -> Callable[[], Tensor]:
    """Forward and backward of one batch of noise, in bf16 as the recipe means it."""
    pixels = torch.randn(batch, 3, SIZE, SIZE, device="cuda")
    labels = torch.randint(CLASSES, (batch,), device="cuda")
    keys = torch.arange(batch, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        # torch.compile's own CUDA graphs write a step's gradients where the last step's are: nothing may hold those.
        model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
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


def compiled() -> None:
    """The largest relative distance of a tensor's gradient from eager's, where batches change their size. bf16."""
    makers: dict[str, Callable[[VisionBDH], Any]] = {
        "the whole model": torch.compile,
        "level by level": lambda model: Compiled(model, Plan(compile="layers"), "bf16"),
    }
    for what, maker in makers.items():
        torch.compiler.reset()
        model = VisionBDH(BdhModel(dropout=0.0), SIZE, CLASSES, 0).cuda()
        made = maker(model)
        for batch in (64, 32, 64, 17):
            pixels = torch.randn(batch, 3, SIZE, SIZE, device="cuda")
            keys = torch.arange(batch, dtype=torch.int32, device="cuda")
            direction = torch.randn(batch, CLASSES, device="cuda")
            found = []
            for run in (model, made):
                with torch.autocast("cuda", torch.bfloat16):
                    logits = run(pixels, keys)
                found.append([logits.detach(), *torch.autograd.grad(logits, list(model.parameters()), direction)])
            off = [float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True)]
            print(f"{what}, batch {batch}: logits {off[0]:.1e} off, gradients at most {max(off[1:]):.1e}", flush=True)


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


def graphed(step: Callable[[], Tensor]) -> Callable[[], Any]:
    """The step as one CUDA graph, which writes its gradients anew each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> Callable[[], Tensor]:
        graph.replay()
        return step  # which holds the graph's input: without it that memory would be another's

    return replay


KINDS = {
    "eager": "plain, eager",
    "compiled": "plain, torch.compile",
    "autotuned": "plain, torch.compile max-autotune",
    "keyed": "plain, eager, keyed dropout",
    "fused": "fused",
    "graphed": "fused, CUDA graph",
    "vit": "ViT-Tiny, torch.compile",
}
COMPILED = {"compiled": None, "autotuned": "max-autotune", "vit": None}
BATCHES = (64, 256, 1024)
SLOW_TO_COMPILE = {"autotuned": (256,)}


def make_model(kind: str) -> Any:
    if kind == "vit":
        return ViT(VitModel(), SIZE, CLASSES, 0).cuda()
    usual = kind in ("eager", "compiled", "autotuned")
    model = (UsualBDH(BdhModel()) if usual else VisionBDH(BdhModel(), SIZE, CLASSES, 0)).cuda()
    model.kernel = "fused" if kind in ("fused", "graphed") else "plain"
    # Made here: tables that a compiled step made would lie in memory that its CUDA graphs use again.
    model.rotary(torch.device("cuda", torch.cuda.current_device()))
    return model


class Row(NamedTuple):
    times: list[float]
    """Milliseconds of each step."""
    peak: float
    """GiB that a step takes from the device besides the model and its input. As the allocator reserves them: what lies
    in a CUDA graph is in no other count."""
    first: float
    """Seconds of the first step."""
    images: float
    """Per second, by the median step."""


def measured(kind: str, batch: int) -> Row:
    torch.compiler.reset()
    gc.collect()
    model = make_model(kind)
    run = torch.compile(model, mode=COMPILED[kind]) if kind in COMPILED else model
    step: Callable[[], Any] = make_step(run, batch)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    if kind == "graphed":
        step = graphed(step)
    for _ in range(3):
        step()
    # What compiling and tuning took is not a step's.
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = milliseconds(step)
    peak = (torch.cuda.max_memory_reserved() - before) / 2**30
    return Row(times, peak, first, 1000 * batch / statistics.median(times))


def steps(batches: list[int] | None, kinds: list[str]) -> None:
    ceiling = matmul_ceiling()
    flops = {"vit": vit_flops(VitModel(), SIZE, CLASSES)}
    print(f"{torch.cuda.get_device_name()}: bf16 products at {ceiling / 1e12:.0f} TFLOP/s")
    rows: dict[tuple[str, int], Row] = {}
    for kind in kinds:
        for batch in batches or SLOW_TO_COMPILE.get(kind, BATCHES):
            floor = 3 * flops.get(kind, forward_flops(BdhModel(), SIZE, CLASSES)) / ceiling
            try:
                row = measured(kind, batch)
            except Exception as error:  # the others are still worth having
                print(f"{KINDS[kind]:34s} batch {batch:5d}  {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rows[kind, batch] = row
            print(
                f"{KINDS[kind]:34s} batch {batch:5d}  {row.images:8,.0f} images/s  "
                f"{statistics.median(row.times):7.2f} ms ({min(row.times):.2f}-{max(row.times):.2f})  "
                f"{100 * floor * row.images:4.1f}% of the floor  {row.peak:5.2f} GiB  first step {row.first:.0f} s",
                flush=True,
            )
    summary(rows)


def summary(rows: dict[tuple[str, int], Row]) -> None:
    """The figures that are asked for most, of the rows that are there."""

    def best(kinds: tuple[str, ...], batch: int | None = None) -> tuple[str, int] | None:
        places = [place for place in rows if place[0] in kinds and batch in (None, place[1])]
        return max(places, key=lambda place: rows[place].images, default=None)

    fused = ("fused", "graphed")
    here, tuned = best(fused, 256), ("autotuned", 256)
    if here and tuned in rows:
        faster, room = rows[here].images / rows[tuned].images, rows[here].peak / rows[tuned].peak
        print(f"{KINDS[here[0]]}, over max-autotune at batch 256: {faster:.2f} times the images/s")
        print(f"{KINDS[here[0]]}, over max-autotune at batch 256: {room:.2f} times the memory")
    if small := best(fused, 64):
        print(f"{KINDS[small[0]]}, at batch 64: {rows[small].images:,.0f} images/s")
    if top := best(fused):
        print(f"best fused: {KINDS[top[0]]}, at batch {top[1]}: {rows[top].images:,.0f} images/s")
    if top and (vit := best(("vit",))):
        faster = rows[top].images / rows[vit].images
        print(f"best fused over best ViT-Tiny (batch {vit[1]}): {faster:.2f} times the images/s")


def quiet() -> None:
    """torch's own words about compiling and tuning do not belong into a table."""
    from torch._inductor import select_algorithm

    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)
    select_algorithm.PRINT_AUTOTUNE = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "tiles", "check", "compiled"))
    parser.add_argument("--batch", type=int, nargs="+", help="one or more instead of the usual ones")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    quiet()
    if args.what == "steps":
        steps(args.batch, args.kinds)
    elif args.what == "tiles":
        tiles(args.batch[0] if args.batch else 256)
    else:
        {"check": check, "compiled": compiled}[args.what]()


if __name__ == "__main__":
    main()
