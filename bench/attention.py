"""Variable-length attention at the shapes of Qwen3-VL-8B's decoder and tower: torch's flash attention, which training
calls, cuDNN's, and for the tower a kernel of our own in several tiles (queries/keys/warps/stages). Then whole layers'
attention over shared prefixes: calls of flash attention that are merged (`plan.attention: split`), and kernels of our
own (`fused`), first by the tiles that training has here and then by others.

    python bench/attention.py                 one GPU, a minute
    python bench/attention.py --shared        the second part alone
    python bench/attention.py --size tiny     tries the script on a CPU, where plain PyTorch stands for flash attention

Of each row and kernel: microseconds of the forward and of the backward pass, median (least to most), with the share of
the GPU's peak for their matmuls; microseconds of the host for the forward pass; milliseconds of a first call with
lengths that were not there before; the largest relative distance of output, log-sum-exp and gradients from float32."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from runs import Tile, attend_in_runs
from torch import Tensor

from sameday.kernels import fused_attention, split
from sameday.kernels.fused_attention import Tiles
from sameday.kernels.split import Dense, Segments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES = 20


class Row(NamedTuple):
    """Lengths of the runs of queries, and of keys where those are others; heads of queries and of keys; width."""

    queries: Sequence[int]
    keys: Sequence[int] | None = None
    causal: bool = True
    heads: tuple[int, int] = (32, 8)
    width: int = 128
    trained: bool = True


MIXED = (1728, 1620, 5120, 1728, 2304, 1728, 1728, 5120, 3600, 1620, 1728, 1200, 5120, 1728, 8040, 1620)
ROWS = {
    "2 prefixes of 1,300, 16 branches": Row((1300, 1300, *[64] * 16)),
    "branches over their prefix": Row((512, 512), (1300, 1300), causal=False),
    "2 prefixes of 450, 16 branches": Row((450, 450, *[32] * 16)),
    "16 questions of 1,344": Row([1344] * 16),
    "16 questions, mixed sizes": Row([size // 4 + 64 for size in MIXED]),
    "tower, 2 of 1280×1024": Row((5120, 5120), causal=False, heads=(16, 16), width=72, trained=False),
    "tower, 16 of 768×576": Row([1728] * 16, causal=False, heads=(16, 16), width=72, trained=False),
    "tower, 16 of mixed sizes": Row(MIXED, causal=False, heads=(16, 16), width=72, trained=False),
}
SHARED = {
    "2 prefixes of 1,300, 16 branches of 64": ((1300, 8 * [64]),) * 2,
    "2 prefixes of 450, 16 branches of 32": ((450, 8 * [32]),) * 2,
    "3 prefixes of 322 to 1,300, 17 branches": ((450, [31, 28, 40]), (1300, 9 * [36]), (322, 5 * [44])),
    "16 questions of 1,344": ((1344, []),) * 16,
    "16 questions, mixed sizes": tuple((size // 4 + 64, []) for size in MIXED),
}
"""Prefixes with the branches of each."""
OTHER_TILES = [
    ((128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2)),
    ((128, 128, 8, 2), (64, 32, 4, 3), (64, 64, 4, 2)),
    ((64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2, True)),
    ((128, 64, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2, True)),
    ((64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 1)),
]
"""Of `plan.attention: fused`, besides those that the product takes here: of the forward pass, of the gradients of
queries and of those of keys; see fused_attention.Tile."""
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, cu_q, cu_k, most_q, most_k, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[0], q.shape[1]).T


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # there is no dropout
    return torch.ops.aten._cudnn_attention_backward(
        grad, q, k, v, out, lse.T.contiguous()[..., None], seed, seed, None,
        cu_q, cu_k, most_q, most_k, 0.0, causal, scale=scale,
    )  # fmt: skip


def batched_forward(
    q: Tensor, k: Tensor, v: Tensor, _cu_q: Tensor, _cu_k: Tensor, most_q: int, _most_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Of runs of one length, as torch chooses its kernel; without a log-sum-exp."""
    a, b, c = (x.unflatten(0, (-1, most_q)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1), q.new_zeros(0)


KERNELS: dict[str, tuple[Forward, Backward]] = {"flash": (split.variable_length, split._call_backward)}
if DEVICE.type == "cuda":
    KERNELS["cudnn"] = (cudnn_forward, cudnn_backward)
BATCHED = {"batched": (batched_forward, split._call_backward)}
TILES = [Tile(128, 64, 8, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2)]
"""For runs of one length that nothing is trained through."""


BOUNDS: dict[int, tuple[int, ...]] = {}
"""On the host, by where they are on the device."""


class Made:
    """Inputs of a row, and what its passes are called with."""

    def __init__(self, row: Row, half: torch.dtype) -> None:
        torch.manual_seed(0)
        keys = row.keys or row.queries
        self.row, self.lengths = row, list(zip(row.queries, keys, strict=True))
        (heads, shared), width = row.heads, row.width
        made = {"device": DEVICE, "dtype": half}
        self.q = torch.randn(sum(row.queries), heads, width, **made)  # type: ignore[call-overload]
        self.k, self.v = (torch.randn(sum(keys), shared, width, **made) for _ in range(2))  # type: ignore[call-overload]
        self.grad = torch.randn_like(self.q)
        bounds = [
            torch.tensor([0, *each], dtype=torch.int32).cumsum(0).int().to(DEVICE) for each in (row.queries, keys)
        ]
        BOUNDS[bounds[0].data_ptr()] = tuple(bounds[0].tolist())
        self.how = (*bounds, max(row.queries), max(keys), row.causal, width**-0.5)

    def forward(self, kernel: Forward) -> tuple[Tensor, Tensor]:
        return kernel(self.q, self.k, self.v, *self.how)

    def backward(self, kernel: Backward, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernel(self.grad, self.q, self.k, self.v, out, lse, *self.how)

    def flop(self) -> float:
        """Of the forward pass; the backward one has two and a half times as much."""
        pairs = sum(q * k * (0.5 if self.row.causal else 1.0) for q, k in self.lengths)
        return 4 * pairs * self.row.heads[0] * self.row.width

    def wide(self) -> list[Tensor]:
        """What float32 makes of it, run by run."""
        self.q, self.k, self.v, self.grad, *kept = (*(x.float() for x in self.tensors()), *self.tensors())
        out, lse = self.forward(split.variable_length)
        found = [out, lse, *(self.backward(split._call_backward, out, lse) if self.row.trained else ())]
        self.q, self.k, self.v, self.grad = kept
        return found

    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.grad]


def microseconds(do: Callable[[], object]) -> tuple[list[float], float]:
    """Of the device, each time; and of the host."""
    for _ in range(3):
        do()
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        do()
        return [1e6 * (time.perf_counter() - began)], 1e6 * (time.perf_counter() - began)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMES)]
    torch.cuda.synchronize()
    hosts = []
    for first, last in events:
        first.record()
        began = time.perf_counter()
        do()
        hosts.append(1e6 * (time.perf_counter() - began))
        last.record()
        torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(last) for first, last in events], statistics.median(hosts)


def first_call(row: Row, half: torch.dtype, kernel: Forward) -> float:
    """Milliseconds with lengths that no call had before."""
    longer = [length + 8 for length in row.queries]
    made = Made(row._replace(queries=longer, keys=row.keys and [length + 8 for length in row.keys]), half)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    made.forward(kernel)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def in_runs(tile: Tile) -> Forward:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, _cu_k: Tensor, _most_q: int, _most_k: int, _c: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return attend_in_runs(q, k, v, BOUNDS[cu_q.data_ptr()], scale, tile), q.new_zeros(0)

    return forward


def print_row(name: str, row: Row, half: torch.dtype, peak: float | None) -> None:
    made = Made(row, half)
    wanted = made.wide()
    arms = dict(KERNELS)
    if not row.trained:
        arms |= {f"{'/'.join(map(str, tile))}": (in_runs(tile), split._call_backward) for tile in TILES}
        arms |= BATCHED if len({*row.queries}) == 1 else {}
    for kernel, (forward, backward) in arms.items():
        try:
            out, lse = made.forward(forward)
            found = [out, lse, *(made.backward(backward, out, lse) if row.trained else ())]
        except Exception as error:
            print(f"{name:34} {kernel:12} cannot: {str(error).splitlines()[0][:120]}")
            continue
        off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True) if len(a))
        passes: list[tuple[float, Callable[[], object]]] = [(made.flop(), lambda: made.forward(forward))]  # noqa: B023
        if row.trained:
            passes.append((2.5 * made.flop(), lambda: made.backward(backward, out, lse)))  # noqa: B023
        words, hosts = [], []
        for flop, do in passes:
            took, host = microseconds(do)
            middle = statistics.median(took)
            share = "" if peak is None else f" {flop / middle / 1e-6 / peak:4.0%}"
            words.append(f"{middle:8.1f} ({min(took):.1f}-{max(took):.1f}){share}")
            hosts.append(host)
        first = first_call(row, half, forward)
        print(f"{name:34} {kernel:12} " + " | ".join(words) + f" | host {hosts[0]:.0f} | first {first:.1f} | {off:.1e}")


def segments_of(groups: Sequence[tuple[int, list[int]]]) -> Segments:
    """All prefixes, then all branches."""
    prefixes, branches = [prefix for prefix, _ in groups], [sum(own) for _, own in groups]
    cu, of_queries, of_keys = (
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
        for counts in ([*prefixes, *(n for _, own in groups for n in own)], branches, prefixes)
    )
    empty = Dense(0, 0, *[torch.zeros(1, dtype=torch.int32)] * 2)
    return Segments.of(cu, [Dense(sum(prefixes), 0, of_queries, of_keys), empty, empty])


def print_shared(name: str, groups: Sequence[tuple[int, list[int]]], half: torch.dtype, small: bool) -> None:
    """Of both passes: flash attention's calls with what merges them, then each tile of each kernel of ours."""
    pieces = segments_of(groups)
    tokens, there = int(pieces.cu[-1]), pieces.to(DEVICE)
    (heads, shared), width = ((4, 2), 16) if small else ((32, 8), 128)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(tokens, n, width, device=DEVICE, dtype=half) for n in (heads, shared, shared, heads))
    scale = width**-0.5
    doubled = [x.float() for x in (grad, q, k, v)]
    wanted = list(split._forward(*doubled[1:], *there, scale))
    wanted += split._backward(*doubled, *wanted, *there, scale)
    flop = 4 * width * heads * sum(n * n / 2 + n * sum(own) + sum(m * m for m in own) / 2 for n, own in groups)
    out, lse = split._forward(q, k, v, *there, scale)

    def show(
        kernel: str, forward: Callable[[], object], backward: Callable[[], object], found: Sequence[Tensor]
    ) -> None:
        off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        words = []
        for flops, do in ((flop, forward), (2.5 * flop, backward)):
            took, _ = microseconds(do)
            middle = statistics.median(took)
            words.append(f"{middle:8.1f} ({min(took):.1f}-{max(took):.1f}) {flops / middle / 1e6:5.0f} TFLOP/s")
        print(f"{name:40} {kernel:34} " + " | ".join(words) + f" | {off:.1e}", flush=True)

    backward = split._backward(grad, q, k, v, out, lse, *there, scale)
    show(
        "flash, merged",
        lambda: split._forward(q, k, v, *there, scale),
        lambda: split._backward(grad, q, k, v, out, lse, *there, scale),
        [out, lse, *backward],
    )
    # Few programs: it is their number that takes the interpreter long.
    own = fused_of([(256, 256, 4, 1)] * 3) if small else fused_attention.tiles_of(q)
    for tiles in [own] if small else [own, *map(fused_of, OTHER_TILES)]:
        label = " ".join("/".join(str(int(part)) for part in tile) for tile in tiles)
        try:
            mine, sums = fused_attention.forward(q, k, v, there, scale, tiles)
            found = [mine, sums, *fused_attention.backward(grad, q, k, v, mine, sums, there, scale, tiles)]
        except Exception as error:
            print(f"{name:40} {label:34} cannot: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        show(
            label,
            lambda: fused_attention.forward(q, k, v, there, scale, tiles),  # noqa: B023
            lambda: fused_attention.backward(grad, q, k, v, mine, sums, there, scale, tiles),  # noqa: B023
            found,
        )


def fused_of(numbers: Sequence[tuple[int, ...]]) -> Tiles:
    return Tiles(*(fused_attention.Tile(*each) for each in numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--shared", action="store_true", help="attention over shared prefixes alone")
    args = parser.parse_args()
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    peak = None
    if DEVICE.type == "cuda":
        from sameday.hardware.peaks import measure

        peak = measure(DEVICE, "bf16", None).flop_per_second
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for name, row in () if args.shared else ROWS.items():
        if args.size == "tiny":
            row = row._replace(
                queries=[max(8, length // 32) for length in row.queries],
                keys=row.keys and [max(8, length // 32) for length in row.keys],
            )
        print_row(name, row, half, peak)
    for name, groups in SHARED.items():
        small = args.size == "tiny"
        if small:
            groups = [(max(4, n // 60), [max(2, m // 16) for m in own]) for n, own in groups]
        print_shared(name, groups, half, small)


if __name__ == "__main__":
    main()
