from __future__ import annotations

import pytest

from slurm_elastic.agent.forkserver._fork_eligibility import early_setting, script_file


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "2"', "OMP_NUM_THREADS"),
        ("environ['OPENBLAS_NUM_THREADS']='2'  # few", "OPENBLAS_NUM_THREADS"),
        ('    os.environ["PYTORCH_JIT"] = str(0)', "PYTORCH_JIT"),
        ('os.environ.setdefault("TORCH_LOGS", "distributed")', "TORCH_LOGS"),
        ('os.putenv("TORCH_SHOW_CPP_STACKTRACES", "1")', "TORCH_SHOW_CPP_STACKTRACES"),
        ('os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL")', "TORCH_DISTRIBUTED_DEBUG"),
        ('os.environ.update({\n    "MKL_NUM_THREADS": "1",\n})', "MKL_NUM_THREADS"),
        ('os.environ |= {"KMP_AFFINITY": "none"}', "KMP_AFFINITY"),
        ('for name in ("GOTO_NUM_THREADS", "HOME"):\n    os.environ[name] = "1"', "GOTO_NUM_THREADS"),
        ("os.environ[sys.argv[1]] = 'INFO'", "ATEN_CPU_CAPABILITY"),
        ('os.environ[args.names["x"]] = "1"', "ATEN_CPU_CAPABILITY"),
    ],
)
def test_settings_are_found(text: str, name: str) -> None:
    source = f"import os\n{text}\nimport torch\n"
    found = early_setting(source, ["ATEN_CPU_CAPABILITY", "default"], {"OTHER": "1"})
    assert found is not None
    assert found[1] == name
    assert 1 < found[0] < 5


@pytest.mark.parametrize(
    "text",
    [
        'print(os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS"))',
        'if os.environ["OMP_NUM_THREADS"] == "2": pass',
        '# os.environ["OMP_NUM_THREADS"] = "2"',
        'os.environ["SAME"] = os.environ["OMP_NUM_THREADS"] = "1"',
        'os.environ.setdefault("OMP_NUM_THREADS", "2")',
        # Read by Python at its start, by libraries at their use, or by the C library when it is asked.
        'os.environ["PYTHONHASHSEED"] = "0"',
        'os.environ["TORCH_HOME"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["TORCH_NCCL_TRACE"] = "x"',
        'os.environ["TZ"] = os.environ["TOKENIZERS_PARALLELISM"] = "false"',
        "MKL_NUM_THREADS = 1",
    ],
)
def test_what_changes_nothing_is_no_setting(text: str) -> None:
    assert early_setting(f"import os\n{text}\n", ["ATEN_CPU_CAPABILITY"], {"OMP_NUM_THREADS": "1"}) is None


def test_script_file(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__main__.py", "package/part.py"):
        (tmp_path / name).touch()
    assert script_file(("-u", "train.py")) == "train.py"
    assert script_file(("-u", "package")) == "package/__main__.py"
    assert script_file(("-u", "-m", "package")) == "package/__main__.py"
    assert script_file(("-u", "-m", "package.part")) == "package/part.py"
    assert script_file(("-u", "-m", "json.tool")) is None
    assert script_file(("-u", "-c", "pass")) is None
