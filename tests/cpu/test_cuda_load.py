"""Loading and launching of the CUDA backend's artefacts, without a GPU.

The driver, and a compiled library, are stubs in C that write down what they are called with.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ffpa_jit.cuda import driver, load
from tests.cpu.conftest import in_threads

FAKE = r"""
#include <string.h>
typedef struct { long n, function, grid[3], block[3], shared, stream; char params[48]; } Launch;
static __thread void* current;
Launch launched; int retained, loaded, sized, touched, fail_launch, fail_load; long dynamic_shared;
int cuInit(unsigned f) { return 0; }
int cuGetErrorName(int e, const char** s) { *s = e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_X"; return 0; }
int cuGetErrorString(int e, const char** s) { *s = "its meaning"; return 0; }
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
int cuCtxSetCurrent(void* c) { current = c; return 0; }
int cuDeviceGet(int* d, int n) { *d = n + 40; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) {
  __sync_fetch_and_add(&retained, 1); *c = (void*)(0x7f0000000000L + d); return 0;
}
int cuModuleLoadData(void** m, const void* image) {
  if (!current) return 201;
  if (fail_load) return fail_load;
  if (memcmp(image, "\177ELF\0cubin", 10)) return 200;
  __sync_fetch_and_add(&loaded, 1); *m = (void*)0x5000L; return 0;
}
int cuModuleGetFunction(void** f, void* m, const char* name) {
  if (m != (void*)0x5000L) return 400;
  *f = (void*)(!strcmp(name, "ffpa_forward") ? 0x6100000001L : !strcmp(name, "ffpa_combine") ? 0x6200000001L : 0L);
  return *f ? 0 : 500;
}
int cuFuncGetAttribute(int* v, int a, void* f) {
  if (a != 4 || !f) return 1;
  __sync_fetch_and_add(&touched, 1); *v = 255; return 0;
}
int cuFuncSetAttribute(void* f, int a, int v) {
  if (a != 8 || f != (void*)0x6100000001L) return 1;
  sized++; dynamic_shared = v; return 0;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  if (!current) return 201;
  if (fail_launch) return fail_launch;
  if (extra) return 1;
  Launch l = {0, (long)f, {gx, gy, gz}, {bx, by, bz}, shared, (long)stream};
  memcpy(l.params, params[0], sizeof l.params);
  l.n = __sync_add_and_fetch(&launched.n, 1);
  launched = l;
  return 0;
}
"""

LIBRARY = r"""
#include <string.h>
int calls, prepared, fail; long got[4]; char params[48];
int ffpa_launch(const void* p, int which, unsigned x, unsigned y, void* stream) {
  long now[4] = {which, x, y, (long)stream};
  memcpy(got, now, sizeof got); memcpy(params, p, sizeof params); calls++;
  return fail;
}
const char* ffpa_error(int code) { return code == 35 ? "CUDA driver version is insufficient" : 0; }
"""


class Params(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("stride", ctypes.c_longlong * 3),
        ("n", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_long),
        ("function", ctypes.c_long),
        ("grid", ctypes.c_long * 3),
        ("block", ctypes.c_long * 3),
        ("shared", ctypes.c_long),
        ("stream", ctypes.c_long),
        ("params", ctypes.c_char * 48),
    )


PARAMS = Params(0x7F00DEADBEEF, 0x7F0000001000, (1 << 40, -3, 512), 77, 0.125)


def compile_c(directory: Path, name: str, text: str) -> ctypes.CDLL:
    gcc = shutil.which("gcc") or shutil.which("cc")
    if gcc is None:
        pytest.skip("no C compiler")
    (directory / "stub.c").write_text(text)
    subprocess.check_call([gcc, "-w", "-shared", "-fPIC", "-o", str(directory / name), str(directory / "stub.c")])
    return ctypes.CDLL(str(directory / name))


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A driver of one's own (each test has its own copy), on device 1."""
    library = compile_c(tmp_path, "libcuda.so.1", FAKE)
    fake = driver.Driver(str(tmp_path / "libcuda.so.1"))
    monkeypatch.setattr(load, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    yield library
    library.cuCtxSetCurrent(None)


def value(library: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(library, name)


@pytest.fixture
def cubin(tmp_path: Path) -> Path:
    (tmp_path / "kernel.cubin").write_bytes(b"\x7fELF\0cubin\0\xff" * 10)
    return tmp_path / "kernel.cubin"


def test_a_cubin_is_launched_as_described(stub: ctypes.CDLL, cubin: Path) -> None:
    loaded = load.load(cubin, threads=288, shared_bytes=215_000)
    assert value(stub, "loaded").value == 0
    loaded.launch(PARAMS, "forward", (70_000, 3), 0x7F1234567890)
    got = Launch.in_dll(stub, "launched")
    assert (got.function, list(got.grid), list(got.block)) == (0x6100000001, [70_000, 3, 1], [288, 1, 1])
    assert (got.shared, got.stream) == (215_000, 0x7F1234567890)
    assert ctypes.string_at(ctypes.addressof(got) + Launch.params.offset, 48) == bytes(PARAMS)
    assert ctypes.c_long.in_dll(stub, "dynamic_shared").value == 215_000
    loaded.launch(PARAMS, "combine", (5, 1), 0)
    got = Launch.in_dll(stub, "launched")
    assert (got.function, list(got.grid), list(got.block)) == (0x6200000001, [5, 1, 1], [256, 1, 1])
    assert (got.shared, got.stream, got.n) == (0, 0, 2)
    assert [value(stub, name).value for name in ("loaded", "sized", "touched")] == [1, 1, 2]


def test_a_thread_without_a_context_gets_the_devices(stub: ctypes.CDLL, cubin: Path) -> None:
    loaded = load.load(cubin, threads=256, shared_bytes=1024)
    in_threads(8, lambda: [loaded.launch(PARAMS, "forward", (1, 1), 0) for _ in range(50)])
    assert value(stub, "loaded").value == 1
    assert Launch.in_dll(stub, "launched").n == 400
    loaded.prepare()
    context = ctypes.c_void_p()
    stub.cuCtxGetCurrent(ctypes.byref(context))
    assert context.value == 0x7F0000000000 + 41


def test_a_module_is_loaded_once_a_context(stub: ctypes.CDLL, cubin: Path) -> None:
    loaded = load.load(cubin, threads=256, shared_bytes=1024)
    for context in (0x111, 0x222, 0x111):
        stub.cuCtxSetCurrent(ctypes.c_void_p(context))
        loaded.prepare()
        loaded.launch(PARAMS, "forward", (1, 1), 0)
    assert value(stub, "loaded").value == 2
    assert value(stub, "retained").value == 0


def test_a_second_devices_first_launch_inside_a_capture_is_refused(
    stub: ctypes.CDLL, cubin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load.load(cubin, threads=256, shared_bytes=1024)
    loaded.prepare()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded.launch(PARAMS, "forward", (1, 1), 0)
    stub.cuCtxSetCurrent(ctypes.c_void_p(0x333))
    with pytest.raises(RuntimeError, match="warm"):
        loaded.launch(PARAMS, "forward", (1, 1), 0)


def test_driver_errors_have_name_meaning_and_place(stub: ctypes.CDLL, cubin: Path) -> None:
    loaded = load.load(cubin, threads=256, shared_bytes=1024)
    value(stub, "fail_launch").value = 700
    with pytest.raises(
        load.CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700: its meaning\).*ffpa_forward"
    ) as caught:
        loaded.launch(PARAMS, "forward", (1, 1), 0)
    assert caught.value.code == 700
    value(stub, "fail_load").value = 209
    stub.cuCtxSetCurrent(ctypes.c_void_p(0x444))
    with pytest.raises(load.CudaError, match=r"209.*loading.*another architecture"):
        loaded.launch(PARAMS, "forward", (1, 1), 0)


def test_no_driver_is_an_oserror(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError):
        driver.Driver("libcuda-of-no-machine.so.1")


@pytest.mark.parametrize("prepares", [False, True])
def test_a_library_is_launched_as_described(prepares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    text = LIBRARY + ("int ffpa_prepare(void) { prepared++; return fail; }" if prepares else "")
    library = compile_c(tmp_path, "kernel.so", text)
    loaded = load.load(tmp_path / "kernel.so", threads=288, shared_bytes=1024)
    loaded.prepare()
    loaded.launch(PARAMS, "combine", (70_000, 3), 0x7F1234567890)
    assert list((ctypes.c_long * 4).in_dll(library, "got")) == [1, 70_000, 3, 0x7F1234567890]
    assert bytes((ctypes.c_char * 48).in_dll(library, "params").raw) == bytes(PARAMS)
    loaded.launch(PARAMS, "forward", (1, 1), 0)
    assert list((ctypes.c_long * 4).in_dll(library, "got")) == [0, 1, 1, 0]
    device[0] = 3
    loaded.launch(PARAMS, "forward", (1, 1), 0)
    assert value(library, "prepared").value == (2 if prepares else 0)
    value(library, "fail").value = 35
    with pytest.raises(load.CudaError, match=r"35: CUDA driver version.*launching ffpa_forward.*update the driver"):
        loaded.launch(PARAMS, "forward", (1, 1), 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device[0] = 4
    with pytest.raises(RuntimeError, match="warm"):
        loaded.launch(PARAMS, "forward", (1, 1), 0)
