"""What tests and benches need on a machine without a network, such as a cluster's GPU node, which has torch,
transformers and peft with all that they need, and little else: packages as archives, made where there is a network.

    python bench/offline.py OUT                               an archive for each group of packages
    python bench/offline.py OUT --only tests peers --python 3.12 --machine x86_64

There: `tar xf OUT/GROUP.tar.xz -C FOLDER` for each, and `PYTHONPATH=src:FOLDER`. `tests`, `arrow` and `science` are for
the whole of `pytest`, `tests` alone for most benches, `peers` for `bench/peers.py`. Files that nobody imports there are
left out: tests, headers, libraries for other GPUs and for storage elsewhere. It prints how large the archives are.
"""

from __future__ import annotations

import argparse
import fnmatch
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

GROUPS: dict[str, tuple[str, ...]] = {
    "tests": (
        *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
        *("hypothesis", "sortedcontainers", "pytest-xdist", "execnet", "bitsandbytes"),
        *("sacrebleu", "portalocker", "regex", "tabulate", "colorama", "lxml"),
        *("rouge-score", "absl-py", "six", "nltk", "click", "joblib", "cloudpickle", "tqdm"),
    ),
    "arrow": ("pyarrow",),
    "science": ("scipy", "scikit-learn", "threadpoolctl", "narwhals"),
    "peers": (
        *("unsloth==2026.10.9", "unsloth-zoo", "trl==1.15.0", "liger-kernel==0.8.5", "datasets==4.3.0", "torchao"),
        *("diffusers", "tyro", "cut-cross-entropy", "msgspec", "dill", "multiprocess", "docstring-parser", "typeguard"),
        *("json5", "nest-asyncio", "structlog", "xxhash"),
        *("requests", "urllib3", "charset-normalizer", "idna", "certifi"),
    ),
}
"""Without what those packages bring with them that such a machine has already."""

BUILT = frozenset({"rouge-score"})
"""Pure Python of which there is no wheel."""
TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
LEFT_OUT = (
    *("*/tests/*", "*/test/*", "test/*", "*.pxd", "*.pyx", "*.h", "*.hpp", "*.a", "*/include/*", "*/RECORD"),
    *("pyarrow/*flight*", "pyarrow/libarrow_s3*", "pyarrow/_s3fs*", "pyarrow/libarrow_python.so"),
    *("pyarrow/libarrow_python.so.*.*", "*/libbitsandbytes_rocm*", "*/libbitsandbytes_xpu*", "lxml/objectify*"),
    *("studio/*", "torchao/*.so", "torchao/prototype/spinquant/*matrices*"),
)
"""By their path in a wheel; what is in the same file twice, too. What pyarrow.dataset imports stays."""
OF_A_GPU = "libbitsandbytes_cuda"
"""One for each version of CUDA: the one that is asked for is taken."""


def wheels(names: Sequence[str], folder: Path, python: str, machine: str) -> list[Path]:
    """As the package index has them for that machine, in the versions of constraints.txt."""
    constraints = Path(__file__).parents[1] / "constraints.txt"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    shared = ["--no-deps", "-c", str(constraints)]
    ready = [name for name in names if name not in BUILT]
    there = ["--only-binary=:all:", "--python-version", python]
    there += [f"--platform={tag}_{machine}" for tag in TAGS]
    subprocess.run([*pip, "download", *shared, *there, "-d", str(folder), *ready], check=True)
    if build := [name for name in names if name in BUILT]:
        subprocess.run([*pip, "wheel", *shared, "-w", str(folder), *build], check=True)
    return sorted(folder.glob("*.whl"))


def kept(paths: Sequence[str], cuda: str) -> Iterator[str]:
    for path in paths:
        name = path.rsplit("/", 1)[-1]
        other = name.startswith(OF_A_GPU) and name != f"{OF_A_GPU}{cuda}.so"
        if not (other or path.endswith("/") or any(fnmatch.fnmatch(path, each) for each in LEFT_OUT)):
            yield path


def pack(group: str, out: Path, python: str, machine: str, cuda: str) -> Path:
    with tempfile.TemporaryDirectory() as aside:
        site, loaded = Path(aside, "site"), Path(aside, "wheels")
        loaded.mkdir()
        for wheel in wheels(GROUPS[group], loaded, python, machine):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site, kept(packed.namelist(), cuda))
        archive = out / f"{group}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=6) as made:
            for path in sorted(site.iterdir()):
                made.add(path, path.name)
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS))
    parser.add_argument("--python", default="3.12", help="the other machine's version (3.12)")
    parser.add_argument("--machine", default=platform.machine(), help="its kind of processor, this one's if not said")
    parser.add_argument("--cuda", default="130", help="its version of CUDA, without the point (130)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for group in args.only:
        archive = pack(group, args.out, args.python, args.machine, args.cuda)
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
