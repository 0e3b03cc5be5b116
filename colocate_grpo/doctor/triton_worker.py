"""Started by the Triton check: compiles one kernel in an empty cache, and launches it where asked to."""

from __future__ import annotations

import sys
import tempfile

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RTX_4090_ARCHITECTURE = 89
BLOCK = 128


@triton.jit
def add_one(source, target, count, BLOCK_SIZE: tl.constexpr):
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = index < count
    tl.store(target + index, tl.load(source + index, mask=inside) + 1.0, mask=inside)


def compile_only() -> str:
    signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK_SIZE": "constexpr"}
    source = ASTSource(fn=add_one, signature=signature, constexprs={"BLOCK_SIZE": BLOCK})
    kernel = triton.compile(source, target=GPUTarget("cuda", RTX_4090_ARCHITECTURE, 32))
    size = len(kernel.asm["cubin"])
    return (
        f"Triton {triton.__version__} compiles for sm_{RTX_4090_ARCHITECTURE} ({size} bytes); no card to launch it on"
    )


def launch() -> str:
    import torch

    source = torch.arange(1000, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    add_one[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK_SIZE=BLOCK)
    if not torch.equal(target, source + 1):
        sys.exit("the kernel's result is wrong")
    return f"Triton {triton.__version__} compiles and runs"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        print(launch() if "launch" in sys.argv else compile_only())
