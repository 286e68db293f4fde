"""Variable-length attention at the shapes of Qwen3-VL-8B's decoder and tower: torch's flash attention, cuDNN's, and for
towers with images of one size a batch without variable lengths. Then whole layers' attention over shared prefixes:
calls of flash attention that are merged (`plan.attention: split`), kernels of our own (`fused`), first by the tiles
that training has here and then by others, and where nothing is shared cuDNN's for a batch of one length, into which
questions are copied and out of which they are copied again where their lengths differ.

    python bench/attention.py                 one GPU, a minute
    python bench/attention.py --shared        the second part alone
    python bench/attention.py --only tower    rows of that name
    python bench/attention.py --size tiny     tries the script on a CPU, where plain PyTorch stands for flash attention

Of each row and kernel: microseconds of the forward and of the backward pass, median (least to most), with the share of
the GPU's peak for their matmuls; microseconds of the host for the forward pass; milliseconds of a first call with
lengths that were not there before; the largest relative distance of output, log-sum-exp and gradients from float32. The
second part is timed in CUDA graphs, without the host, and then with one tile after the other changed."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.kernels import fused_attention, split
from sameday.kernels.fused_attention import Tiles
from sameday.kernels.split import Dense, Segments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES, CALLS = 20, 10
"""Of a row, each timed by itself; and at once, where a CUDA graph is timed."""


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
SHARED: dict[str, Sequence[tuple[int, list[Any]]]] = {
    "2 prefixes of 1,300, 16 branches of 64": ((1300, 8 * [64]),) * 2,
    "2 prefixes of 1,300, 10 forks, 16 branches": ((1300, 2 * [(38, [40, 44]), (40, [42])] + [(36, [38, 45])]),) * 2,
    "2 prefixes of 450, 16 branches of 32": ((450, 8 * [32]),) * 2,
    "3 prefixes of 322 to 1,300, 17 branches": ((450, [31, 28, 40]), (1300, 9 * [36]), (322, 5 * [44])),
    "16 questions of 1,344": ((1344, []),) * 16,
    "16 questions of 1,310 to 1,340": tuple((1310 + 2 * number, []) for number in range(16)),
    "16 questions, mixed sizes": tuple((size // 4 + 64, []) for size in MIXED),
}
"""Prefixes with the branches of each, or with its forks and the branches of those."""
OTHER_TILES: dict[str, list[Any]] = {
    "forward": [(64, 64, 4, 2), (128, 64, 8, 3)],
    "of_queries": [(128, 64, 8, 3)],
    "of_keys": [(64, 128, 8, 3), (64, 64, 4, 2)],
}
"""Of `plan.attention: fused`, each instead of the one that the product takes here; see fused_attention.Tile."""
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


def print_row(name: str, row: Row, half: torch.dtype, peak: float | None) -> None:
    made = Made(row, half)
    wanted = made.wide()
    arms = dict(KERNELS)
    if not row.trained and len({*row.queries}) == 1:
        arms |= BATCHED
    for kernel, (forward, backward) in arms.items():
        try:
            out, lse = made.forward(forward)
            found = [out, lse, *(made.backward(backward, out, lse) if row.trained else ())]
            off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True) if len(a))
        except Exception as error:
            print(f"{name:34} {kernel:12} cannot: {str(error).splitlines()[0][:120]}")
            continue
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


def segments_of(groups: Sequence[tuple[int, list[Any]]]) -> Segments:
    """All prefixes, then all forks, then all branches. Either all groups have forks or none has."""
    prefixes = [prefix for prefix, _ in groups]
    forks = [[each for each in own if isinstance(each, tuple)] for _, own in groups]
    branches = [branches_of(own) for _, own in groups]
    of_forks = [length for own in forks for length, _ in own]

    def dense(queries: int, keys: int, asking: Sequence[int], seen: Sequence[int]) -> Dense:
        return Dense(queries, keys, _bounds(asking), _bounds(seen))

    at_forks, at_branches = sum(prefixes), sum(prefixes) + sum(of_forks)
    none = dense(0, 0, (), ())
    calls = [dense(at_branches, 0, [sum(own) for own in branches], prefixes), none, none]
    if of_forks:
        calls[1] = dense(at_forks, 0, [sum(length for length, _ in own) for own in forks], prefixes)
        calls[2] = dense(at_branches, at_forks, [sum(under) for own in forks for _, under in own], of_forks)
    return Segments.of(_bounds([*prefixes, *of_forks, *(each for own in branches for each in own)]), calls)


def _bounds(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()


def branches_of(own: Sequence[Any]) -> list[int]:
    return [length for each in own for length in (each[1] if isinstance(each, tuple) else [each])]


def pairs_of(prefix: int, own: Sequence[Any]) -> float:
    """Of queries with keys that they see, half of a square where that is causal."""
    pairs = prefix * prefix / 2 + prefix * sum(branches_of(own)) + sum(each * each for each in branches_of(own)) / 2
    for fork, under in (each for each in own if isinstance(each, tuple)):
        pairs += fork * prefix + fork * fork / 2 + fork * sum(under)
    return pairs


def recorded_microseconds(do: Callable[[], object]) -> list[float]:
    """Of one call among several in a CUDA graph: the host has no part in it."""
    if DEVICE.type == "cpu":
        return microseconds(do)[0]
    do()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            do()
    return [each / CALLS for each in microseconds(graph.replay)[0]]


class Shared:
    """Inputs of a row over shared prefixes, and what float32 makes of them."""

    def __init__(self, groups: Sequence[tuple[int, list[Any]]], half: torch.dtype, small: bool) -> None:
        pieces = segments_of(groups)
        tokens, self.pieces = int(pieces.cu[-1]), pieces.to(DEVICE)
        (heads, shared), width = ((4, 2), 16) if small else ((32, 8), 128)
        torch.manual_seed(0)
        self.q, self.k, self.v, self.grad = (
            torch.randn(tokens, n, width, device=DEVICE, dtype=half) for n in (heads, shared, shared, heads)
        )
        self.scale = width**-0.5
        self.flop = 4 * width * heads * sum(pairs_of(prefix, own) for prefix, own in groups)
        wide = [x.float() for x in (self.grad, self.q, self.k, self.v)]
        wanted = list(split._forward(*wide[1:], *self.pieces, self.scale))
        self.wanted = [*wanted, *split._backward(*wide, *wanted, *self.pieces, self.scale)]

    def forward(self, how: Tiles | None) -> tuple[Tensor, Tensor]:
        """By calls of flash attention where there are no tiles."""
        if how is None:
            return split._forward(self.q, self.k, self.v, *self.pieces, self.scale)
        return fused_attention.forward(self.q, self.k, self.v, self.pieces, self.scale, how)

    def backward(self, how: Tiles | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = (self.grad, self.q, self.k, self.v, out, lse)
        if how is None:
            return split._backward(*given, *self.pieces, self.scale)
        return fused_attention.backward(*given, self.pieces, self.scale, how)

    def timed(self, how: Tiles | None, passes: Sequence[str]) -> str:
        out, lse = self.forward(how)
        found = [out, lse, *self.backward(how, out, lse)]
        off = self.off(found)
        does: dict[str, Callable[[], object]] = {
            "forward": lambda: self.forward(how),
            "backward": lambda: self.backward(how, out, lse),
        }
        return f"{self.words(does, passes)} | {off:.1e}"

    def off(self, found: Sequence[Tensor]) -> float:
        return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, self.wanted, strict=True))

    def words(self, does: Mapping[str, Callable[[], object]], passes: Sequence[str]) -> str:
        words = []
        for name in passes:
            took, flop = recorded_microseconds(does[name]), self.flop * (1 if name == "forward" else 2.5)
            middle = statistics.median(took)
            words.append(f"{name} {middle:7.1f} ({min(took):.1f}-{max(took):.1f}) {flop / middle / 1e6:4.0f} TFLOP/s")
        return " | ".join(words)

    def batched(self) -> str:
        """Where nothing is shared: by cuDNN, or by plain PyTorch on a CPU."""
        rows, tensors = Rows(self.pieces.cu), (self.q, self.k, self.v)
        out, lse = batch_forward(*rows.of(*tensors), self.scale)

        def forward() -> list[Tensor]:
            found = batch_forward(*rows.of(*tensors), self.scale)
            return [rows.back(found[0]), rows.back(found[1])[..., 0].T]

        def backward() -> list[Tensor]:
            given = *rows.of(self.grad, zeros=True), *rows.of(*tensors)
            return [rows.back(x) for x in batch_backward(*given, out, lse, self.scale)]

        off = self.off([*forward(), *backward()])
        return f"{self.words({'forward': forward, 'backward': backward}, ('forward', 'backward'))} | {off:.1e}"


def batch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal, (rows, heads, length, width) and the log-sum-exp, (rows, heads, length, 1)."""
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        return out, lse.view(*q.shape[:3], 1)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out, lse = split.variable_length(*flat, *batch_bounds(q), True, scale)
    return packed_rows(out, q), packed_rows(lse.T[..., None], q)


def batch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Sequence[Tensor]:
    if q.is_cuda:
        seed, length = torch.zeros((), dtype=torch.int64, device=q.device), q.shape[2]  # there is no dropout
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, length, length, 0.0, True, scale=scale
        )
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (grad, q, k, v, out, lse)]
    found = split._call_backward(*flat[:5], flat[5][..., 0].T, *batch_bounds(q), True, scale)
    return [packed_rows(x, q) for x in found]


def batch_bounds(q: Tensor) -> tuple[Tensor, Tensor, int, int]:
    bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q.shape[2]
    return bounds, bounds, q.shape[2], q.shape[2]


def packed_rows(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, (len(like), like.shape[2])).transpose(1, 2)


class Rows:
    """Pieces of a packed row as rows of one length, (pieces, heads, length, width), and back. What stands behind a
    piece is seen by nothing of it, since attention is causal, and has no gradient."""

    def __init__(self, cu: Tensor) -> None:
        lengths = cu.diff()
        self.count, self.longest = len(lengths), int(lengths.max())
        place = torch.arange(self.longest, device=cu.device)
        self.there = place < lengths[:, None]
        self.taken = torch.minimum(cu[:-1, None] + place, cu[1:, None] - 1).flatten()
        self.kept = self.there.flatten().nonzero()[:, 0]
        self.alike = bool(self.there.all())

    def of(self, *tensors: Tensor, zeros: bool = False) -> list[Tensor]:
        """`zeros`: behind the pieces. Else what their last tokens have."""
        rows = []
        for x in tensors:
            taken = x if self.alike else x[self.taken]
            taken = taken.unflatten(0, (self.count, self.longest)).transpose(1, 2)
            rows.append(taken * self.there[:, None, :, None] if zeros and not self.alike else taken)
        return rows

    def back(self, rows: Tensor) -> Tensor:
        """(tokens, heads, width)."""
        whole = rows.transpose(1, 2).flatten(0, 1)
        return whole if self.alike else whole[self.kept]


def print_shared(name: str, groups: Sequence[tuple[int, list[Any]]], half: torch.dtype, small: bool) -> None:
    """Of both passes: flash attention's calls with what merges them, then our kernels, then each of their tiles."""
    made = Shared(groups, half, small)
    # Few programs: it is their number that takes the interpreter long.
    own = Tiles(*[fused_attention.Tile(256, 256, 4, 1)] * 3) if small else fused_attention.tiles_of(made.q)
    arms: list[tuple[str, Tiles | None, Sequence[str]]] = [
        ("flash, merged", None, ("forward", "backward")),
        (f"fused {' '.join(map(tile_words, own))}", own, ("forward", "backward")),
    ]
    for kernel, tiles in {} if small else OTHER_TILES.items():
        for tile in itertools.starmap(fused_attention.Tile, tiles):
            changed = own._replace(**{kernel: tile})
            arms.append((f"{kernel} {tile_words(tile)}", changed, ("forward" if kernel == "forward" else "backward",)))
    for label, how, passes in arms:
        try:
            words = made.timed(how, passes)
        except Exception as error:
            words = f"cannot: {str(error).splitlines()[0][:100]}"
        print(f"{name:43} {label:38} {words}", flush=True)
    if not any(own for _, own in groups):
        try:
            words = made.batched()
        except Exception as error:
            words = f"cannot: {str(error).splitlines()[0][:100]}"
        print(f"{name:43} {'cuDNN, in rows of one length':38} {words}", flush=True)


def shrunk(own: Sequence[Any]) -> list[Any]:
    return [(4, shrunk(each[1])) if isinstance(each, tuple) else max(2, each // 16) for each in own]


def tile_words(tile: Sequence[int]) -> str:
    return "/".join(str(int(part)) for part in tile)


def named(rows: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: row for name, row in rows.items() if part in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--shared", action="store_true", help="attention over shared prefixes alone")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    args = parser.parse_args()
    rows, shared = {} if args.shared else named(ROWS, args.only), named(SHARED, args.only)
    if not rows and not shared:
        there = "; ".join(SHARED if args.shared else ROWS | SHARED)
        parser.error(f"--only {args.only!r} is in the name of no row; there are: {there}")
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    peak = None
    if DEVICE.type == "cuda":
        from sameday.hardware.peaks import measure

        peak = measure(DEVICE, "bf16", None).flop_per_second
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for name, row in rows.items():
        if args.size == "tiny":
            row = row._replace(
                queries=[max(8, length // 32) for length in row.queries],
                keys=row.keys and [max(8, length // 32) for length in row.keys],
            )
        print_row(name, row, half, peak)
    for name, groups in shared.items():
        small = args.size == "tiny"
        if small:
            groups = [(max(4, n // 60), shrunk(own)) for n, own in groups]
        print_shared(name, groups, half, small)


if __name__ == "__main__":
    main()
