"""The stub libraries: generated from the wheel of this environment, loaded into real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from proxy_runtime.rank.stubs import elf, generate, wheel  # noqa: E402

_TORCH = Path(torch.__file__).parent
_SEARCH = [Path(p) for p in sys.path if p and Path(p).is_dir()]

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA build of torch")


@pytest.fixture(scope="module")
def found() -> wheel.Wheel:
    return wheel.inspect(_TORCH, _SEARCH)


@pytest.fixture(scope="module")
def stubs(found: wheel.Wheel, tmp_path_factory: pytest.TempPathFactory) -> list[generate.Stub]:
    return generate.generate(found, tmp_path_factory.mktemp("stubs"))


def run(stubs: list[generate.Stub], program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` in a process that has the stubs, as a rank has them; ``answer(x)`` in it prints JSON."""
    preamble = f"""
        import ctypes, json, os
        for path in {[str(s.path) for s in stubs]!r}:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        runtime = ctypes.CDLL("libcudart.so.13", mode=os.RTLD_NOLOAD)
        runtime.ergo_stub_refused_count.restype = ctypes.c_ulong
        runtime.ergo_stub_last_refused.restype = ctypes.c_char_p
        def answer(**values): print(json.dumps(values, default=str))
    """
    code = textwrap.dedent(preamble) + textwrap.dedent(program)
    env = {"PATH": "/usr/bin:/bin", "TORCH_DISABLE_NATIVE_JIT": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=env, check=False
    )


def answers(stubs: list[generate.Stub], program: str, **environment: str) -> dict:
    done = run(stubs, program, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_export_that_torch_binds_to_is_there(found: wheel.Wheel, stubs: list[generate.Stub]) -> None:
    made = {s.soname: {x.name for x in elf.read(s.path).exports()} for s in stubs}
    for library in found.libraries:
        wanted = {s.name for s in library.exports if s.name in library.imported and not s.name.startswith("_ZNSt")}
        assert wanted <= made[library.soname], library.soname


def test_soname_versions_and_sizes_are_those_of_the_real_library(
    found: wheel.Wheel, stubs: list[generate.Stub]
) -> None:
    made = {s.soname: elf.read(s.path) for s in stubs}
    for library in found.libraries:
        real = {s.name: s for s in library.exports}
        for symbol in made[library.soname].exports():
            if symbol.name.startswith("ergo_stub_"):
                continue
            assert symbol.version == real[symbol.name].version
            if symbol.kind is elf.Kind.OBJECT:
                assert symbol.size == real[symbol.name].size


def test_no_stub_defines_a_name_of_the_c_or_cxx_library(stubs: list[generate.Stub]) -> None:
    for stub in stubs:
        names = {s.name for s in elf.read(stub.path).exports()}
        assert not names & {"malloc", "memcpy", "dgemm_", "fftw_execute", "_ZSt4cout"}
        assert not any(n.startswith("_ZNSt") for n in names), stub.soname


def test_file_names_do_not_make_torch_load_the_real_libraries(stubs: list[generate.Stub]) -> None:
    assert not [s.path for s in stubs if "libcudart.so" in s.path.name]


def test_stubs_are_small(stubs: list[generate.Stub]) -> None:
    assert sum(s.path.stat().st_size for s in stubs) < 2 << 20


def test_torch_sees_a_device_and_nothing_of_nvidia_is_mapped(stubs: list[generate.Stub]) -> None:
    got = answers(
        stubs,
        """
        import torch
        p = torch.cuda.get_device_properties(0)
        s = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(s):
            e, f = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e.record(); f.record()
        s.wait_event(e); s.synchronize(); torch.cuda.synchronize()
        answer(available=torch.cuda.is_available(), count=torch.cuda.device_count(), name=p.name,
               capability=torch.cuda.get_device_capability(), elapsed=e.elapsed_time(f), done=f.query(),
               priority=s.priority, pinned=torch.empty(8).pin_memory().is_pinned(), pageable=torch.empty(8).is_pinned(),
               mapped=[l for l in open("/proc/self/maps") if "/nvidia/" in l],
               refused=runtime.ergo_stub_refused_count())
        """,
    )
    assert got["available"] is True and got["count"] == 1
    assert got["name"] == "Ergosphere device" and got["capability"] == [9, 0]
    assert got["elapsed"] >= 0 and got["done"] is True and got["priority"] == -1
    assert got["pinned"] is True and got["pageable"] is False
    assert got["mapped"] == [] and got["refused"] == 0


def test_number_of_devices_is_taken_from_the_environment(stubs: list[generate.Stub]) -> None:
    program = "import torch\nanswer(n=torch.cuda.device_count())"
    assert answers(stubs, program, ERGO_STUB_DEVICES="3") == {"n": 3}
    assert answers(stubs, program, ERGO_STUB_DEVICES="0") == {"n": 0}


def test_versions_are_those_of_the_real_libraries(stubs: list[generate.Stub]) -> None:
    got = answers(
        stubs,
        """
        import torch
        version = ctypes.c_int()
        runtime.cudaRuntimeGetVersion(ctypes.byref(version))
        answer(nccl=torch.cuda.nccl.version(), cudnn=torch.backends.cudnn.version(),
               sparse=torch.backends.cusparselt.version(), cuda=version.value)
        """,
    )
    real = {
        package: tuple(int(n) for n in metadata.version(f"nvidia-{package}-cu13").split(".")[:3])
        for package in ("nccl", "cudnn", "cusparselt")
    }
    assert tuple(got["nccl"]) == real["nccl"]
    major, minor, patch = real["cudnn"]
    assert got["cudnn"] == major * 10000 + minor * 100 + patch
    major, minor, patch = real["cusparselt"]
    assert got["sparse"] == major * 1000 + minor * 100 + patch
    assert f"{got['cuda'] // 1000}.{got['cuda'] % 1000 // 10}" == torch.version.cuda


def test_a_refused_launch_raises_is_counted_and_stays(stubs: list[generate.Stub]) -> None:
    got = answers(
        stubs,
        """
        import torch
        def error(f):
            try: f()
            except Exception as e: return f"{type(e).__name__}: {e}"
        first = error(lambda: torch.cuda._sleep(1))
        count = runtime.ergo_stub_refused_count()
        later = error(torch.cuda.synchronize)
        answer(first=first, count=count, name=runtime.ergo_stub_last_refused().decode(), later=later,
               op=error(lambda: torch.empty(4, device="cuda") + 1))
        """,
    )
    assert got["count"] >= 1 and "LaunchKernel" in got["name"]
    assert "AcceleratorError" in got["first"] and got["name"] in got["first"]
    assert got["later"] and "Ergosphere refused" in got["later"]
    assert got["op"] and "Ergosphere refused" in got["op"]


def test_sync_and_memory_hooks_are_called(stubs: list[generate.Stub]) -> None:
    got = answers(
        stubs,
        """
        import torch
        calls = []
        sync = ctypes.CFUNCTYPE(None)(lambda: calls.append(1))
        S = ctypes.POINTER(ctypes.c_size_t)
        @ctypes.CFUNCTYPE(None, S, S)
        def memory(free, total): free[0], total[0] = 5 << 20, 7 << 20
        runtime.ergo_stub_set_sync(sync); runtime.ergo_stub_set_memory(memory)
        torch.cuda.synchronize(); torch.cuda.current_stream().synchronize()
        e = torch.cuda.Event(); e.record(); e.synchronize()
        n = len(calls)
        torch.cuda.current_stream().query(); e.query()
        answer(n=n, queried=len(calls), memory=torch.cuda.mem_get_info())
        runtime.ergo_stub_set_sync(None); runtime.ergo_stub_set_memory(None)
        """,
    )
    assert got == {"n": 3, "queried": 3, "memory": [5 << 20, 7 << 20]}


def test_a_device_library_call_ends_the_process_with_one_sentence(stubs: list[generate.Stub]) -> None:
    done = run(stubs, 'ctypes.CDLL("libcublas.so.13", mode=os.RTLD_NOLOAD).cublasCreate_v2(None)')
    assert done.returncode == -6
    assert done.stderr.startswith("ergosphere: cublasCreate_v2 of libcublas.so.13 was called in a rank;")
    assert done.stderr.count("\n") == 1


def test_abort_mode_names_the_refused_call(stubs: list[generate.Stub]) -> None:
    done = run(stubs, "runtime.ergo_stub_set_abort(1)\nruntime.cudaGraphLaunch(None, None)")
    assert done.returncode == -6 and "Ergosphere refused cudaGraphLaunch" in done.stderr


def test_driver_gives_its_own_functions_and_counts_with_the_runtime(stubs: list[generate.Stub]) -> None:
    got = answers(
        stubs,
        """
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        p, none, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        ok = driver.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(p), 13000, ctypes.c_uint64(0), ctypes.byref(status))
        missing = driver.cuGetProcAddress_v2(b"cuNoSuch", ctypes.byref(none), 13000, ctypes.c_uint64(0), None)
        before = runtime.ergo_stub_refused_count()
        refused = driver.cuLaunchKernel()
        answer(init=driver.cuInit(0), ok=ok, same=p.value == ctypes.cast(driver.cuMemAlloc_v2, ctypes.c_void_p).value,
               missing=missing, refused=refused, before=before, after=runtime.ergo_stub_refused_count(),
               last=runtime.ergo_stub_last_refused().decode())
        """,
    )
    assert (got["init"], got["ok"], got["missing"], got["refused"]) == (0, 0, 500, 801)
    assert got["same"] is True
    assert (got["before"], got["after"], got["last"]) == (0, 1, "cuLaunchKernel")


def test_triton_finds_its_target_through_the_stub(stubs: list[generate.Stub], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    got = answers(
        stubs,
        """
        import torch, triton
        target = triton.runtime.driver.active.get_current_target()
        answer(backend=target.backend, arch=target.arch, refused=runtime.ergo_stub_refused_count())
        """,
        TRITON_LIBCUDA_PATH=str(stubs[0].path.parent / "link"),
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert got == {"backend": "cuda", "arch": 90, "refused": 0}


def test_cpu_only_wheel_has_nothing_to_stub(tmp_path: Path) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    lines: list[str] = []
    none = wheel.inspect(tmp_path / "torch", [tmp_path])
    assert none.is_cpu_only
    assert generate.generate(none, tmp_path / "out", progress=lines.append) == []
    assert "CPU-only" in lines[0] and not (tmp_path / "out").exists()


def test_wheel_of_another_cuda_is_refused_in_a_sentence(tmp_path: Path) -> None:
    lib = tmp_path / "torch/lib"
    lib.mkdir(parents=True)
    (tmp_path / "x.c").write_text("int x;")
    command = ["gcc", "-shared", "-fPIC", tmp_path / "x.c"]
    cudart = tmp_path / "libcudart.so.12"
    subprocess.run([*command, "-Wl,-soname,libcudart.so.12", "-o", cudart], check=True)
    subprocess.run([*command, cudart, "-Wl,--no-as-needed", cudart, "-o", lib / "libtorch_cuda.so"], check=True)
    with pytest.raises(wheel.StubError) as caught:
        wheel.inspect(tmp_path / "torch", [tmp_path])
    assert caught.value.code == "stubs.cuda-major" and "CUDA 12" in caught.value.message


def test_missing_nvidia_package_is_named() -> None:
    with pytest.raises(wheel.StubError) as caught:
        wheel.inspect(_TORCH, [])
    assert caught.value.code == "stubs.library-missing" and "libcudart.so.13" in caught.value.message


def test_damaged_elf_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"not an elf file at all", b"\x7fELF\x02\x01" + b"\xff" * 100):
        path = tmp_path / "x.so"
        path.write_bytes(content)
        with pytest.raises(ValueError):
            elf.read(path)
