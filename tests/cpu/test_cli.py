"""The command line and `ffpa_jit.warm`: what they print and refuse, how they exit. No GPU, caches of their own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from ffpa_jit import plan_table, problem
from ffpa_jit.cache import Built, Key, default_cache
from ffpa_jit.cli import main
from ffpa_jit.cuda import kernels
from ffpa_jit.cuda.instantiate import spec_for
from ffpa_jit.cute.backend import CuTeKernels
from ffpa_jit.toolchain import Nvrtc
from ffpa_jit.triton.backend import TritonKernels
from tests.cpu.conftest import ROOT, run_python

warming = importlib.import_module("ffpa_jit.warm")
SPEC = {"arch": "sm_90", "head_dim": 512, "dtype": "bfloat16", "acc": "f32", "stages": 2}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    for name in ("FFPA_JIT_CACHE_PATH", "FFPA_JIT_COMPILER", "FFPA_JIT_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def run(*arguments, **kwargs):
    return CliRunner().invoke(main, [str(each) for each in arguments], **kwargs)


def entry(name="sm_90-d512-bf16-f32-s2", group="cuda", data=b"machine code"):
    def build(directory):
        (directory / "kernel.cubin").write_bytes(data)
        return Built("kernel.cubin")

    return default_cache().get(Key(group, name, {"arch": "sm_90"}, "00ff", "nvrtc 13.0.88"), build, "a test")


# warm


@pytest.fixture
def compiled(monkeypatch):
    """Nothing is compiled: what would be is noted, and fails where its name holds a word of the list returned."""
    units, bad = [], []

    def pretend(unit):
        units.append(unit)
        if any(word in unit.name for word in bad):
            return warming.Result(unit.backend, unit.name, "failed", 1.0, None, "ptxas: error"), ["the disk is slow"]
        return warming.Result(unit.backend, unit.name, "built", 1.5, "/cache/x"), ["the disk is slow"]

    monkeypatch.setattr(warming, "_in_process", pretend)
    return units, bad


def test_warm_compiles_every_combination_once(compiled):
    done = run("warm", "--headdim", "512,504", "--dtype", "bf16,fp16", "--arch", "sm_90,sm_80", "--backend", "cuda")
    assert done.exit_code == 0, done.output
    names = sorted(unit.name for unit in compiled[0])
    assert names == [f"sm_{a}-d512-{t}-f32-s2" for a in (80, 90) for t in ("bf16", "fp16")]
    assert "[4/4] cuda" in done.stderr
    assert all(name in done.stdout for name in names)


def test_warm_compiles_both_directions_of_triton(compiled):
    assert run("warm", "--headdim", "512", "--arch", "sm_90", "--backend", "cuda,triton").exit_code == 0
    assert [unit.name for unit in sorted(compiled[0], key=lambda unit: unit.name)] == [
        "sm_90-d512-bf16-backward", "sm_90-d512-bf16-f32-s2", "sm_90-d512-bf16-forward",
    ]  # fmt: skip


def test_one_failure_does_not_stop_the_others_and_is_the_exit_code(compiled):
    compiled[1].append("d320")
    done = run("warm", "--headdim", "320,512", "--arch", "sm_90", "--backend", "cuda", "--jobs", "1")
    assert done.exit_code == 1
    assert "failed: cuda sm_90-d320-bf16-f32-s2: ptxas: error" in done.stderr
    assert "built" in done.stdout


def test_warm_as_json(compiled):
    done = run("warm", "--headdim", "512", "--arch", "sm_90,gfx942", "--dry-run", "--json")
    found = {(each["backend"], each["name"]): each["how"] for each in json.loads(done.stdout)}
    assert found["cuda", "sm_90-d512-bf16-f32-s2"] == "planned"
    assert found["triton", "gfx942-d512-bf16-forward"] == "planned"
    assert found["cuda", "gfx942"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--headdim", "200"), "head dims are multiples of 8 from 264 to 1024"),
        (("--headdim", "300", "--backend", "cuda"), "head dims are multiples of 8 from 264 to 1024"),
        (("--headdim", "1032"), "head dims are multiples of 8 from 264 to 1024"),
        (("--headdim", "many"), "not a list of head dims"),
        (("--headdim", ""), "an argument is empty"),
        (("--headdim", "512", "--dtype", "fp32"), "float16"),
        (("--headdim", "512", "--acc", "f16"), "acc='f16' needs float16 inputs"),
        (("--headdim", "512", "--stages", "9"), "choose 1, 2, 3 or 4"),
        (("--headdim", "512", "--backend", "numpy"), "choose of triton, cuda, cutedsl"),
        (("--headdim", "512", "--arch", "sm_75"), "; arch='sm_75' has no CUDA kernel; choose one of sm_80, sm_86"),
        (("--headdim", "512", "--arch", "sm90"), "arch='sm90' has no Triton kernels; choose one of sm_80, sm_87"),
        (("--headdim", "512", "--jobs", "0"), "x>=1"),
        (("--headdim", "512", "--frobnicate"), "No such option"),
    ],
)
def test_what_cannot_be_is_told_with_what_is_allowed(compiled, arguments, said):
    arch = () if "--arch" in arguments else ("--arch", "sm_90")
    done = run("warm", *arguments, *arch)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())
    assert compiled[0] == []


def test_without_a_gpu_an_architecture_is_asked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("warm", "--headdim", "512")
    assert done.exit_code == 2
    assert "there is no GPU here to compile for; name an architecture such as sm_90" in " ".join(done.stderr.split())
    with pytest.raises(ValueError, match="--arch"):
        warming.warm(512)


def test_warm_takes_one_value_or_several(compiled):
    results = warming.warm(512, "bf16", arch="sm_90", backend="cuda")
    assert [result.name for result in results] == ["sm_90-d512-bf16-f32-s2"]
    seen = []
    results = warming.warm((320, 512), ["fp16"], ["f16", "f32"], (1, None), ["sm_86"], ["cuda"], jobs=3,
                           progress=lambda result, done, total: seen.append((done, total)))  # fmt: skip
    assert len(results) == 8
    assert seen == [(i, 8) for i in range(1, 9)]
    assert [result.name for result in results] == [
        f"sm_86-d{d}-fp16-{acc}-s{stages}" for d in (320, 512) for acc in ("f16", "f32") for stages in (1, 3)
    ], "in the order of the arguments, whatever finished first"


def test_a_dry_run_compiles_nothing_and_leaves_nothing(compiled, tmp_path):
    results = warming.warm(512, arch="sm_90", dry_run=True)
    assert {result.how for result in results} == {"planned"}
    assert compiled[0] == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("root", ["under a file", "open to others", "in /proc"])
def test_a_cache_that_keeps_nothing_fails_every_kernel_before_it_is_compiled(compiled, tmp_path, monkeypatch, root):
    path = tmp_path / "root"
    if root == "under a file":
        path.write_text("")
        path /= "cache"
    elif root == "open to others":
        path.mkdir()
        path.chmod(0o775)
    else:
        path = Path("/proc/ffpa-jit")
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(path))
    done = run("warm", "--headdim", "512", "--arch", "sm_90", "--backend", "cuda,triton")
    assert done.exit_code == 1
    assert compiled[0] == []
    assert done.stderr.count(f"nothing can be kept: {path} is not used: ") == 3
    assert "; set FFPA_JIT_CACHE_DIR to a directory of your own" in done.stderr
    assert all(result.failed for result in warming.warm(512, arch="sm_90"))


def test_what_lands_in_a_temporary_cache_is_a_failure(tmp_path, monkeypatch):
    """The root can be written, and the directory of the group is refused."""
    (tmp_path / "cache" / "cuda").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    (tmp_path / "cache" / "cuda").chmod(0o777)
    monkeypatch.setattr(kernels.STORE, "warm", lambda spec: (entry(), "built", 1.0))
    result = warming._compile("cuda", SPEC)
    assert result.failed
    assert result.message.startswith(
        f"nothing can be kept: {tmp_path / 'cache'} is not used: {tmp_path}/cache/cuda can"
    )


def test_warnings_of_the_processes_are_passed_on_once(compiled, warnings_seen):
    warming.warm([320, 512], arch="sm_90")
    assert warnings_seen == ["the disk is slow"]


def test_a_process_hands_over_its_warnings(tmp_path):
    code = """
import json, logging, sys
from ffpa_jit import warm
def compiled(backend, spec):
    logging.getLogger("ffpa_jit").warning("mind %s", spec["arch"])
    return warm.Result(backend, spec["arch"], "hit")
import importlib; warm = importlib.import_module("ffpa_jit.warm")
warm._compile = compiled
warm._serve()
"""
    answer = tmp_path / "answer.json"
    task = {"backend": "cuda", "spec": SPEC, "answer": str(answer)}
    subprocess.run([sys.executable, "-c", code], input=json.dumps(task), text=True, check=True, cwd=ROOT)
    assert json.loads(answer.read_text())["warnings"] == ["mind sm_90"]


def test_what_is_in_the_cache_starts_no_process(compiled):
    def build(directory):
        (directory / "kernel.cubin").write_bytes(b"machine code")
        return Built("kernel.cubin")

    made_by = kernels.STORE.compiler() or SimpleNamespace(id="nvcc 1.2.3 (b)")
    for head_dim in (320, 512):
        default_cache().get(kernels.key_of(spec_for("sm_90", head_dim, "bf16"), made_by.id), build, "a test")
    entry("sm_90-d640-bf16-f32-s2")  # of other sources
    results = warming.warm([320, 512, 640], arch="sm_90", backend="cuda")
    assert [unit.name for unit in compiled[0]] == ["sm_90-d640-bf16-f32-s2"]
    assert [result.how for result in results] == ["hit", "hit", "built"]
    assert {result.how for result in warming.warm([320, 512], arch="sm_90", backend="cuda", dry_run=True)} == {"hit"}


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of sm_90 and one of sm_80; what is loaded on them is noted."""
    loaded, current = [], [0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class Kernel:
        def __init__(self, spec):
            self.spec = spec

        def prepare(self):
            if self.spec.head_dim == 640:
                raise RuntimeError("out of memory")
            loaded.append((self.spec.slug, current[-1]))

    def run(self, spec, device):
        loaded.append((spec.slug, device))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.device", Device)
    monkeypatch.setattr(problem, "_cuda_arch", lambda index: "sm_80" if index == 1 else "sm_90")
    monkeypatch.setattr(kernels, "kernel", Kernel)
    for each in (TritonKernels, CuTeKernels):
        monkeypatch.setattr(each, "load", run)
    return loaded


def test_warm_for_the_gpus_here_loads_in_this_process_on_each(compiled, gpus):
    warming.warm(512, backend="cuda")
    assert gpus == [("sm_90-d512-bf16-f32-s2", 0), ("sm_80-d512-bf16-f32-s2", 1), ("sm_90-d512-bf16-f32-s2", 2)]
    gpus.clear()
    warming.warm(512, backend="triton")
    for arch, index in (("sm_90", 0), ("sm_90", 2), ("sm_80", 1)):
        for direction in ("forward", "backward"):
            assert (f"{arch}-d512-bf16-{direction}", index) in gpus
    gpus.clear()
    warming.warm(512, load=False)
    warming.warm(512, arch="sm_90")
    warming.warm(512, dry_run=True)
    assert run("warm", "--headdim", "512").exit_code == 0
    assert gpus == []
    warming.warm(512, arch="sm_80", backend="cuda", load=True)
    assert gpus == [("sm_80-d512-bf16-f32-s2", 1)]


def test_what_cannot_be_loaded_is_a_failure_and_what_failed_is_not_loaded(compiled, gpus):
    compiled[1].append("sm_90-d512")
    results = {result.name: result for result in warming.warm([512, 640], backend="cuda")}
    assert gpus == [("sm_80-d512-bf16-f32-s2", 1)]
    assert results["sm_90-d640-bf16-f32-s2"].failed
    assert "cannot be loaded on GPU 0: RuntimeError: out of memory" in results["sm_90-d640-bf16-f32-s2"].message
    assert results["sm_90-d512-bf16-f32-s2"].message == "ptxas: error"


def test_a_unit_that_raises_is_a_failure_with_its_reason():
    result = warming._compile("cuda", {**SPEC, "arch": "sm_1"})
    assert result.failed
    assert "sm_1" in result.message


def test_a_compiler_that_is_killed_is_a_failure_that_says_so(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho so far so good >&2\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (result,) = warming.warm(512, arch="sm_90", backend="cuda")
    assert result.failed
    assert "out of memory" in result.message
    assert "so far so good" in result.message


def test_workers_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment = warming._environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "TRITON_INTERPRET" not in environment


def test_jobs_fit_cores_and_memory(monkeypatch):
    monkeypatch.setattr(warming, "_cores", lambda: 8)
    monkeypatch.setattr(warming, "_free_bytes", lambda: 3 * warming.JOB_BYTES + 5)
    assert warming.default_jobs() == 3
    monkeypatch.setattr(warming, "_free_bytes", lambda: 5)
    assert warming.default_jobs() == 1
    monkeypatch.setenv("FFPA_JIT_JOBS", "6")
    assert warming.default_jobs() == 6
    monkeypatch.undo()
    assert 1 <= warming._cores() <= (os.cpu_count() or 1)
    assert warming._free_bytes() > 0


# info and explain


def test_info_tells_everything_and_starts_no_gpu(tmp_path):
    code = """
import json, torch
from ffpa_jit import info
print(json.dumps(info.collect()))
print(torch.cuda.is_initialized())
"""
    found, initialised = run_python(code, FFPA_JIT_STRICT="1", FFPA_JIT_CACHE_DIR=str(tmp_path / "cache")).splitlines()
    report = json.loads(found)
    assert set(report) == {"versions", "devices", "toolchain", "cache", "backends", "environment"}
    assert report["environment"]["FFPA_JIT_STRICT"] == "1"
    assert report["versions"]["python"].startswith("3.")
    assert initialised == "False" or report["devices"]


def test_info_reads_well_and_survives_what_is_broken(monkeypatch):
    done = run("info")
    assert done.exit_code == 0
    assert "toolchain" in done.stdout
    assert "not cutedsl" in done.stdout

    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr("ffpa_jit.toolchain.probes", broken)
    assert "OSError: no such thing" in run("info").stdout
    assert json.loads(run("info", "--json").stdout)["toolchain"] == {"error": "OSError: no such thing"}


@pytest.mark.parametrize(
    ("setting", "nvrtc", "said"),
    [
        (None, True, "used: nvrtc 13.0.88"),
        ("nvrtc", True, "used: nvrtc 13.0.88 (FFPA_JIT_COMPILER)"),
        (None, False, "none: pip install nvidia-cuda-nvrtc"),
        ("nvcc", True, "none: FFPA_JIT_COMPILER=nvcc, which cannot be used"),
        ("foo", True, "error: FFPA_JIT_COMPILER='foo' is not a compiler"),
    ],
)
def test_info_begins_with_the_compiler_that_would_be_used(monkeypatch, setting, nvrtc, said):
    monkeypatch.setattr("ffpa_jit.toolchain.find_nvcc", lambda: None)
    found = Nvrtc(Path("/l/libnvrtc.so.13"), Path("/l/libnvrtc-builtins.so.13.0"), "13.0.88") if nvrtc else None
    monkeypatch.setattr("ffpa_jit.toolchain.find_nvrtc", lambda: found)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv("FFPA_JIT_COMPILER", setting)
    lines = run("info").stdout.splitlines()
    at = lines.index("toolchain")
    assert lines[at + 1].startswith(f"  {said}")
    assert lines[at + 2] == "  missing CUDA_HOME: not set"


def test_explain_is_of_the_architecture_that_was_named():
    asked = problem._cuda_arch
    call = ("explain", "--headdim", 512, "--heads", 32, "--kv-heads", 8, "--causal", "--grad", "--json")
    there = run(*call, "--arch", "sm_90")
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout)["forward"] != "sdpa"
    assert json.loads(there.stdout)["summary"].endswith("on sm_90, causal")
    old = json.loads(run(*call, "--arch", "sm_70").stdout)
    assert old["forward"] == "sdpa"
    assert "sm_70" in " ".join(old["reasons"]["triton"])
    assert problem._cuda_arch is asked, "put back afterwards"


@pytest.mark.parametrize("name", ["cutedsl", "cute"])
def test_explain_of_a_call_that_raises_exits_1(name):
    done = run("explain", "--headdim", 512, "--arch", "sm_80", "--backend", name)
    assert done.exit_code == 1
    assert "raises: NotImplementedError" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--headdim", "0"), ("--headdim", "512", "--arch", "volta"), ("--headdim", "512", "--backend", "numpy"),
     ("--headdim", "512", "--dtype", "int8"), ()],
)  # fmt: skip
def test_explain_refuses_what_is_no_call(arguments):
    assert run("explain", *arguments).exit_code == 2


# cache


def test_cache_path_and_list(tmp_path):
    assert run("cache", "path").stdout.strip() == str(tmp_path / "cache")
    assert json.loads(run("cache", "path", "--json").stdout)["path"] == str(tmp_path / "cache")
    made = entry()
    (listed,) = json.loads(run("cache", "list", "--json").stdout)
    assert listed["path"] == str(made.path)
    assert listed["compiler"] == "nvrtc 13.0.88"
    shown = run("cache", "list")
    assert "sm_90-d512-bf16-f32-s2" in shown.stdout
    assert "1 entry, " in shown.stderr
    assert "0 min ago" in shown.stdout
    assert "bad" not in shown.stderr
    (made.path / "meta.json").write_text("{}")
    assert "1 bad left out" in run("cache", "list").stderr


def test_cache_list_says_where_entries_are(tmp_path, monkeypatch):
    entry()
    monkeypatch.setenv("FFPA_JIT_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path / "mine"))
    told = run("cache", "list").stderr.splitlines()
    assert told[0].startswith("1 entry, ")
    assert told[0].endswith(f", in {tmp_path / 'cache'} (read-only)")
    assert told[1] == f"0 entries, 0 B, in {tmp_path / 'mine'}"


@pytest.mark.parametrize(
    ("command", "what"), [("verify", "checked"), ("list", "listed"), ("prune", "removed"), ("clear", "removed")]
)
def test_a_cache_that_is_refused_is_an_error(tmp_path, command, what):
    entry()
    (tmp_path / "cache").chmod(0o775)
    done = run("cache", command, *(["--yes"] if command == "clear" else []))
    assert done.exit_code == 1
    assert f"{tmp_path / 'cache'} is not used: {tmp_path / 'cache'} can be written by other users" in done.stderr
    assert done.stderr.strip().endswith(f"; nothing was {what}")
    assert list((tmp_path / "cache" / "cuda").iterdir())


def test_cache_verify_finds_a_flipped_bit():
    made = entry()
    assert run("cache", "verify").exit_code == 0
    made.artefact.write_bytes(b"machine cod!")
    done = run("cache", "verify")
    assert done.exit_code == 1
    assert str(made.path) in done.stdout
    assert json.loads(run("cache", "verify", "--json").stdout)[0]["ok"] is False


def test_cache_prune_and_clear():
    entry()
    assert "removed 0 entries" in run("cache", "prune").stdout
    entry("sm_90-d320-bf16-f32-s2").artefact.write_bytes(b"machine cod!")
    assert "removed 1 entry" in run("cache", "prune").stdout
    assert len(default_cache().entries()) == 1
    assert run("cache", "prune", "--max-size", "big").exit_code == 2
    assert json.loads(run("cache", "prune", "--older-than", "30d", "--max-size", "2GB", "--json").stdout) == []
    assert "removed 1" in run("cache", "prune", "--max-size", "0").stdout
    entry()
    assert run("cache", "clear", input="n\n").exit_code == 1
    assert len(default_cache().entries()) == 1
    assert "removed 1" in run("cache", "clear", "--yes").stdout
    assert default_cache().entries() == []


def test_a_cache_is_carried_to_another_machine(tmp_path, monkeypatch):
    tar = tmp_path / "kernels.tar.gz"
    tar.write_bytes(b"an older export")
    done = run("cache", "export", tar)
    assert done.exit_code == 1
    assert f"nothing to export, so {tar} was not written" in done.stderr
    assert done.stdout == ""
    assert tar.read_bytes() == b"an older export"
    entry()
    entry("sm_90-d512-bf16-forward", "triton")
    assert "2 entries" in run("cache", "export", tar).stdout
    with tarfile.open(tar) as exported:
        assert len(exported.getnames()) == 4
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path / "elsewhere"))
    done = run("cache", "import", tar)
    assert done.exit_code == 0, done.output
    assert "imported 2 entries, into" in done.stdout
    assert "imported 0 entries, 2 were there already, into" in run("cache", "import", tar).stdout
    assert "note: sm_90-d512-bf16-forward" in done.stderr
    assert [each.artefact.read_bytes() for each in default_cache().entries()] == [b"machine code"] * 2


def test_what_is_no_export_is_not_imported(tmp_path):
    (tmp_path / "junk.tar").write_bytes(b"junk")
    done = run("cache", "import", tmp_path / "junk.tar")
    assert done.exit_code == 1
    assert "cannot be read as a tar file" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert run("cache", "import", tmp_path / "absent.tar").exit_code == 2
    assert run("cache", "export", tmp_path / "no" / "such" / "x.tar").exit_code == 1


# the program


@pytest.mark.parametrize("group", [(), ("cache",)])
def test_the_list_of_commands_is_not_cut_off(group):
    said = run(*group, "--help", terminal_width=80).stdout
    assert "Commands:" in said
    assert "..." not in said.replace("[ARGS]...", "")


def test_every_option_has_a_help_text():
    commands = [*main.commands.values(), *main.commands["cache"].commands.values()]
    assert not [(c.name, o.name) for c in commands for o in c.params if isinstance(o, click.Option) and not o.help]


def test_the_module_is_the_program():
    def module(*arguments):
        return subprocess.run([sys.executable, "-m", "ffpa_jit", *arguments], capture_output=True, text=True, cwd=ROOT)

    assert module("--version").stdout.startswith("ffpa-jit, version ")
    assert module("cache", "path").returncode == 0
    wrong = module("compile")
    assert wrong.returncode == 2
    assert "No such command" in wrong.stderr


# What the system or the package refuses is a message, never a traceback


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "prune", "--max-size", "9" * 400),
        ("explain", "--headdim", "512", "--heads", "10000000000000", "--arch", "sm_90"),
        ("cache", "import", "/"),
        ("cache", "export", "/dev/full"),
    ],
)
def test_an_error_is_a_message(arguments):
    entry()
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert "Error" in done.stderr


def test_export_leaves_what_is_no_file_alone(tmp_path):
    entry()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run("cache", "export", pipe).exit_code == 1
    assert pipe.is_fifo()


def test_decisions_made_without_a_kernel_are_made_anew_after_warm(compiled):
    before = plan_table.current()
    warming.warm(512, arch="sm_90", backend="cuda")
    assert plan_table.current() is not before
