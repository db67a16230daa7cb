"""The kernel cache: one build a machine, whatever is killed, damaged, planted, full or not writable on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ffpa_jit import cache as cache_module
from ffpa_jit import settings
from ffpa_jit.cache import Built, Cache, Entry, Key, default_cache, files, lock
from tests.cpu import cache_worker
from tests.cpu.cache_worker import FIELDS, artefact_of

KEY = Key(**FIELDS)
GOOD = artefact_of(KEY.digest)
NVRTC = Key(**{**FIELDS, "compiler": "nvrtc 13.0.88"})
IS_ROOT = os.geteuid() == 0
STRANGER = 54321  # a uid without an entry in passwd


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    for name in ("FFPA_JIT_CACHE_DIR", "FFPA_JIT_CACHE_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class Builder:
    """A compiler of these tests; counts its runs."""

    def __init__(self, key: Key = KEY, data: bytes | None = None) -> None:
        self.runs, self.data = 0, artefact_of(key.digest) if data is None else data

    def __call__(self, directory: Path) -> Built:
        self.runs += 1
        (directory / "kernel.so").write_bytes(self.data)
        (directory / "kernel.o").write_bytes(b"left over")
        (directory / "build.log").write_text("compiling\n")
        return Built("kernel.so", {"flags": ["-O3"]})


class CompilerError(RuntimeError):
    log: Path | None = None


def never(directory: Path) -> Built:
    raise AssertionError("built although it was there")


def get(cache: Cache, key: Key = KEY, build=None) -> Entry:
    return cache.get(key, build or Builder(key), "the test kernel")


def start(**options) -> subprocess.Popen[str]:
    environment = {**os.environ, **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, cache_worker.__file__, json.dumps(options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment, cwd=options.pop("cwd", None),
    )  # fmt: skip


def result(worker: subprocess.Popen[str]) -> dict:
    out, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    return json.loads(out)


def until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tree(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*")}


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "root")


# An entry and its key.


def test_what_is_built_is_found_again_with_all_that_is_known_of_it(cache, tmp_path):
    builder = Builder()
    assert cache.find(KEY) is None
    assert not cache.root.exists()
    entry = get(cache, build=builder)
    assert entry.path == tmp_path / "root" / "cuda" / KEY.name
    assert KEY.name == f"sm_90-d512-bf16-f32-s4-{KEY.digest[:16]}"
    assert entry.artefact.read_bytes() == GOOD
    assert {each.name for each in entry.path.iterdir()} <= {"kernel.so", "meta.json", "build.log", ".last_used"}
    again = get(Cache(tmp_path / "root"), build=never)
    assert (again.path, again.meta, again.key) == (entry.path, entry.meta, KEY)
    assert cache.find(KEY) == again
    assert builder.runs == 1
    assert entry.meta["key"] == FIELDS
    assert (entry.meta["size"], entry.meta["sha256"]) == (len(GOOD), hashlib.sha256(GOOD).hexdigest())
    assert entry.meta["flags"] == ["-O3"]
    assert {"schema", "seconds", "created", "artefact"} <= set(entry.meta)
    assert not entry.read_only


def test_nobody_else_can_read_or_write_what_is_created_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        get(Cache(tmp_path / "new" / "root"))
    finally:
        os.umask(before)
    for path in ((tmp_path / "new"), *(tmp_path / "new").rglob("*")):
        if path.suffix != ".lock":  # filelock's, in a directory that only we can enter
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_everything_is_on_disk_before_the_entry_has_its_name(cache, monkeypatch):
    flushed, real_rename = [], os.rename

    def rename(source, target):
        assert {each.name for each in source.iterdir()} == {"kernel.so", "build.log", "meta.json"}
        assert set(flushed) == {source, *source.iterdir()}
        assert flushed[-1] == source
        flushed.clear()
        real_rename(source, target)

    monkeypatch.setattr(files, "sync", flushed.append)
    monkeypatch.setattr(os, "rename", rename)
    get(cache)
    assert flushed == [cache.root / "cuda"]


@pytest.mark.parametrize("field", ["group", "slug", "source", "compiler", *(f"spec.{name}" for name in FIELDS["spec"])])
def test_every_field_changes_the_key(field):
    fields = {**FIELDS, "spec": dict(FIELDS["spec"])}
    if field.startswith("spec."):
        value = fields["spec"][field[5:]]
        fields["spec"][field[5:]] = value + 1 if isinstance(value, int) else value + "x"
    else:
        fields[field] += "x"
    assert Key(**fields).digest != KEY.digest
    assert Key(**fields) != KEY


def test_the_schema_and_a_new_field_of_the_spec_change_the_key(monkeypatch):
    before = KEY.digest
    assert Key(**{**FIELDS, "spec": {**FIELDS["spec"], "extra": 0}}).digest != before
    monkeypatch.setattr("ffpa_jit.cache.entries.SCHEMA", 2)
    assert KEY.digest != before


def test_order_paths_locale_directory_and_hash_seed_do_not_change_the_key(tmp_path):
    assert Key(**{**FIELDS, "spec": dict(reversed(FIELDS["spec"].items()))}).digest == KEY.digest
    assert hash(Key(**FIELDS)) == hash(KEY)
    environments = [
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "HOME": "/"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "tr_TR.UTF-8", "CUDA_HOME": "/opt/cuda", "FFPA_JIT_CACHE_DIR": "/elsewhere"},
    ]
    workers = [start(environment=each, cwd=str(tmp_path)) for each in environments]
    answers = [result(worker) for worker in workers]
    assert {answer["digest"] for answer in answers} == {KEY.digest}
    assert not any(answer["torch"] for answer in answers), "the cache needs torch"


@pytest.mark.parametrize("bad", ["", "..", "a/b", ".hidden", "x" * 201, "white space", "new\nline"])
def test_a_key_that_is_no_file_name_is_refused(bad):
    with pytest.raises(ValueError, match="cannot name"):
        Key(**{**FIELDS, "slug": bad})
    with pytest.raises(ValueError, match="cannot name"):
        Key(**{**FIELDS, "group": bad or "locks"})


def test_a_cache_that_has_moved_still_hits(cache, tmp_path):
    get(cache)
    (tmp_path / "root").rename(tmp_path / "moved")
    assert get(Cache(tmp_path / "moved"), build=never).artefact.read_bytes() == GOOD
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    assert get(Cache(tmp_path / "copied"), build=never).artefact.read_bytes() == GOOD
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert get(Cache(tmp_path / "link"), build=never).root == tmp_path / "moved"


def test_alternatives_are_of_the_same_source_from_another_compiler(cache, tmp_path):
    prepared = Cache(tmp_path / "image")
    get(prepared, NVRTC)
    get(prepared, Key(**{**FIELDS, "source": "0" * 64, "compiler": "nvrtc 12.9.86"}))
    get(prepared, Key(**{**FIELDS, "slug": FIELDS["slug"] + "-x", "compiler": "nvrtc 12.9.86"}))
    cache = Cache(tmp_path / "root", [tmp_path / "image"])
    older = Key(**{**FIELDS, "compiler": "nvcc 12.9.86"})
    get(cache, older)
    get(cache)
    assert [(each.key, each.read_only) for each in cache.alternatives(KEY)] == [(NVRTC, True), (older, False)]
    (cache.alternatives(KEY)[0].artefact).write_bytes(b"damaged")
    assert [each.key for each in cache.alternatives(KEY)] == [older]


# Several processes.


@pytest.mark.parametrize("locked", [True, False])
def test_sixteen_processes_at_once_end_with_one_entry_and_the_same_bytes(tmp_path, locked):
    (tmp_path / "barrier").mkdir()
    options = {"root": str(tmp_path / "root"), "barrier": str(tmp_path / "barrier"), "no_lock": not locked}
    workers = [start(**options, seconds=0.3) for _ in range(16)]
    until(lambda: len(list((tmp_path / "barrier").glob("ready-*"))) == 16)
    (tmp_path / "barrier" / "go").touch()
    answers = [result(worker) for worker in workers]
    assert {answer["sha256"] for answer in answers} == {hashlib.sha256(GOOD).hexdigest()}
    assert {answer["path"] for answer in answers} == {str(tmp_path / "root" / "cuda" / KEY.name)}
    assert not any(answer["messages"] for answer in answers)
    builds = sum(answer["built"] for answer in answers)
    assert builds == 1 if locked else builds > 1
    assert os.listdir(tmp_path / "root" / "cuda") == [KEY.name]
    assert not list((tmp_path / "root").rglob(".tmp-*"))


def test_threads_build_once(cache):
    builder, entries = Builder(), []
    threads = [threading.Thread(target=lambda: entries.append(get(cache, build=builder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert builder.runs == 1
    assert len({entry.path for entry in entries}) == 1
    assert len(entries) == 8


@pytest.mark.parametrize("step", ["locked", "private", "half", "written", "synced", "renamed"])
def test_a_builder_killed_at_any_step_is_as_if_it_had_not_been(cache, tmp_path, step):
    worker = start(root=str(tmp_path / "root"), die=step)
    worker.communicate(timeout=60)
    assert worker.returncode == -signal.SIGKILL
    group, builder = tmp_path / "root" / "cuda", Builder()
    assert (group / KEY.name).exists() == (step == "renamed")
    assert bool(list(group.glob(".tmp-*"))) == (step not in ("locked", "renamed"))
    started = time.monotonic()
    assert get(cache, build=builder).artefact.read_bytes() == GOOD
    assert time.monotonic() - started < 2, "a dead process's lock was waited for"
    assert builder.runs == (step != "renamed")
    assert os.listdir(group) == [KEY.name]


def test_waiting_says_for_whom_and_does_not_build(cache, tmp_path, monkeypatch, warnings_seen):
    worker = start(root=str(tmp_path / "root"), seconds=1.6, building=str(tmp_path / "building"))
    until((tmp_path / "building").exists)
    monkeypatch.setattr(lock, "_PATIENCE", 0.5)
    assert get(cache, build=never).artefact.read_bytes() == GOOD
    assert result(worker)["built"] == 1
    (message,) = warnings_seen
    assert f"waiting for process {worker.pid} on {os.uname().nodename}" in message
    assert "building the test kernel since " in message
    assert f"{KEY.name}.lock" in message


def test_a_wait_that_takes_too_long_ends_in_a_build_of_ones_own(tmp_path, warnings_seen):
    worker = start(root=str(tmp_path / "root"), seconds=60, building=str(tmp_path / "building"))
    until((tmp_path / "building").exists)
    builder = Builder()
    try:
        entry = get(Cache(tmp_path / "root", wait=0.3), build=builder)
    finally:
        worker.kill()
        worker.communicate()
    assert builder.runs == 1
    assert entry.root == tmp_path / "root"
    assert f"process {worker.pid}" in warnings_seen[0]
    assert "going on without it" in warnings_seen[0]


LOCK_ERRORS = [OSError(number, os.strerror(number)) for number in (errno.ENOLCK, errno.ESTALE, errno.EBUSY)]


@pytest.mark.parametrize("error", [*LOCK_ERRORS, NotImplementedError("no flock")], ids=str)
def test_a_file_system_without_locks_is_built_on_all_the_same(cache, monkeypatch, error, warnings_seen):
    import filelock

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert get(cache).artefact.read_bytes() == GOOD
    assert cache.standby is None
    assert not warnings_seen


def test_a_lock_that_fails_at_its_release_does_no_harm_and_its_file_stays(cache, monkeypatch):
    import filelock

    release = filelock.FileLock.release

    def stale(self, *args, **kwargs):
        release(self, *args, **kwargs)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(filelock.FileLock, "release", stale)
    assert get(cache).artefact.read_bytes() == GOOD
    assert os.listdir(cache.root / "locks") == [f"cuda-{KEY.name}.lock"]


def test_what_others_left_behind_is_swept_and_what_runs_is_not(cache):
    get(cache, NVRTC)
    group = cache.root / "cuda"
    here, elsewhere = files.machine(), "0" * 12
    dead = subprocess.Popen(["true"])
    dead.wait()
    hours_ago = time.time() - 2 * 3600
    kept, gone = set(), set()
    for name, age, stays in [
        (f".tmp-{dead.pid}-{here}-00000001", time.time(), False),
        (f".tmp-{os.getppid()}-{here}-00000002", time.time(), True),
        (f".tmp-{os.getppid()}-{here}-00000003", hours_ago, True),  # the clocks may differ, or the machine have slept
        (f".tmp-{os.getppid()}-{here}-00000006", hours_ago - 24 * 3600, False),
        (f".tmp-{dead.pid}-{elsewhere}-00000004", time.time(), True),
        (f".tmp-{dead.pid}-{elsewhere}-00000005", hours_ago, False),
        (".tmp-not-ours", hours_ago, True),
    ]:
        (group / name).mkdir()
        (group / name / "kernel.so").touch()
        os.utime(group / name, (age, age))
        (kept if stays else gone).add(name)
    get(cache)
    assert {each.name for each in group.glob(".tmp-*")} == kept


# Damage, and what others have planted.


def _damage_truncated(entry: Path) -> None:
    with open(entry / "kernel.so", "r+b") as file:
        file.truncate(len(GOOD) // 2)


def _damage_flipped(entry: Path) -> None:
    data = bytearray(GOOD)
    data[1234] ^= 1
    (entry / "kernel.so").write_bytes(data)


def _damage_directory_instead(entry: Path) -> None:
    (entry / "kernel.so").unlink()
    (entry / "kernel.so").mkdir()


def _damage_link_instead(entry: Path) -> None:
    (entry / "kernel.so").rename(
        entry.parents[2] / "outside.so"
    )  # the right bytes, in a place that is not ours to judge
    (entry / "kernel.so").symlink_to(entry.parents[2] / "outside.so")


def _damage_pipe_instead(entry: Path) -> None:
    (entry / "kernel.so").unlink()
    os.mkfifo(entry / "kernel.so")


def _damage_no_artefact(entry: Path) -> None:
    (entry / "kernel.so").unlink()


def _damage_no_meta(entry: Path) -> None:
    (entry / "meta.json").unlink()


def _damage_half_a_meta(entry: Path) -> None:
    (entry / "meta.json").write_bytes((entry / "meta.json").read_bytes()[:100])


def _damage_meta_of_another_key(entry: Path) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    meta["key"]["compiler"] = "nvcc 12.0.0"
    (entry / "meta.json").write_text(json.dumps(meta))


def _damage_meta_of_another_kind(entry: Path) -> None:
    (entry / "meta.json").write_text("[1, 2]")


def _damage_artefact_elsewhere(entry: Path) -> None:
    (entry / "kernel.so").rename(entry.parents[2] / "outside.so")
    meta = json.loads((entry / "meta.json").read_text())
    meta["artefact"] = "../../../outside.so"
    (entry / "meta.json").write_text(json.dumps(meta))


def _damage_empty(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


def _damage_file_instead_of_entry(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(GOOD)


def _damage_link_instead_of_entry(entry: Path) -> None:
    entry.rename(entry.parents[2] / "outside")
    entry.symlink_to(entry.parents[2] / "outside")


def _damage_others_can_write_the_artefact(entry: Path) -> None:
    (entry / "kernel.so").chmod(0o666)


def _damage_others_can_write_meta(entry: Path) -> None:
    (entry / "meta.json").chmod(0o622)


def _damage_others_can_write_the_entry(entry: Path) -> None:
    entry.chmod(0o777)


def _damage_group_can_write_the_entry(entry: Path) -> None:
    entry.chmod(0o770)


def _damage_entry_of_another_user(entry: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root can give files away")
    os.chown(entry, STRANGER, -1)


def _damage_artefact_of_another_user(entry: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root can give files away")
    os.chown(entry / "kernel.so", STRANGER, -1)


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("_damage_")]
each_damage = pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__[8:])


@each_damage
def test_a_bad_entry_is_told_of_and_built_again(cache, damage, warnings_seen):
    entry = get(cache)
    damage(entry.path)
    builder = Builder()
    again = get(cache, build=builder)
    assert builder.runs == 1
    assert (again.path, again.artefact.read_bytes()) == (entry.path, GOOD)
    assert not again.path.is_symlink()
    assert cache.standby is None
    assert os.listdir(cache.root / "cuda") == [KEY.name]
    assert len(warnings_seen) == 1
    assert KEY.name in warnings_seen[0]
    assert get(cache, build=never).path == entry.path
    for outside in (cache.root.parent / "outside.so", cache.root.parent / "outside" / "kernel.so"):
        assert not outside.parent.exists() or not outside.exists() or outside.read_bytes() == GOOD


@each_damage
def test_a_bad_entry_in_a_read_only_root_is_passed_over_and_left_alone(tmp_path, damage, warnings_seen):
    entry = get(Cache(tmp_path / "image"))
    damage(entry.path)
    before = tree(tmp_path / "image")
    cache = Cache(tmp_path / "root", [tmp_path / "image"])
    found = get(cache)
    assert (found.root, found.read_only) == (tmp_path / "root", False)
    assert tree(tmp_path / "image") == before
    assert len(warnings_seen) == 1
    assert "passed over" in warnings_seen[0]


def test_a_good_entry_that_replaced_the_bad_one_meanwhile_is_not_thrown_away(cache, tmp_path, monkeypatch):
    entry = get(cache)
    _damage_flipped(entry.path)
    load = cache_module.Roots._look.__globals__["load"]

    def slow(path, root, read_only, **kwargs):
        try:
            return load(path, root, read_only, **kwargs)
        finally:  # judged; before it is moved away somebody else does all of this
            monkeypatch.setattr("ffpa_jit.cache.roots.load", load)
            get(Cache(tmp_path / "root"))

    monkeypatch.setattr("ffpa_jit.cache.roots.load", slow)
    assert cache.find(KEY) is None
    assert get(cache, build=never).artefact.read_bytes() == GOOD


def test_a_directory_that_others_can_write_is_refused_and_the_call_goes_on(tmp_path, warnings_seen):
    planted = get(Cache(tmp_path / "root"), build=Builder(data=b"planted")).root
    planted.chmod(0o777)
    cache, builder = Cache(planted), Builder()
    assert cache.find(KEY) is None
    entry = get(cache, build=builder)
    assert (builder.runs, entry.artefact.read_bytes()) == (1, GOOD)
    assert entry.root == cache.standby != planted
    assert stat.S_IMODE(cache.standby.stat().st_mode) == 0o700
    assert get(cache, build=never) == get(cache, build=never)
    get(cache, NVRTC)
    assert len(warnings_seen) == 1
    for part in (str(planted), "can be written by other users (mode 777", "FFPA_JIT_CACHE_DIR"):
        assert part in warnings_seen[0]
    assert os.listdir(planted / "cuda") == [KEY.name]


def test_a_group_directory_that_others_can_write_is_refused_too(cache):
    get(cache, build=Builder(data=b"planted"))
    (cache.root / "cuda").chmod(0o777)
    assert cache.find(KEY) is None
    assert cache.alternatives(NVRTC) == []
    assert get(cache).artefact.read_bytes() == GOOD
    assert cache.standby is not None


def test_a_directory_of_another_user_is_refused(cache, monkeypatch, warnings_seen):
    get(cache, build=Builder(data=b"planted"))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert cache.find(KEY) is None
    monkeypatch.setattr(files, "temporary_directory", lambda: pytest.skip("refused as it should be"))
    with contextlib.suppress(pytest.skip.Exception):
        get(cache)
        pytest.fail("used although it is another user's")
    assert f"belongs to uid {me}, not to uid {STRANGER}" in warnings_seen[0]


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_read_only_root_may_be_the_administrators_but_nobody_elses(tmp_path, warnings_seen):
    image = get(Cache(tmp_path / "image")).root
    os.chown(image, STRANGER, -1)
    assert Cache(None, [image]).find(KEY) is None
    assert "passed over" in warnings_seen[0]
    assert set(files.owners(read_only=True)) == {os.geteuid(), 0}
    assert set(files.owners()) == {os.geteuid()}


# Where nothing can be written.


def test_a_read_only_root_is_searched_first_and_never_written(tmp_path):
    image = get(Cache(tmp_path / "image")).root
    before = tree(image)
    cache = Cache(tmp_path / "root", [tmp_path / "none", image])
    entry = get(cache, build=never)
    assert (entry.root, entry.read_only) == (image, True)
    assert not (tmp_path / "root").exists()
    assert tree(image) == before
    assert get(cache, NVRTC).root == tmp_path / "root"


@pytest.fixture
def open_directory():
    """A directory that every user can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("fail", [False, True])
def test_a_root_that_cannot_be_written_is_replaced_until_the_process_ends(open_directory, fail):
    root = open_directory / "root"
    root.mkdir(0o700)
    who = {}
    if IS_ROOT:  # whom permissions do not stop
        scratch = open_directory / "scratch"
        scratch.mkdir()
        scratch.chmod(0o777)
        who = {"uid": STRANGER, "scratch": str(scratch)}
        os.chown(root, STRANGER, STRANGER)
    root.chmod(0o500)
    workers = [start(root=str(root), fail=fail, **who) for _ in range(2)]
    answers = [result(worker) for worker in workers]
    for answer in answers:
        assert answer["built"] == 1
        (message,) = answer["messages"]
        assert "Permission denied" in message
        assert answer["standby"] is not None
        if fail:  # the error names the log, so the log stays
            assert answer["error"] == "compiler failed"
            assert tree(Path(answer["standby"])) == {"failed", f"failed/{KEY.name}.log"}
            shutil.rmtree(answer["standby"])
        else:
            assert answer["path"].startswith(answer["standby"])
            assert answer["sha256"] == hashlib.sha256(GOOD).hexdigest()
            assert not Path(answer["standby"]).exists()
    assert os.listdir(root) == []


def test_no_home_and_no_entry_in_passwd_still_works(monkeypatch, warnings_seen):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    cache = default_cache()
    assert cache.root is None
    assert get(cache).root == cache.standby
    assert get(cache, build=never).root == cache.standby
    assert len(warnings_seen) == 1
    assert "there is no home directory" in warnings_seen[0]
    with pytest.raises(OSError, match="no home directory"):
        cache.import_(Path("any.tar"))


def test_an_older_platformdirs_that_leaves_the_tilde_is_understood(monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: "~/.cache/ffpa-jit")
    assert default_cache().root is None


def test_a_home_that_does_not_exist_is_made_or_done_without(tmp_path, monkeypatch, warnings_seen):
    assert get(default_cache()).root == tmp_path / "home" / ".cache" / "ffpa-jit"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    cache = default_cache()
    assert get(cache).root == cache.standby
    assert len(warnings_seen) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "ffpa-jit-test", str(path)]
    if not IS_ROOT or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("says", [OSError, RuntimeError])
def test_a_full_disk_is_done_without(small_disk, says, warnings_seen):
    cache, runs = Cache(small_disk / "root"), []

    def build(directory: Path) -> Built:
        runs.append(directory)
        try:
            (directory / "kernel.so").write_bytes(bytes(1 << 17))
        except OSError as error:  # as the operating system says it, or as a compiler does
            raise error if says is OSError else RuntimeError("compiler: internal error") from None
        return Built("kernel.so")

    entry = cache.get(KEY, build, "the test kernel")
    assert entry.artefact.read_bytes() == bytes(1 << 17)
    assert entry.root == cache.standby
    assert [str(each).startswith(str(small_disk)) for each in runs] == [True, False]
    assert len(warnings_seen) == 1
    assert "no space is left" in warnings_seen[0]
    assert not list((small_disk / "root" / "cuda").iterdir())


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_an_error_of_the_file_system_while_publishing_is_done_without(cache, monkeypatch, call, number, warnings_seen):
    real, root, hits = getattr(os, call), str(cache.root / "cuda"), []
    names: dict[int, str] = {}
    real_open = os.open

    def opened(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        names[descriptor] = str(path)
        return descriptor

    def failing(what, *args, **kwargs):
        if (
            names.get(what, "").startswith(root)
            if isinstance(what, int)
            else ".tmp-" in str(what) and str(what).startswith(root)
        ):
            hits.append(what)
            raise OSError(number, os.strerror(number), str(what))
        return real(what, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, call, failing)
    entry = get(cache)
    assert hits
    assert entry.root == cache.standby
    assert entry.artefact.read_bytes() == GOOD
    assert len(warnings_seen) == 1
    monkeypatch.undo()
    assert list((cache.root / "cuda").iterdir()) == []


def test_where_nothing_at_all_can_be_written_the_error_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(OSError, match="set FFPA_JIT_CACHE_DIR"):
        get(Cache(None))


def test_a_temporary_root_of_a_killed_process_goes_after_an_hour(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    fates = {
        f"ffpa-jit.tmp-{dead.pid}-{files.machine()}-00000001-x": (7200, False),
        f"ffpa-jit.tmp-{dead.pid}-{files.machine()}-00000002-x": (60, True),
        f"ffpa-jit.tmp-{os.getppid()}-{files.machine()}-00000003-x": (7200, True),
        f"ffpa-jit.tmp-{dead.pid}-{'0' * 12}-00000004-x": (7200, True),
    }
    for name, (age, _) in fates.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    cache = Cache(None)
    get(cache)
    assert cache.standby.parent == tmp_path
    assert {each.name for each in tmp_path.iterdir()} == {
        cache.standby.name, *(name for name, (_, stays) in fates.items() if stays)
    }  # fmt: skip


# Builds that fail.


def test_a_failed_build_leaves_its_log_and_nothing_else(cache):
    def build(directory: Path) -> Built:
        (directory / "kernel.so").write_bytes(b"half")
        (directory / "build.log").write_text("error: no")
        raise CompilerError("compiler failed")

    with pytest.raises(CompilerError) as caught:
        get(cache, build=build)
    assert caught.value.log == cache.root / "failed" / f"{KEY.name}.log"
    assert caught.value.log.read_text() == "error: no"
    assert list((cache.root / "cuda").iterdir()) == []
    assert cache.standby is None
    get(cache)
    assert not caught.value.log.exists()


@pytest.mark.parametrize("name", ["missing.so", "../kernel.so", "meta.json", ""])
def test_a_build_that_leaves_no_artefact_is_an_error(cache, name):
    with pytest.raises(RuntimeError, match="left no file"):
        get(cache, build=lambda directory: Built(name))
    assert list((cache.root / "cuda").iterdir()) == []


def test_an_interrupted_build_leaves_nothing(cache):
    def interrupted(directory: Path) -> Built:
        (directory / "kernel.so").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(cache, build=interrupted)
    assert list((cache.root / "cuda").iterdir()) == []
    assert get(cache).artefact.read_bytes() == GOOD


# Looking after it.


def _aged(cache: Cache, hours: dict[str, float]) -> dict[str, Entry]:
    entries = {}
    for name, age in hours.items():
        entry = entries[name] = get(cache, Key(**{**FIELDS, "slug": name}))
        cache.find(entry.key)
        then = time.time() - age * 3600
        for each in (entry.path / ".last_used", entry.path / "meta.json"):
            os.utime(each, (then, then))
    return entries


def test_a_use_is_noted_at_most_once_an_hour(cache):
    entry = _aged(cache, {"old": 5.0})["old"]
    cache.find(entry.key)
    assert time.time() - entry.last_used < 60
    then = time.time() - 1800
    for each in (entry.path / ".last_used", entry.path / "meta.json"):
        os.utime(each, (then, then))
    cache.find(entry.key)
    assert entry.last_used == pytest.approx(then, abs=1)


def test_prune_removes_by_age_then_the_longest_unused_and_what_is_bad(cache, tmp_path):
    entries = _aged(cache, {"a": 1.0, "b": 30.0, "c": 3.0, "d": 2.0, "bad": 0.0})
    (entries["bad"].path / "meta.json").unlink()
    image = Cache(tmp_path / "image")
    get(image)
    cache = Cache(tmp_path / "root", [image.root])
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = cache.root / "cuda" / f".tmp-{dead.pid}-{files.machine()}-00000001"
    left.mkdir()
    removed = cache.prune(older_than=24 * 3600)
    assert set(removed) == {entries["b"].path, entries["bad"].path}
    assert all(size > 0 for size in removed.values())
    assert not left.exists()
    size = entries["a"].disk_bytes
    assert size >= len(GOOD)
    assert set(cache.prune(max_bytes=2 * size)) == {entries["c"].path}
    assert cache.prune(max_bytes=2 * size, older_than=24 * 3600) == {}
    assert {each.path.name for each in cache.entries()} == {KEY.name, entries["a"].path.name, entries["d"].path.name}
    assert set(cache.clear()) == {entries["a"].path, entries["d"].path}
    assert [each.root for each in cache.entries()] == [image.root]
    assert list((cache.root / "locks").glob("*.lock"))


def test_verify_tells_what_is_wrong_and_removes_nothing(cache):
    good, bad = get(cache), get(cache, NVRTC)
    (bad.path / "kernel.so").write_bytes(b"x" * bad.meta["size"])
    before = tree(cache.root)
    verdicts = dict(cache.verify())
    assert verdicts[good.path] is None
    assert "sha256" in verdicts[bad.path]
    assert tree(cache.root) == before


def test_notes_are_kept_and_a_damaged_or_planted_one_is_none(cache, tmp_path):
    assert cache.note("version") is None
    assert not cache.root.exists()
    cache.remember("version", ["13.0.88", "build"])
    assert Cache(tmp_path / "root").note("version") == ["13.0.88", "build"]
    note = cache.root / "notes" / "version.json"
    note.chmod(0o666)
    assert cache.note("version") is None
    note.chmod(0o600)
    note.write_text("{")
    assert cache.note("version") is None
    assert cache.entries() == []
    Cache(None).remember("version", 1)
    Cache(Path("/proc/nowhere")).remember("version", 1)


def test_export_and_import_carry_entries_to_a_machine_without_a_compiler(cache, tmp_path):
    get(cache)
    get(cache, NVRTC)
    for name in ("all.tar", "all.tar.gz"):
        assert {each.key for each in cache.export(tmp_path / name)} == {KEY, NVRTC}
        there = Cache(tmp_path / f"there-{name}")
        assert {each.key for each in there.import_(tmp_path / name)} == {KEY, NVRTC}
        assert get(there, build=never).artefact.read_bytes() == GOOD
        assert get(there, NVRTC, build=never).meta == cache.find(NVRTC).meta
        known = []
        assert there.import_(tmp_path / name, known) == []
        assert len(known) == 2
        assert set(os.listdir(there.root)) == {"cuda"}
    (there.find(KEY).artefact).write_bytes(b"damaged")
    assert [each.key for each in there.import_(tmp_path / "all.tar")] == [KEY]
    only = cache.export(tmp_path / "one.tar", [cache.find(NVRTC)])
    assert [each.key for each in only] == [NVRTC]
    with tarfile.open(tmp_path / "one.tar") as tar:
        assert {Path(name).parts[1] for name in tar.getnames()} == {NVRTC.name}


@pytest.mark.parametrize("change", [{"compiler": ["nvcc"]}, {"source": 1}, {"spec": {"arch": None}}, {"slug": 5}])
def test_a_key_of_other_types_is_none(change):
    with pytest.raises((TypeError, ValueError)):
        Key(**{**KEY.fields(), **change})


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_a_damaged_compressed_tar_is_a_value_error(cache, tmp_path, suffix):
    import gzip
    import lzma

    get(cache)
    cache.export(tmp_path / "all.tar")
    whole = {"gz": gzip, "xz": lzma}[suffix].compress((tmp_path / "all.tar").read_bytes())
    damaged = tmp_path / f"damaged.tar.{suffix}"
    for at in range(20, len(whole), 7):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):
            Cache(tmp_path / "there").import_(damaged)


def test_a_tar_of_very_many_files_is_refused(cache, tmp_path):
    with tarfile.open(tmp_path / "many.tar", "w") as tar:
        for i in range(20_001):
            tar.addfile(tarfile.TarInfo(f"cuda/entry-{i}/kernel.so"))
    with pytest.raises(ValueError, match="files"):
        cache.import_(tmp_path / "many.tar")


def test_a_bad_entry_is_not_exported(cache, tmp_path):
    _damage_flipped(get(cache).path)
    assert cache.export(tmp_path / "all.tar") == []
    assert not (tmp_path / "all.tar").exists()


def _member(name: str, data: bytes = b"x", **fields) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


HOSTILE = {
    "absolute": lambda name: _member("/tmp/evil"),
    "upwards": lambda name: _member(f"cuda/{name}/../../../evil"),
    "upwards-short": lambda name: _member("cuda/../evil"),
    "deep": lambda name: _member(f"cuda/{name}/sub/evil"),
    "top": lambda name: _member("evil"),
    "hidden": lambda name: _member(f"cuda/{name}/.last_used"),
    "symlink": lambda name: _member(f"cuda/{name}/link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard-link": lambda name: _member(f"cuda/{name}/link", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": lambda name: _member(f"cuda/{name}/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "pipe": lambda name: _member(f"cuda/{name}/pipe", b"", type=tarfile.FIFOTYPE),
    "twice": lambda name: _member(f"cuda/{name}/kernel.so"),
    "extra-file": lambda name: _member(f"cuda/{name}/extra.so"),
    "no-meta": lambda name: _member("cuda/other-0123456789abcdef/kernel.so"),
    "other-group": lambda name: _member(f"triton/{name}/kernel.so"),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_tar_that_was_not_exported_is_refused_whole(cache, tmp_path, hostile):
    entry = get(cache)
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for each in ("build.log", "kernel.so", "meta.json"):
            tar.add(entry.path / each, f"cuda/{KEY.name}/{each}")
        member, data = HOSTILE[hostile](KEY.name)
        tar.addfile(member, io.BytesIO(data))
    there = Cache(tmp_path / "there")
    with pytest.raises(ValueError, match=r"bad\.tar"):
        there.import_(tmp_path / "bad.tar")
    assert there.entries() == []
    assert not [each for each in tree(tmp_path / "there") if each != "cuda"]
    assert not (tmp_path / "evil").exists()
    assert not Path("/tmp/evil").exists()


def test_a_damaged_or_missing_tar_is_refused(cache, tmp_path):
    get(cache)
    cache.export(tmp_path / "all.tar")
    data = (tmp_path / "all.tar").read_bytes()
    at = data.index(GOOD) + 100
    there = Cache(tmp_path / "there")
    for bad in (data[:at] + b"!" + data[at + 1 :], data[: len(GOOD) // 2], b"no tar"):
        (tmp_path / "bad.tar").write_bytes(bad)
        with pytest.raises(ValueError, match=r"bad\.tar"):
            there.import_(tmp_path / "bad.tar")
    with pytest.raises(FileNotFoundError):
        there.import_(tmp_path / "none.tar")
    assert there.entries() == []
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        Cache(tmp_path / "shared").import_(tmp_path / "all.tar")


# The settings.


def test_the_default_cache_follows_the_settings(tmp_path, monkeypatch):
    assert default_cache().root == tmp_path / "home" / ".cache" / "ffpa-jit"
    assert default_cache() is default_cache()
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("FFPA_JIT_CACHE_PATH", os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    cache = default_cache()
    assert (cache.root, cache.search) == (tmp_path / "mine", (tmp_path / "a", tmp_path / "b"))
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", "~/cache")
    assert settings.cache_dir() == tmp_path / "home" / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", "relative")
    assert settings.cache_dir() == tmp_path / "relative"
    assert tree(tmp_path) == set()
