"""Compiles the kernels of fused attention for a GPU that need not be there, with given tiles, heads of 128 and bf16,
and prints the bytes of shared memory that each takes.

    python compiled_attention.py 90 '{"forward": [64, 64, 4, 3, false]}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sameday.kernels import fused_attention_triton as kernels
from sameday.kernels.fused_attention import Tile

MAPPED = {"q": "queries", "grad": "queries", "k": "keys", "v": "keys"}
SUMS, BOUNDS, NUMBERS = ("lse", "powers", "delta"), ("cu", "cu_queries", "cu_keys"), ("scale", "plain_scale")


def source(name: str, tile: Tile) -> ASTSource:
    kernel: Any = getattr(kernels, name)
    constants = {"SHARE": 4, "HEADS": 32, "WIDTH": 128, "CALLS": 1, "TURNED": bool(tile.turned)}
    constants |= {"BM": tile.queries, "BN": tile.keys}
    kinds, values, aligned = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            kinds[argument], values[place,] = "constexpr", constants[argument]
            continue
        if argument in MAPPED:
            kinds[argument] = f"tensordesc<bf16[1,{getattr(tile, MAPPED[argument])},128]>"
            continue
        if argument in SUMS and name == "of_keys":
            kinds[argument] = f"tensordesc<fp32[1,{tile.queries}]>"
            continue
        tensor = argument in ("out", "dq", "dk", "dv")
        pointer = "*bf16" if tensor else "*fp32" if argument in SUMS else "*i32" if argument in BOUNDS else None
        kinds[argument] = pointer or ("fp32" if argument in NUMBERS else "i32")
        if pointer:
            aligned[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, kinds, values, aligned)


def main() -> None:
    capability, chosen = int(sys.argv[1]), json.loads(sys.argv[2])
    taken = {}
    for name, numbers in chosen.items():
        tile = Tile(*numbers)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(source(name, tile), target=GPUTarget("cuda", capability, 32), options=options)
        taken[name] = made.metadata.shared
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
