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

    core = block("runtime", RUNTIME) + "\n" + block("cache", CACHE)

    def write(**changed):
        files = {
            "run.py": "import os\n\n" + core + "\nargs = os.name, device\n",
            "eval.py": '"""Doc."""\n\n' + core + "\n\nmain = device\n",
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
    root = tree(**{"eval.py": block("runtime", RUNTIME.replace("3", "4")) + "device()\n"})
    before = (root / "eval.py").read_bytes()
    result = sync(root)
    assert result.returncode == 1
    assert "--- eval.py:1: core:runtime\n+++ run.py:3: core:runtime\n" in result.stderr
    assert "-LIMIT = 4\n+LIMIT = 3\n" in result.stderr
    assert f"python tools/sync_core.py --fix --root {root}" in result.stderr
    assert "never reached" not in result.stderr
    assert (root / "eval.py").read_bytes() == before


def test_one_trailing_space_is_drift(tree):
    text = block("runtime", RUNTIME) + "device()\n"
    assert sync(tree(**{"eval.py": text})).returncode == 0
    assert sync(tree(**{"eval.py": text.replace("= 3", "= 3 ")})).returncode == 1


def test_fix_heals_every_copy_and_nothing_else(tree):
    head, between, tail = "#!/usr/bin/env python\n", "\n\x0c\n# é\u2028 \n", "\n\nTAIL = device  # no newline"
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
        (2 * block("cache", CACHE), "eval.py: has blocks cache, cache; each stands once, in the order args, usage"),
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


def carrying(body, own):
    """A script whose block metrics holds a function `wanted` and then `body`, with the code `own` below it."""
    return block("metrics", f"def wanted(): ...\n\n\n{body}", "own.py") + own


@pytest.mark.parametrize(
    ("body", "own", "unreached"),
    [
        ("", "", ["wanted"]),
        ("def helper(): ...", "def main():\n    helper()\n", ["wanted"]),
        ("def helper():\n    wanted()", "x = 1\n", ["wanted", "helper"]),
        ("def helper():\n    other()\n\n\ndef other():\n    wanted(), helper()", "", ["wanted", "helper", "other"]),
        ("def helper():\n    helper()", "wanted()\n", ["helper"]),
        ("async def helper(): ...", "wanted()\n", ["helper"]),
        ("class Table:\n    f = wanted", "", ["wanted"]),  # only functions are named
        ("TABLE = [wanted]", "", ["wanted"]),
        ("@wanted\ndef helper(): ...", "", ["wanted", "helper"]),
        ("", "def main():\n    wanted = 1\n", ["wanted"]),
        ("", "x = 'wanted'\nx.wanted = 1  # wanted\n", ["wanted"]),
    ],
)
def test_a_function_that_is_carried_and_never_reached(tree, body, own, unreached):
    root = tree(**{"own.py": carrying(body, own)})
    assert [line.split()[1] for line in fault(root).splitlines()] == unreached
    assert sync(root).returncode == 1


def test_what_is_said_of_a_function_never_reached(tree):
    advice = "leave its block out, or move the function to a block of those who use it"
    told = f"own.py:2: wanted of core:metrics is carried and never reached; {advice}\n"
    assert fault(tree(**{"own.py": carrying("", "")})) == told


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ("", "def main():\n    wanted()\n"),
        ("", "call = [wanted]\n"),
        ("", "wanted.cache_clear()\n"),
        ("", "def main():\n    wanted = 1\n    return wanted\n"),  # local, yet it counts
        ("def helper():\n    return lambda: wanted", "helper()\n"),
        ("def helper():\n    other()\n\n\ndef other():\n    wanted(), helper()", "helper()\n"),
        ("async def helper():\n    wanted()", "helper()\n"),
        ("class Table:\n    def method(self):\n        wanted()", "Table\n"),
        ("class Table(wanted()): ...", "Table\n"),
        ("TABLE = {'a': wanted}", "def main():\n    TABLE['a']()\n"),
        ("TABLE = [wanted]\nTABLE += []", "TABLE\n"),
        ("TABLE = []\nTABLE += [wanted]", "TABLE\n"),
        ("FIRST, *REST = wanted, 1", "REST\n"),
        ("@wanted\ndef helper(): ...", "helper()\n"),
        ("@wanted()\nclass Table: ...", "Table\n"),
        ("def helper(f=wanted): ...", "helper()\n"),
        ("def helper(*, f=wanted()): ...", "helper()\n"),
        ("def helper() -> wanted: ...", "helper()\n"),
        ("wanted()", ""),  # a statement that defines nothing runs in any case
    ],
)
def test_a_function_that_is_reached(tree, body, own):
    result = sync(tree(**{"own.py": carrying(body, own)}))
    assert (result.returncode, result.stderr) == (0, "")


def test_each_script_is_judged_by_itself(tree):
    text = "\n\n" + carrying("@staticmethod\ndef helper(): ...", "helper()\n")
    root = tree(**{"own.py": text, "other.py": carrying("@staticmethod\ndef helper(): ...", "wanted()\n")})
    said = fault(root)
    assert said.startswith("other.py:6: helper of core:metrics is carried and never reached;")
    assert "\nown.py:4: wanted of core:metrics is carried and never reached;" in said
    assert said.count("\n") == 2


def test_a_function_reached_through_another_block(tree):
    text = block("metrics", "def score():\n    return device()", "own.py")
    root = tree(**{"own.py": block("runtime", RUNTIME) + text + "score()\n"})
    assert sync(root).returncode == 0
    (root / "own.py").write_text(block("runtime", RUNTIME) + text)
    assert [line.partition(" of ")[0] for line in fault(root).splitlines()] == ["own.py:5: device", "own.py:11: score"]


def test_a_drifted_copy_is_judged_as_fix_leaves_it(tree):
    result = sync(tree(**{"eval.py": block("runtime", "def device(:")}))
    assert "--- eval.py:1: core:runtime\n" in result.stderr
    assert "eval.py:5: device of core:runtime is carried and never reached;" in result.stderr


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
