"""LoRA's small matmuls at Qwen3-VL-8B's shapes, forward and backward: plain, compiled, with padded ranks, and as Triton
kernels.

    python bench/lora.py                 q, k and v together, and o: microseconds, distance from float64; about a minute
    python bench/lora.py --tiles         other tiles for each kernel, timed
    python bench/lora.py --step          the whole compiled step by plan.lora_kernel, at two sizes of images; minutes
    python bench/lora.py --size tiny     tries the script on a CPU, in Triton's interpreter

`GPU` is the time of the kernels alone, recorded as a CUDA graph and replayed; `host` what launching them takes. `floor`
is the time of the bytes that must be moved, at the rate of a copy measured beforehand. `off` is the largest relative
distance of outputs and gradients from float64."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

CUDA = torch.cuda.is_available()
if not CUDA:  # read when the kernels are loaded
    os.environ["TRITON_INTERPRET"] = "1"

import vlm_step  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from sameday.kernels import lora, lora_launch  # noqa: E402
from sameday.kernels.dropout import DropoutKeys, KeyedDropout, keeps  # noqa: E402
from sameday.kernels.lora_launch import Launch  # noqa: E402
from sameday.models import vlm  # noqa: E402
from sameday.models.adapters import ALIGNMENT  # noqa: E402
from sameday.spec.plan import Plan  # noqa: E402
from sameday.spec.vqa import VqaRecipe  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
HALF = torch.bfloat16 if CUDA else torch.float32  # the interpreter has no bf16
GROUPS = {"q, k, v": (4096, 1024, 1024), "o": (4096,)}
SHAPES = [(rows, 4, drop) for rows in (1400, 1920, 3616, 21584) for drop in (0.0, 0.05)]
SHAPES += [(3616, rank, 0.05) for rank in (16, 64)]
TILES: dict[str, list[Launch]] = {
    "down": [
        *(Launch(32, 64, 2, stages, shares) for stages in (2, 3) for shares in (4, 8)),
        *(Launch(64, 64, 4, stages, shares) for stages in (2, 3) for shares in (4, 8, 16)),
        *(Launch(rows, columns, warps, 2, 8) for rows, columns, warps in ((32, 64, 4), (32, 32, 2), (64, 128, 4))),
    ],
    "up": [Launch(rows, columns, 4, 1) for rows in (32, 64, 128) for columns in (64, 128, 256)],
    "up_back": [
        *(Launch(64, 128, 4, stages, shares) for stages in (2, 3) for shares in (4, 8, 16)),
        *(Launch(rows, columns, warps, 3, 8) for rows, columns, warps in ((32, 128, 4), (64, 256, 8), (128, 64, 4))),
    ],
    "down_back": [
        *(Launch(64, 32, 4, stages, shares) for stages in (2, 3, 4) for shares in (2, 4, 8)),
        *(Launch(64, 64, warps, 3, 4) for warps in (4, 8)),
        *(Launch(128, 32, warps, 3, shares) for warps in (4, 8) for shares in (2, 4)),
        *(Launch(rows, columns, warps, 2, 8) for rows, columns, warps in ((16, 64, 4), (32, 64, 4), (32, 128, 8))),
    ],
}
STEP: dict[str, Any] = {
    **vlm_step.SHARED,
    **(vlm_step.COMPILED if CUDA else {}),
    **{"attention": "split", "pad_to_multiple": 32},
}
STEPS = (("plain, padded", "plain", True), ("plain, not padded", "plain", False), ("triton", "triton", True))
"""Of the whole step: name, plan.lora_kernel, whether ranks are padded."""
SCALE = 2.0
PIXELS = {"1280×1024": (64, 80), "768×576": (36, 48)}


def plain(
    x: Tensor,
    outputs: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    rows: Tensor,
    columns: Sequence[Tensor],
    p: float,
    threshold: int,
) -> list[Tensor]:
    """As PEFT's layers and keyed dropout do it, as one function that is compiled once for any number of rows."""
    results, linear = [], nn.functional.linear
    for y, down, up, keys in zip(outputs, a, b, columns, strict=True):
        seen = x * keeps(rows[..., None], keys, threshold) * (1 / (1 - p)) if p else x
        results.append(y + linear(linear(seen, down), up) * SCALE)
    return results


def padded(x: Tensor, outputs: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], *more: Any) -> list[Tensor]:
    """The same with aligned ranks, as compiled layers are trained."""
    pad, rank = nn.functional.pad, -len(a[0]) % ALIGNMENT
    return plain(x, outputs, [pad(each, (0, 0, 0, rank)) for each in a], [pad(each, (0, rank)) for each in b], *more)


class Layers:
    """Layers with one input: what they gave for it, their adapters, and the gradients that come back."""

    def __init__(self, rows: int, width: int, outputs: Sequence[int], rank: int, dropout: float) -> None:
        torch.manual_seed(0)
        made = {"device": DEVICE, "dtype": HALF}
        self.x = torch.randn(1, rows, width, **made, requires_grad=True)
        self.y = [torch.randn(1, rows, n, **made) for n in outputs]
        self.weights = [torch.randn(n, width, **made) / width**0.5 for n in outputs]
        self.dy = [torch.randn(1, rows, n, **made) for n in outputs]
        self.a = [nn.Parameter(torch.randn(rank, width, device=DEVICE) / width**0.5) for _ in outputs]
        self.b = [nn.Parameter(torch.randn(n, rank, device=DEVICE) / rank**0.5) for n in outputs]
        self.keys = DropoutKeys()
        self.keys.set(torch.arange(rows, dtype=torch.int32, device=DEVICE)[None], 0, 0)
        self.drops = [KeyedDropout(dropout, str(i), width, self.keys).to(DEVICE) for i in range(len(outputs))]
        self.p = dropout
        self.moved = rows * HALF.itemsize * (3 * width + 3 * sum(outputs))
        """Bytes: x twice and its gradient, the outputs twice and their gradients."""

    def plain(
        self, x: Tensor, outputs: Sequence[Tensor], how: Callable[..., list[Tensor]] | None = None
    ) -> list[Tensor]:
        columns = [drop.columns for drop in self.drops]
        assert self.keys.tokens is not None
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA and x.dtype == HALF):
            return (how or plain)(
                x, outputs, self.a, self.b, self.keys.tokens, columns, self.p, self.drops[0].threshold
            )

    def fused(
        self, x: Tensor, outputs: Sequence[Tensor], how: Callable[..., list[Tensor]] | None = None
    ) -> list[Tensor]:
        each = zip(self.a, self.b, self.drops, strict=True)
        adapters = [lora.Adapter(a, b, SCALE, drop.columns) for a, b, drop in each]
        assert self.keys.tokens is not None
        drop = lora.Dropped(self.p, self.drops[0].threshold, self.keys.tokens) if self.p else None
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            return (how or lora.add_lora)(x, outputs, adapters, drop)

    def run(self, how: Callable[..., list[Tensor]], base: bool = False) -> list[Tensor]:
        """Forward and backward; with `base` the layers' own matmuls too."""
        outputs = [nn.functional.linear(self.x, weight) for weight in self.weights] if base else self.y
        results = how(self.x, outputs)
        return [*results, *torch.autograd.grad(results, [self.x, *self.a, *self.b], self.dy)]

    def exact(self) -> list[Tensor]:
        """The plain computation in float64, adapters rounded as bf16 rounds them."""
        double = Layers.__new__(Layers)
        double.__dict__ = dict(self.__dict__)
        double.x = self.x.detach().double().requires_grad_()
        double.y, double.dy = ([each.double() for each in tensors] for tensors in (self.y, self.dy))
        for name in ("a", "b"):
            rounded = [p.detach().to(HALF).double() for p in getattr(self, name)]
            setattr(double, name, [nn.Parameter(p) for p in rounded])
        return double.run(double.plain)


def timed(run: Callable[[], Any], count: int = 20) -> tuple[list[float], float]:
    """Microseconds of the GPU, one by one, and of the host."""
    if not CUDA:
        began = time.perf_counter()
        run()
        return [1e6 * (time.perf_counter() - began)], float("nan")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        host = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            host.append(1e6 * (time.perf_counter() - began))
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)], statistics.median(host)


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.empty((2**30 if CUDA else 2**22) // 2, dtype=torch.bfloat16, device=DEVICE)
    microseconds, _ = timed(source.clone)
    return 2 * source.nbytes / min(microseconds) * 1e6


@cache
def compiled(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, options={"shape_padding": False})


def ways(layers: Layers) -> Iterator[tuple[str, Callable[..., list[Tensor]]]]:
    yield "plain", layers.plain
    yield "triton", layers.fused
    if CUDA:
        # Rows are any number from the first graph on, as in a model's compiled layers.
        for tensor in (layers.x, layers.keys.tokens, *layers.y):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        yield "plain, compiled", partial(layers.plain, how=compiled(plain))
        yield "padded, compiled", partial(layers.plain, how=compiled(padded))
        yield "triton, compiled", partial(layers.fused, how=compiled(lora.add_lora))


HEADS = f"{'tokens':>6s} {'rank':>4s} {'drop':>4s}  {'layers':8s} {'how':18s} {'GPU µs':>8s} {'(least-most)':>17s}"
HEADS += f" {'host µs':>8s} {'with base':>10s} {'floor':>7s} {'off':>9s}"


def rows_of(shape: tuple[int, int, float], width: int, outputs: dict[str, tuple[int, ...]], rate: float) -> None:
    rows, rank, drop = shape
    for name, columns in outputs.items() if rank == 4 else [*outputs.items()][:1]:
        layers = Layers(rows, width, columns, rank, drop)
        wanted = [each.detach() for each in layers.exact()]
        for way, how in ways(layers):
            try:
                # Without autograd's nodes, which would draw the stream that they were made on into a recording.
                found = [each.detach() for each in layers.run(how)]
                off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
                gpu, host = timed(partial(layers.run, how))
                based, _ = timed(partial(layers.run, how, base=True))
            except Exception as error:
                if os.environ.get("SAMEDAY_BENCH_STRICT"):
                    raise
                print(f"{rows:6d} {rank:4d} {drop:4.2f}  {name:8s} {way}: {type(error).__name__}: {error}", flush=True)
                continue
            spread = f"({min(gpu):.0f}-{max(gpu):.0f})"
            print(
                f"{rows:6d} {rank:4d} {drop:4.2f}  {name:8s} {way:18s} {statistics.median(gpu):8.1f} {spread:>17s}"
                f" {host:8.0f} {statistics.median(based):10.1f} {1e6 * layers.moved / rate:7.1f} {off:9.2e}",
                flush=True,
            )


def try_tiles(rows: Sequence[int], width: int, columns: tuple[int, ...], candidates: dict[str, list[Launch]]) -> None:
    """Each kernel's tiles by themselves, the others as they are, at rank 4 with dropout."""
    before = lora_launch.NARROW
    layers = {number: Layers(number, width, columns, 4, 0.05) for number in rows}
    print(f"{'kernel':10s} {'tile':>44s}  µs of all, forward and backward, for {', '.join(map(str, rows))} tokens")
    for kernel, tiles in candidates.items():
        for tile in dict.fromkeys([getattr(before, kernel), *tiles]):
            lora_launch.NARROW = before._replace(**{kernel: tile})
            try:
                found = [statistics.median(timed(partial(each.run, each.fused))[0]) for each in layers.values()]
            except Exception as error:
                print(f"{kernel:10s} {tuple(tile)!s:>44s}  {type(error).__name__}: {error}", flush=True)
                continue
            mark = " as it is" if tile == getattr(before, kernel) else ""
            print(f"{kernel:10s} {tuple(tile)!s:>44s}  {'  '.join(f'{each:8.1f}' for each in found)}{mark}", flush=True)
    lora_launch.NARROW = before


def whole_steps(size: str, steps: int, dropout: float, sizes: Sequence[str]) -> None:
    """By each kernel."""
    os.environ.pop("TRITON_INTERPRET", None)  # a CPU computes the operators plainly: a step would take it minutes
    recipe = VqaRecipe.model_validate(
        {"model": "made", "data": {"train": "made"}, "order": "listed", "lora": {"dropout": dropout}}
        | ({} if CUDA else {"precision": "float32"})
    )
    for pixels in sizes:
        data, first = vlm_step.MadeData("by_image", size, 512, PIXELS[pixels]), None
        print(f"\n{pixels}, dropout {dropout}\n{vlm_step.HEADS}", flush=True)
        for name, kernel, pads in STEPS:
            try:
                with nullcontext() if pads else patch.object(vlm, "pad_ranks"):
                    row = vlm_step.measure(name, Plan(**STEP, lora_kernel=kernel), recipe, data, size, DEVICE, steps)
            except Exception as error:
                if os.environ.get("SAMEDAY_BENCH_STRICT"):
                    raise
                print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
                continue
            finally:
                forget()
            first = first or row
            print(f"{vlm_step.line(row, first)}  first step {row['warm-up']:.0f} s", flush=True)


def forget() -> None:
    import gc

    gc.collect()
    torch.compiler.reset()
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b" if CUDA else "tiny")
    parser.add_argument("--tiles", action="store_true", help="time other tiles for each kernel")
    parser.add_argument("--step", action="store_true", help="time the whole step")
    parser.add_argument("--only", nargs="+", choices=tuple(PIXELS), default=tuple(PIXELS), help="of the whole step")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, after two that are not")
    parser.add_argument("--dropout", type=float, default=0.05, help="of the whole step")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}", flush=True)
    tiny = args.size == "tiny"
    if args.step:
        return whole_steps(args.size, args.steps, args.dropout, args.only)
    if args.tiles and tiny:
        return try_tiles([40], 48, (24, 16, 16), {"down": [Launch(16, 16, 4, 1, 2)]})
    if args.tiles:
        return try_tiles([1400, 3616, 21584], 4096, GROUPS["q, k, v"], TILES)
    rate = copy_rate()
    print(f"a copy moves {rate / 1e12:.2f} TB/s\n{HEADS}", flush=True)
    for shape in [(40, 4, 0.05)] if tiny else SHAPES:
        rows_of(shape, 48 if tiny else 4096, {"q, k, v": (24, 16, 16)} if tiny else GROUPS, rate)


if __name__ == "__main__":
    main()
