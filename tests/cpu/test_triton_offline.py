"""Triton's kernels are compiled without a GPU, carried in our cache, and a later call on the GPU compiles nothing.

A later call is played by its host code with Triton told of the architecture, on another cache directory that holds what
was carried: whatever is compiled then, by Triton or by a C compiler, is a failure. Each part is a process, because here
Triton interprets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ffpa_jit.triton.archive import install
from tests.cpu.conftest import run_python

pytest.importorskip("triton")

WARM = """
import json
from ffpa_jit.triton.archive import STORE, spec_for
entry, how, _ = STORE.warm(spec_for("sm_90", 512, "bf16", "forward"))
print(json.dumps([str(entry.path), how, STORE.install(entry), entry.meta]))
"""

# What stands for the driver's library: enough for the linker and the loader, as on a GPU machine.
LIBCUDA = """
import sys; from pathlib import Path; from triton.backends.nvidia import driver
from ffpa_jit.triton import offline
print(offline._stub(Path(driver.__file__).parent / "include" / "cuda.h", Path(sys.argv[1])))
"""

PLAY = """
import ctypes, os
import torch
from triton import knobs
from ffpa_jit.cache import default_cache
from ffpa_jit.triton import archive, offline

ctypes.CDLL(os.environ["TRITON_LIBCUDA_PATH"] + "/libcuda.so.1", mode=os.RTLD_GLOBAL)
if INSTALLED_BY == "import":
    assert archive.STORE.install_all(default_cache().entries()) == {}
else:
    archive.preinstall("sm_90", 512, "bfloat16", "forward")

compiled, found = [], []
def listen(*, src, cache_hit, **_):
    (found if cache_hit else compiled).append(src.name)
knobs.compilation.listener = listen
calls = [offline.Sample(heads, kv, n, transposed=t)
         for heads, kv in ((1, 1), (32, 8), (16, 1)) for n in (1, 1000, 1001, 8192) for t in (False, True)]
calls += [offline.Sample(heads, kv, n, sms=132, queries=few)
          for heads, kv in ((1, 1), (32, 4)) for n in (1, 4000, 131072) for few in (1, 2, 8, 17)]
launches = offline.compile_call("sm_90", 512, torch.bfloat16, backward=False, samples=calls)
modules = offline.helper_modules([launch.kernel for launch in launches], None)
print(json.dumps({"compiled": compiled, "found": sorted(set(found)), "modules": [m.name for m in modules]}))
"""


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A tar exported where there is a compiler, and the directory of a stand-in of libcuda.so.1."""
    made = tmp_path_factory.mktemp("made")
    here = {"FFPA_JIT_CACHE_DIR": str(made / "ours"), "TRITON_CACHE_DIR": str(made / "triton")}
    path, how, note, meta = json.loads(run_python(WARM, **here))
    assert (how, note) == ("built", "")
    assert meta["kernels"] == 16, "four kernels, full and causal, one for both, and seven for few queries"
    again = json.loads(run_python(WARM, **here))
    assert again[:2] == [path, "hit"]
    tar = made / "kernels.tar.gz"
    run_python(f"from ffpa_jit.cache import default_cache; from pathlib import Path; "
               f"print(len(default_cache().export(Path({str(tar)!r}))))", **here)  # fmt: skip
    assert tar.stat().st_size < 1_000_000
    folder = tmp_path_factory.mktemp("stub")
    return tar, run_python(f"import sys; sys.argv[1:] = [{str(folder)!r}]\n{LIBCUDA}").strip()


@pytest.mark.parametrize(("installed_by", "programs"), [("import", "no"), ("first call", "all")])
def test_a_later_call_compiles_nothing(carried, tmp_path, monkeypatch, installed_by, programs):
    tar, libcuda = carried
    there = {
        "FFPA_JIT_CACHE_DIR": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TRITON_LIBCUDA_PATH": libcuda, "CC": "/bin/false",
    }  # fmt: skip
    if programs == "no":
        there["PATH"] = ""  # without the program `file` Triton has other names for its C modules
    run_python("from ffpa_jit.cache import default_cache; from pathlib import Path; "
               f"default_cache().import_(Path({str(tar)!r}))", **there)  # fmt: skip
    played = json.loads(run_python(f"INSTALLED_BY = {installed_by!r}\nimport json\n{PLAY}", **there))
    assert played["compiled"] == []
    assert played["found"] == ["attend", "combine", "fused_forward", "sample_row_max", "score_forward", "value_forward"]
    assert played["modules"] == []


def test_what_is_there_is_needed(carried, tmp_path):
    """The test above sees it when something is missing."""
    _, libcuda = carried
    there = {"FFPA_JIT_CACHE_DIR": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
             "TRITON_LIBCUDA_PATH": libcuda, "CC": "/bin/false"}  # fmt: skip
    code = PLAY.replace("offline.compile_call(", "[] and offline.compile_call(")
    with pytest.raises(AssertionError, match="cannot be compiled"):
        run_python(f"INSTALLED_BY = 'import'\nimport json\n{code}", **there)


ENUMERATE = """
import json, sys
import torch
from triton.runtime.jit import JITFunction
from ffpa_jit.triton import offline

keys = set()
def note(self, key, *rest, **named):
    keys.add((self.__name__, key))
    return type("Kernel", (), {"hash": key})()
JITFunction._do_compile = note

def seen(arch, head_dim, samples):
    keys.clear()
    offline.compile_call(arch, head_dim, torch.float16, samples=samples)
    return set(keys)

for arch, head_dim in (("sm_90", 512), ("sm_90", 264), ("sm_80", 1024)):
    warmed = seen(arch, head_dim, offline.samples_for(arch, head_dim))
    calls = [offline.Sample(h, hk, n, p, cap << 20, transposed=n % 2 == 0) for h, hk, n, cap in (
                (1, 1, 256, 512), (8, 8, 1001, 512), (32, 8, 4096, 512), (1, 1, 16384, 512), (16, 2, 2000, 64),
                (4, 1, 4096, 32), (1, 1, 4096, 16), (16, 1, 2048, 4),
             ) for p in (1, 132)]
    missing = sorted({name for name, _ in seen(arch, head_dim, calls) - warmed})
    print(arch, head_dim, len(warmed), missing)
"""


def test_small_calls_launch_the_kernels_of_calls_of_any_size():
    for line in run_python(ENUMERATE).splitlines():
        arch, head_dim, count, missing = line.split(maxsplit=3)
        assert missing == "[]", f"{arch} D={head_dim}"
        assert int(count) >= 20


def test_without_a_c_compiler_the_error_says_so(tmp_path):
    code = f"""
from pathlib import Path
from triton import knobs
from ffpa_jit.triton import offline
knobs.cache.dir = {str(tmp_path / "t")!r}
try:
    offline.helper_modules([], Path({str(tmp_path)!r}))
except RuntimeError as error:
    print(error)
"""
    assert "install gcc, or set CC" in run_python(code, PATH="")


def test_an_interpreted_kernel_is_not_compiled():
    code = """
import torch
from ffpa_jit.triton import offline
try:
    offline.compile_call("sm_90", 512, torch.float16)
except RuntimeError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1 is set" in run_python(code, TRITON_INTERPRET="1")


def test_an_archive_of_another_triton_is_told_and_left(carried, tmp_path):
    tar, _ = carried
    code = f"""
import sys
from pathlib import Path
from ffpa_jit.cache import default_cache
from ffpa_jit.triton import archive
default_cache().import_(Path({str(tar)!r}))
archive.compiler_id = lambda arch: "triton 9.9"
(why,) = archive.STORE.install_all(default_cache().entries()).values()
print(why)
archive.preinstall("sm_90", 512, "bfloat16", "forward")
print(Path({str(tmp_path / "triton")!r}).exists())
"""
    there = {"FFPA_JIT_CACHE_DIR": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    why, exists = run_python(code, **there).splitlines()
    assert why.startswith("it was made by triton ")
    assert why.endswith("and here is triton 9.9")
    assert exists == "False"


def test_a_first_call_survives_a_cache_that_cannot_be_written(carried, tmp_path):
    tar, _ = carried
    (tmp_path / "file").touch()
    code = f"""
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from pathlib import Path
from ffpa_jit.cache import default_cache
from ffpa_jit.triton import archive
default_cache().import_(Path({str(tar)!r}))
archive.preinstall("sm_90", 512, "bfloat16", "forward")
archive.preinstall("sm_90", 512, "bfloat16", "backward")
"""
    there = {"FFPA_JIT_CACHE_DIR": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "file")}
    said = run_python(code, **there).splitlines()
    assert len(said) == 1
    assert said[0].startswith("the warmed Triton kernels of sm_90-d512-bf16-forward are not used")


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (("sm_70", 512, "bf16", "forward"), "sm_90"),
        (("sm_90", 300, "bf16", "forward"), "multiples of 8 from 264 to 1024"),
        (("sm_90", 512, "fp32", "forward"), "'bf16' or 'fp16'"),
        (("sm_90", 512, "bf16", "sideways"), "'forward' or 'backward'"),
    ],
)
def test_what_has_no_kernels_is_a_value_error(arguments, allowed):
    from ffpa_jit.triton import archive

    with pytest.raises(ValueError, match=allowed):
        archive.spec_for(*arguments)


def test_importing_touches_no_triton():
    code = "import sys, ffpa_jit.triton.archive, ffpa_jit.warm, ffpa_jit.info; print('triton' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_the_compile_script_and_the_warm_share_one_way_of_compiling():
    done = subprocess.run([sys.executable, "bench/compile_kernels.py", "--help"], capture_output=True, text=True,
                          cwd=Path(__file__).resolve().parents[2], check=True)  # fmt: skip
    assert "ffpa_jit.triton.offline" in done.stdout


@pytest.mark.parametrize("hostile", ["../../../pwned.txt", "/tmp/pwned.txt", "a/b"])
def test_an_archive_cannot_name_a_file_outside_the_cache(tmp_path, hostile):
    artefact = tmp_path / "kernels.zip"
    with zipfile.ZipFile(artefact, "w") as archive:
        manifest = {"kernels": {"A" * 52: [hostile]}, "modules": [], "glibc": ""}
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr(f"kernels/{'A' * 52}/{hostile}", b"x")
    entry = SimpleNamespace(artefact=artefact, path=tmp_path)
    with pytest.raises(ValueError, match="no kernel archive holds"):
        install(entry)
