"""Brings committed rows up to fields that came after them, or that were wrong; in place, and only once.

    python tools/migrate_rows.py                        # every row under results/, but no trace and nothing in results/bench
    python tools/migrate_rows.py results/niah L3.jsonl  # some folders and files

A row that was measured once is kept for as long as what it measured is still true, so the rows must follow the contract:

    question_aware    is true of task squad: the question stands before the passages, so every key has seen it.
    evicted_segments  (L3), cuts (L4) and evicted_entries (L6) hold `evictions` under the name of its unit. A row that
                      failed, or that counted nothing, gets none of them.
    kv_budget         and evict_at of L3 and L4 stand in the file's name, as the eval scripts give it: `budget4096`,
                      `inflight`. A name without them says the defaults, 0.4 and pre-decode.

A new field stands at the row's end, and a field that a row has already keeps its value; so a second run changes nothing.
`settings_hash` stays as it is: it covers what changes an answer, the flags of a run, and none of these fields is one
(kv_budget and evict_at repeat two that it covers already). A run that is resumed finds its cases done.

Every other byte of a file stays. A file with a torn line, or with a line that no script wrote, is refused by name, and
then no file is changed; exit 1. Standard library only.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

UNITS = {"L3": "evicted_segments", "L4": "cuts", "L6": "evicted_entries"}  # what one eviction is of
NEEDED = {"task", "config", "question_aware", "evictions", "error"}


def find_files(path: Path) -> list[Path]:
    """The files with rows at or under a path. A trace has events for rows, and a benchmark has repeats."""
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*.jsonl") if not file.name.endswith(".trace.jsonl"))
    return sorted(file for file in files if "bench" not in file.relative_to(path).parts)


def dumped(row: dict, line: str) -> str:
    """A row as a script writes it; a line that holds its letters unescaped keeps them so."""
    return json.dumps(row, ensure_ascii=line.isascii())


def read_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(line, row) of a whole file that a script wrote; exits 1 on any other, naming it."""
    try:
        *lines, torn = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path} cannot be read ({error}); name a file of rows")
    if torn:
        sys.exit(f"{path} ends within a line; resume the run that wrote it, which repairs it")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            sys.exit(f"{path}:{number} holds no valid JSON; mend or delete the line")
        if not isinstance(row, dict) or not NEEDED <= row.keys() or dumped(row, line) != line:
            sys.exit(f"{path}:{number} is no row as the eval scripts write it; name files of theirs")
        yield line, row


def migrated(row: dict, parts: list[str]) -> dict:
    """A row with the fields that it should have; `parts` of its file's name tell its settings."""
    new, config = dict(row), row["config"]
    if row["task"] == "squad":
        new["question_aware"] = True
    if config in UNITS and row["error"] is None and row["evictions"] is not None:
        new.setdefault(UNITS[config], row["evictions"])
    if config in ("L3", "L4"):
        budgets = [part.removeprefix("budget") for part in parts if part.startswith("budget")]
        new.setdefault("kv_budget", budgets[0] if budgets else "0.4")
        new.setdefault("evict_at", "chunk" if "inflight" in parts else "pre-decode")
    return new


def migrate_file(path: Path) -> tuple[str, int, int]:
    """The file's new text, how many rows it has, and how many of them change."""
    parts, lines, n_changed = path.name.removesuffix(".jsonl").split("-"), [], 0
    for line, row in read_rows(path):
        new = migrated(row, parts)
        lines.append(line if new == row else dumped(new, line))
        n_changed += new != row
    return "".join(f"{line}\n" for line in lines), len(lines), n_changed


def replace(path: Path, text: str) -> None:
    """The new file stands whole in the old one's place, or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(text.encode("utf-8"))
    shutil.copymode(path, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("results")], help="files and folders (default: results)")
    paths = parser.parse_args().paths
    for path in paths:
        if not path.exists():
            parser.error(f"{path} does not exist")

    done = {file: migrate_file(file) for path in paths for file in find_files(path)}
    for file, (text, _, n_changed) in done.items():
        if n_changed:
            replace(file, text)
    n_rows, n_changed = (sum(one[place] for one in done.values()) for place in (1, 2))
    print(f"{n_changed} of {n_rows} rows in {len(done)} files changed")


if __name__ == "__main__":
    main()
