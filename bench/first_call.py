#!/usr/bin/env python3
"""What a first call costs: compiling one CUDA kernel, and finding it compiled.

    python bench/first_call.py                    # D=512, bf16, for this machine's GPU, else sm_90
    python bench/first_call.py --arch sm_89 --head-dim 320

Each line is a process of its own. `cold`: an empty cache, seconds and peak memory (of the largest process) of the
compilation, with nvcc and with NVRTC, the latter with an empty PATH. `warm`: the cache is filled; from a process that
has imported ffpa_jit and, with a GPU, has its tensors, to the first launch. Without a GPU, to the artefact being found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def child(arch: str, head_dim: int) -> None:
    """Run in a process of its own: make the kernel available, or call it where there is a GPU; print what it took."""
    import torch

    import ffpa_jit
    from ffpa_jit.cuda import kernels
    from ffpa_jit.cuda.instantiate import spec_for

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        q = torch.randn(1, 8, 64, head_dim, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
    start = time.perf_counter()
    if on_gpu:
        ffpa_jit.ffpa_attn_func(q, q, q, backend="cuda")
    else:
        kernels.warm(spec_for(arch, head_dim, "bf16"))
    seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    compiling = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak / 1024, "compiler": compiling / 1024}))


def run(arch: str, head_dim: int, cache: Path, **environment: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", "--arch", arch, "--head-dim", str(head_dim)]
    root = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "FFPA_JIT_CACHE_DIR": str(cache), "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch")
    parser.add_argument("--head-dim", type=int, default=512)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    arch = options.arch
    if arch is None:
        import torch

        arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    if options.child:
        child(arch, options.head_dim)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        for compiler in ("nvcc", "nvrtc"):
            cache = Path(scratch, compiler)
            path = {"PATH": str(empty)} if compiler == "nvrtc" else {}
            try:
                cold = run(arch, options.head_dim, cache, FFPA_JIT_COMPILER=compiler, **path)
            except RuntimeError as error:
                failed += 1
                print(f"{compiler:5} cold: {error}", flush=True)
                continue
            print(
                f"{compiler:5} cold: {cold['seconds']:.2f} s, {cold['peak']:.0f} MB in this process or "
                f"{cold['compiler']:.0f} MB in a compiler ({arch}, D={options.head_dim}, bf16)",
                flush=True,
            )
            warm = [run(arch, options.head_dim, cache, **path)["seconds"] * 1e3 for _ in range(3)]
            print(f"{compiler:5} warm: {', '.join(f'{ms:.1f}' for ms in warm)} ms", flush=True)
    return 1 if failed == 2 else 0


if __name__ == "__main__":
    sys.exit(main())
