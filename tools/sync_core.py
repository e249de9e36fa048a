"""Checks that the core blocks which the top-level scripts carry are byte-identical copies, and repairs them.

    python tools/sync_core.py               # check: exit 0 in sync, 1 drift or fault, 2 usage
    python tools/sync_core.py --fix         # rewrite drifted copies from their canonical files, then check
    python tools/sync_core.py --root DIR    # check another tree

To change the core, edit a block in the file that its marker names as canonical, then run --fix:

    # >>> core:cache (canonical: cognito_run.py)
    ...
    # <<< core:cache

A block holds whole statements, imports nothing at module level, and owns the names that it defines: no top-level
script defines them elsewhere. Blocks stand once, in the order of BLOCKS. A script reaches every core function that it
carries: its own code names the function, or names core code that reaches it. Across all PEP 723 headers (top level,
benchmarks/, tests/) a package has one specifier; a script below the top level that has to pin other versions says so:
`[tool.cognito] independent-environment = true`. All these files are UTF-8 with LF line ends; CRLF is refused.

Standard library only. Source: transformers' utils/check_copies.py; differs: no renames, no ignore regions.
"""

import argparse
import ast
import difflib
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCKS = (
    "args usage checks arms runtime rope prompt texts cache kvzap retrieval pages policies generate oracle schema records"
    " metrics evaluate needle"
).split()
OPEN = re.compile(rf"# >>> core:({'|'.join(BLOCKS)}) \(canonical: ([\w-]+\.py)\)")
CLOSE = re.compile(rf"# <<< core:({'|'.join(BLOCKS)})")
MARKER_LIKE = re.compile(r"\s*#+\s*(>>>|<<<)\s*core\b", re.IGNORECASE)
HEADER = re.compile(r"^# /// script$\n((?:^#(?: .*)?$\n)*?)^# ///$", re.MULTILINE)

FREE_NAMES = {"main", "Args"}  # every script has its own
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Block:
    name: str
    canonical: str  # name of the file that copies are made from
    file: str
    start: int  # lines of the file up to and including the opening marker
    lines: list[str]  # without the markers

    def __str__(self):
        return f"{self.file}:{self.start}: core:{self.name}"


def load(root: Path, *patterns: str) -> dict[str, list[str]]:
    """Lines by path relative to `root`. Joined by newlines they give the file's bytes again."""
    files = {}
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        file = path.relative_to(root).as_posix()
        try:
            files[file] = path.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            sys.exit(f"{file}: not UTF-8: {error}")
        if any("\r" in line for line in files[file]):
            sys.exit(f"{file}: carriage return; save the file with LF line ends")
    return files


def find_blocks(file: str, lines: list[str]) -> tuple[list[Block], list[str]]:
    """Blocks of one file, and the faults of its markers."""
    blocks, faults, opened = [], [], None
    for number, line in enumerate(lines, start=1):
        if marker := OPEN.fullmatch(line):
            if opened:
                faults.append(f"{file}:{number}: core:{marker[1]} opens inside core:{opened[0]}")
            opened = (*marker.groups(), number)
        elif marker := CLOSE.fullmatch(line):
            if opened and opened[0] == marker[1]:
                name, canonical, start = opened
                blocks.append(Block(name, canonical, file, start, lines[start : number - 1]))
            else:
                faults.append(f"{file}:{number}: core:{marker[1]} is closed but not open")
            opened = None
        elif MARKER_LIKE.match(line):
            faults.append(f"{file}:{number}: malformed marker or unknown block: {line}")
    if opened:
        faults.append(f"{file}:{opened[2]}: core:{opened[0]} is never closed")
    names = [block.name for block in blocks]
    if names != [name for name in BLOCKS if name in names]:
        faults.append(f"{file}: has blocks {', '.join(names)}; each stands once, in the order {', '.join(BLOCKS)}")
    return blocks, faults


def canonical_blocks(blocks: list[Block]) -> dict[str, Block]:
    return {block.name: block for block in blocks if block.file == block.canonical}


def canonical_faults(blocks: list[Block]) -> Iterator[str]:
    canonical = canonical_blocks(blocks)
    for name in BLOCKS:
        files = sorted({block.canonical for block in blocks if block.name == name})
        if len(files) > 1:
            yield f"core:{name} names several canonical files: {', '.join(files)}"
        elif files and name not in canonical:
            yield f"core:{name}: its canonical file {files[0]} is missing or does not hold the block"
    for block in canonical.values():
        for node in walk(parse(block.file, block.lines, block.start), stop=FUNCTIONS):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield f"{block.file}:{node.lineno}: import inside core:{block.name}; imports stand above all blocks"


def parse(file: str, lines: list[str], start: int = 0) -> ast.Module:
    """Tree of `lines`, which follow line `start` of `file` (so that line numbers are the file's)."""
    try:
        return ast.parse("\n" * start + "\n".join(lines))
    except SyntaxError as error:
        sys.exit(f"{file}:{error.lineno}: {error.msg} (blocks, and the file without them, have to parse on their own)")


def walk(node: ast.AST, stop: tuple[type, ...]) -> Iterator[ast.AST]:
    """All nodes below `node`, entering none of the types in `stop`."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, stop):
            yield from walk(child, stop)


def defined_names(tree: ast.Module) -> dict[str, int]:
    """Names bound at module level (functions, classes, constants, imports), each with its line."""
    names = {}
    for node in walk(tree, stop=SCOPES):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0]: node.lineno for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node.lineno
    return {name: line for name, line in names.items() if name not in FREE_NAMES and not name.startswith("__")}


def own_code(file: str, lines: list[str], blocks: list[Block]) -> ast.Module:
    """Tree of `file` without its blocks."""
    outside = list(lines)
    for block in blocks:
        if block.file == file:
            outside[block.start : block.start + len(block.lines)] = [""] * len(block.lines)
    return parse(file, outside)


def name_faults(scripts: dict[str, list[str]], blocks: list[Block]) -> Iterator[str]:
    """Core names that are defined a second time, in another block or outside the blocks of any top-level script."""
    owner = {}
    for block in canonical_blocks(blocks).values():
        for name, line in defined_names(parse(block.file, block.lines, block.start)).items():
            if name in owner:
                yield f"{block.file}:{line}: {name} is defined in core:{owner[name]} and in core:{block.name}"
            owner[name] = block.name
    for file, lines in scripts.items():
        for name, line in defined_names(own_code(file, lines, blocks)).items():
            if name in owner:
                yield f"{file}:{line}: {name} belongs to core:{owner[name]}; carry that block or choose another name"


def used_names(tree: ast.AST) -> set[str]:
    """Names read anywhere in `tree`. A local variable counts as well: it can hide a fault and never makes one."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def unreached_faults(scripts: dict[str, list[str]], blocks: list[Block]) -> Iterator[str]:
    """Core functions that a script carries and names neither in its own code nor in core code that is reached."""
    canonical = canonical_blocks(blocks)
    for file, lines in scripts.items():
        carried = [
            (statement, block.name)
            for block in blocks
            if block.file == file  # a drifted copy is judged as --fix leaves it: as it stands, it may not parse
            for statement in parse(file, canonical[block.name].lines, block.start).body
        ]
        uses = defaultdict(set, {"": used_names(own_code(file, lines, blocks))})  # "": code that runs in any case
        for statement, _ in carried:
            for name in defined_names(ast.Module([statement], [])) or [""]:
                uses[name] |= used_names(statement)
        reached, waiting = set(), {""}
        while waiting:
            reached |= waiting
            waiting = set().union(*(uses[name] for name in waiting)) - reached
        for node, block_name in carried:
            if isinstance(node, FUNCTIONS) and node.name in uses.keys() - reached:
                told = f"{file}:{node.lineno}: {node.name} of core:{block_name} is carried and never reached"
                yield f"{told}; leave its block out, or move the function to a block of those who use it"


def header_settings(header: dict) -> dict[str, str]:
    """What is the same in every header that sets it: Python, two uv settings, the specifier of each package."""
    uv = header.get("tool", {}).get("uv", {})
    shared = {"requires-python": header.get("requires-python"), "exclude-newer": uv.get("exclude-newer")}
    shared["override-dependencies"] = sorted(uv.get("override-dependencies", []))
    specifiers = defaultdict(list)
    for requirement in header.get("dependencies", []):
        name, specifier = re.fullmatch(r"([\w.-]*)(.*)", "".join(requirement.split())).groups()
        specifiers[re.sub(r"[-_.]+", "-", name).lower()].append(specifier or "any version")
    shared |= {name: " and ".join(sorted(values)) for name, values in specifiers.items()}
    return {key: str(value) for key, value in shared.items() if value}


def header_faults(files: dict[str, list[str]]) -> Iterator[str]:
    """PEP 723 headers that cannot be read, and settings on which they disagree."""
    users = defaultdict(lambda: defaultdict(list))  # setting -> value -> files
    for file, lines in files.items():
        headers = HEADER.findall("\n".join(lines) + "\n")
        if lines.count("# /// script") != len(headers) or len(headers) > 1:
            yield f"{file}: PEP 723 header is not closed or stands twice"
        for header in headers[:1]:
            try:
                fields = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.MULTILINE))
            except tomllib.TOMLDecodeError as error:
                sys.exit(f"{file}: PEP 723 header: {error}")
            independent = fields.get("tool", {}).get("cognito", {}).get("independent-environment") is True
            if not (independent and "/" in file):
                for key, value in header_settings(fields).items():
                    users[key][value].append(file)
    for key, values in users.items():
        if len(values) > 1:
            told = "; ".join(f"{value} in {', '.join(names)}" for value, names in values.items())
            yield f"PEP 723 headers disagree on {key}: {told}"


def drifted(blocks: list[Block]) -> list[tuple[Block, Block]]:
    """Each copy that differs, with its canonical block."""
    canonical = canonical_blocks(blocks)
    return [(block, canonical[block.name]) for block in blocks if block.lines != canonical[block.name].lines]


def fix(root: Path, scripts: dict[str, list[str]], blocks: list[Block]) -> None:
    """Rewrites the files with drifted copies, each in one step."""
    changed = {}
    for copy, canonical in reversed(drifted(blocks)):  # from the end of a file: the starts before stay valid
        lines = changed.setdefault(copy.file, list(scripts[copy.file]))
        lines[copy.start : copy.start + len(copy.lines)] = canonical.lines
    for file, lines in sorted(changed.items()):
        temporary = root / f"{file}.tmp"
        temporary.write_bytes("\n".join(lines).encode("utf-8"))
        shutil.copymode(root / file, temporary)
        os.replace(temporary, root / file)
        print(f"{file}: rewritten")


def read_sound(root: Path) -> tuple[dict[str, list[str]], list[Block]]:
    """Top-level scripts and their blocks; exits 1 where it is in doubt what a block is."""
    scripts = load(root, "*.py")
    found = [find_blocks(file, lines) for file, lines in scripts.items()]
    blocks = [block for file_blocks, _ in found for block in file_blocks]
    faults = [fault for _, file_faults in found for fault in file_faults] + list(canonical_faults(blocks))
    if faults:
        sys.exit("\n".join(faults))
    return scripts, blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="rewrite drifted copies from their canonical files")
    parser.add_argument("--root", type=Path, help="tree to check (default: the repository that holds this file)")
    args = parser.parse_args()
    root = args.root or Path(__file__).resolve().parent.parent
    if not root.is_dir():
        parser.error(f"--root {root} is not a folder")

    scripts, blocks = read_sound(root)
    if args.fix:
        fix(root, scripts, blocks)
        scripts, blocks = read_sound(root)
    drift = drifted(blocks)
    faults = [
        "\n".join(difflib.unified_diff(copy.lines, canonical.lines, str(copy), str(canonical), lineterm=""))
        for copy, canonical in drift
    ]
    if drift:
        command = "python tools/sync_core.py --fix" + (f" --root {shlex.quote(str(args.root))}" if args.root else "")
        faults.append(f"{len(drift)} drifted; rewrite from the canonical files with\n    {command}")
    faults += name_faults(scripts, blocks)
    faults += unreached_faults(scripts, blocks)
    faults += header_faults(scripts | load(root, "benchmarks/**/*.py", "tests/**/*.py"))
    if faults:
        sys.exit("\n".join(faults))
    names, files = {block.name for block in blocks}, {block.file for block in blocks}
    print(f"{len(names)} blocks, {len(blocks) - len(names)} copies in {len(files)} scripts: in sync")


if __name__ == "__main__":
    main()
