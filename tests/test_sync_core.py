"""tools/sync_core.py on small throw-away trees, run as a user runs it: by its command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "sync_core.py"

RUNTIME = "LIMIT = 3\n\n\ndef device():\n    import platform\n\n    return platform.machine()"  # lazy imports are fine
CACHE = "class Layer:\n    size = LIMIT"


def block(name, body, canonical="run.py"):
    return f"# >>> core:{name} (canonical: {canonical})\n{body}\n# <<< core:{name}\n"


def header(*requirements, extra=""):
    toml = f"dependencies = {list(requirements)}\n{extra}"
    return "# /// script\n" + "".join(f"# {line}".rstrip() + "\n" for line in toml.splitlines()) + "# ///\n"


def sync(root, *options):
    command = [sys.executable, "-I", "-S", str(TOOL), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def fault(root):
    """What the tool says about a tree with a fault that --fix cannot heal."""
    result = sync(root, "--fix")
    assert (result.returncode, result.stdout) == (1, ""), result
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def tree(tmp_path):
    """Writes files and returns the root. run.py is canonical, eval.py carries copies of its blocks."""

    def write(**changed):
        files = {
            "run.py": "import os\n\n" + block("runtime", RUNTIME) + "\n" + block("cache", CACHE) + "\nargs = os.name\n",
            "eval.py": '"""Doc."""\n\n' + block("runtime", RUNTIME) + "\n" + block("cache", CACHE) + "\n\nmain = 1\n",
        }
        for name, text in (files | changed).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(text.encode("utf-8"))
        return tmp_path

    return write


def test_this_repository_is_in_sync():
    result = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(": in sync\n")


def test_in_sync(tree):
    result = sync(tree())
    assert (result.returncode, result.stdout, result.stderr) == (0, "2 blocks, 2 copies in 2 scripts: in sync\n", "")


def test_empty_tree_is_in_sync(tmp_path):
    assert sync(tmp_path).stdout == "0 blocks, 0 copies in 0 scripts: in sync\n"


@pytest.mark.parametrize("options", [["--unknown"], ["--root", "no/such/folder"], ["a_file.py"]])
def test_usage_errors_exit_2(tree, options):
    result = sync(tree(), *options)
    assert (result.returncode, result.stdout) == (2, "")


def test_drift_is_shown_as_a_diff_with_the_command_that_heals_it(tree):
    root = tree(**{"eval.py": block("runtime", RUNTIME.replace("3", "4"))})
    before = (root / "eval.py").read_bytes()
    result = sync(root)
    assert result.returncode == 1
    assert "--- eval.py:1: core:runtime\n+++ run.py:3: core:runtime\n" in result.stderr
    assert "-LIMIT = 4\n+LIMIT = 3\n" in result.stderr
    assert f"python tools/sync_core.py --fix --root {root}" in result.stderr
    assert (root / "eval.py").read_bytes() == before


def test_one_trailing_space_is_drift(tree):
    assert sync(tree(**{"eval.py": block("runtime", RUNTIME.replace("= 3", "= 3 "))})).returncode == 1


def test_fix_heals_every_copy_and_nothing_else(tree):
    head, between, tail = "#!/usr/bin/env python\n", "\n\x0c\n# é\u2028 \n", "\n\nTAIL = 1  # no newline after this"
    old = head + block("runtime", "LIMIT = 4") + between + block("cache", CACHE + "\n    more = 1\n\n") + tail
    new = head + block("runtime", RUNTIME) + between + block("cache", CACHE) + tail
    root = tree(**{"eval.py": old, "own.py": "x=1"})
    (root / "eval.py").chmod(0o755)
    untouched = {name: os.stat(root / name).st_mtime_ns for name in ("run.py", "own.py")}

    result = sync(root, "--fix")
    assert result.stdout == "eval.py: rewritten\n2 blocks, 2 copies in 2 scripts: in sync\n"
    assert result.returncode == 0
    assert (root / "eval.py").read_bytes() == new.encode("utf-8")
    assert (root / "eval.py").stat().st_mode & 0o777 == 0o755
    assert {name: os.stat(root / name).st_mtime_ns for name in untouched} == untouched
    assert sorted(path.name for path in root.iterdir()) == ["eval.py", "own.py", "run.py"]

    again = sync(root, "--fix")
    assert (again.returncode, again.stdout) == (0, "2 blocks, 2 copies in 2 scripts: in sync\n")


def test_fix_fills_an_empty_copy_whose_marker_ends_the_file(tree):
    root = tree(**{"eval.py": "# >>> core:cache (canonical: run.py)\n# <<< core:cache"})
    assert sync(root, "--fix").returncode == 0
    assert (root / "eval.py").read_text() == block("cache", CACHE).rstrip("\n")


OPENED, CLOSED = "# >>> core:cache (canonical: run.py)\n", "# <<< core:cache\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPENED + CACHE, "eval.py:1: core:cache is never closed"),
        (CLOSED, "eval.py:1: core:cache is closed but not open"),
        (block("runtime", block("cache", CACHE)), "eval.py:2: core:cache opens inside core:runtime"),
        (OPENED + "# <<< core:runtime\n", "eval.py:2: core:runtime is closed but not open"),
        (2 * block("cache", CACHE), "eval.py: has blocks cache, cache; each stands once, in the order runtime, prompt"),
        (block("cache", CACHE) + block("runtime", RUNTIME), "eval.py: has blocks cache, runtime; each stands once"),
        (block("utils", CACHE), "eval.py:1: malformed marker or unknown block: # >>> core:utils (canonical: run.py)"),
        (OPENED.replace(" (", "("), "eval.py:1: malformed marker"),
        ("if 1:\n    " + OPENED, "eval.py:2: malformed marker"),
        (block("cache", CACHE, canonical="gone.py"), "core:cache names several canonical files: gone.py, run.py"),
        (block("metrics", "x = 1", canonical="gone.py"), "core:metrics: its canonical file gone.py is missing or does"),
        (block("metrics", "x = 1"), "core:metrics: its canonical file run.py is missing or does not hold the block"),
        (block("metrics", "import os", "eval.py"), "eval.py:2: import inside core:metrics"),
        (block("metrics", "try:\n    from os import path\nfinally:\n    pass", "eval.py"), "eval.py:3: import inside"),
        (block("metrics", "class A:\n    import os", "eval.py"), "eval.py:3: import inside core:metrics"),
        (block("metrics", "    x = 1", "eval.py"), "eval.py:2: unexpected indent"),
        ("def f(:\n", "eval.py:1: "),
        (block("cache", CACHE).replace("\n", "\r\n"), "eval.py: carriage return"),
    ],
)
def test_faults_of_blocks(tree, text, message):
    assert message in fault(tree(**{"eval.py": text}))


def test_fix_heals_drift_and_still_reports_what_it_cannot_heal(tree):
    root = tree(**{"eval.py": block("cache", "old = 1") + "LIMIT = 4\n"})
    result = sync(root, "--fix")
    assert (result.returncode, result.stdout) == (1, "eval.py: rewritten\n")
    assert result.stderr.startswith("eval.py:5: LIMIT belongs to core:runtime;")  # the line after the rewrite


def test_not_utf8(tree):
    root = tree()
    (root / "eval.py").write_bytes(b"# \xff\n")
    assert "eval.py: not UTF-8" in fault(root)


def test_fix_rewrites_nothing_while_markers_are_broken(tree):
    root = tree(**{"eval.py": block("cache", "old = 1"), "broken.py": OPENED})
    fault(root)
    assert "old = 1" in (root / "eval.py").read_text()


@pytest.mark.parametrize(
    ("text", "line", "name", "owner"),
    [
        (block("cache", CACHE) + "\n\nclass Layer: ...\n", 7, "Layer", "cache"),
        ("def device(): ...\n", 1, "device", "runtime"),  # also where the script carries no block
        ("if 1:\n    LIMIT = 4\n", 2, "LIMIT", "runtime"),
        ("LIMIT: int = 4\n", 1, "LIMIT", "runtime"),
        ("a, (b, *LIMIT) = 1, (2, 3)\n", 1, "LIMIT", "runtime"),
        ("import os.path as device\n", 1, "device", "runtime"),
        ("from os import name as Layer\n", 1, "Layer", "cache"),
    ],
)
def test_core_names_defined_outside_their_block(tree, text, line, name, owner):
    assert f"eval.py:{line}: {name} belongs to core:{owner};" in fault(tree(**{"eval.py": text}))


def test_a_name_defined_in_two_blocks(tree):
    text = block("metrics", "def device(): ...", canonical="eval.py")
    assert "run.py:7: device is defined in core:metrics and in core:runtime" in fault(tree(**{"eval.py": text}))


def test_names_that_are_free(tree):
    mine = "def f(LIMIT):\n    device = 1\n\n\nclass C:\n    Layer = 1\n\n\nx = [LIMIT for LIMIT in ()]\nx.LIMIT = 1\n"
    exempt = "def main(): ...\n\n\nclass Args: ...\n\n\n__all__ = []"
    root = tree(**{"eval.py": mine + exempt, "metrics.py": block("metrics", exempt, "metrics.py")})
    (root / "tests").mkdir()
    (root / "tests" / "test_x.py").write_text("LIMIT = 4\n")  # only top-level scripts are looked at
    assert sync(root).returncode == 0


@pytest.mark.parametrize("file", ["eval.py", "tests/test_x.py", "benchmarks/b.py"])
def test_specifiers_differ(tree, file):
    root = tree(**{"own.py": header("torch>=2.10,<2.11", "numpy"), file: header("numpy", "Torch >= 2.9")})
    said = fault(root)
    assert "PEP 723 headers disagree on torch: " in said
    assert ">=2.10,<2.11 in own.py" in said and f">=2.9 in {file}" in said
    assert "numpy" not in said


@pytest.mark.parametrize(
    ("key", "mine", "other"),
    [
        ("requires-python", "requires-python = '>=3.11'", "requires-python = '>=3.12'"),
        ("exclude-newer", "tool.uv.exclude-newer = '2026-01-01'", "tool.uv.exclude-newer = '2026-01-02'"),
        ("override-dependencies", "tool.uv.override-dependencies = ['a']", "tool.uv.override-dependencies = ['b']"),
    ],
)
def test_settings_differ(tree, key, mine, other):
    root = tree(**{"run.py": header(extra=mine), "eval.py": header(extra=other)})
    assert f"PEP 723 headers disagree on {key}: " in fault(root)


def test_headers_that_agree(tree):
    extra = "requires-python = '>=3.11'\n\n[tool.uv]\nexclude-newer = '2026-01-01'"
    mine = header("rank-bm25>=0.2,<0.3", "numpy; sys_platform == 'linux'", extra=extra)
    other = header("rank_bm25 >=0.2, <0.3", "numpy;sys_platform=='linux'", "scipy", extra="requires-python = '>=3.11'")
    root = tree(**{"own.py": mine, "eval.py": other, "tests/test_x.py": header("scipy")})
    assert sync(root).returncode == 0, sync(root).stderr


def test_only_a_script_below_the_top_level_may_pin_other_versions(tree):
    alone = header("torch<2", extra="[tool.cognito]\nindependent-environment = true")
    assert sync(tree(**{"own.py": header("torch>=2"), "benchmarks/old.py": alone})).returncode == 0
    assert "disagree on torch" in fault(tree(**{"own.py": header("torch>=2"), "eval.py": alone}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header().replace("# ///\n", ""), "eval.py: PEP 723 header is not closed or stands twice"),
        (header() + "\n" + header(), "eval.py: PEP 723 header is not closed or stands twice"),
        (header(extra="= 1"), "eval.py: PEP 723 header: "),
    ],
)
def test_broken_headers(tree, text, message):
    assert message in fault(tree(**{"eval.py": text}))
