"""Documents as they come: what is read of a file, which files are found, and where passages begin and end."""

import bisect
import io
import itertools
import json
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import cognito_run as core
import pytest
from pypdf.errors import DependencyError

BYTES = core.tiny_tokenizer()


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def write(path: str, content: str | bytes = "Ada chaired the meeting.\n") -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return Path(path)


def read(*paths: str | Path) -> dict[str, str]:
    """The text of each document by its label."""
    return {label: "".join(line.text for line in lines) for label, lines in core.read_documents(tuple(map(Path, paths))).items()}


def cut(*paths: str | Path, size: int = 200, tokenizer=BYTES) -> list[core.Passage]:
    """The passages of documents, each of so many tokens at most."""
    documents = core.read_documents(tuple(map(Path, paths)))
    with mock.patch.object(core, "PASSAGE_TOKENS", size):
        return list(core.cut_documents(core.Args(kv_budget="none"), documents, tokenizer, 1)[1].values())


def pack(lines, size: int, tokenizer=BYTES) -> list[str]:
    lines = list(lines)
    starts = core.tokenise(tokenizer, "".join(line.text for line in lines))[1]
    return [text for _, text in core.pack_lines(lines, starts, tokenizer, size)]


def pdf(*pages: str) -> bytes:
    """A PDF with a page for each text, in Helvetica; a page of an empty text has none."""
    streams = ["BT /F1 12 Tf 14 TL 50 700 Td " + " ".join(f"({line}) Tj T*" for line in page.split("\n")) + " ET" if page else ""
               for page in pages]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
               "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for i, stream in enumerate(streams):
        objects += [f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
                    "/Resources << /Font << /F1 3 0 R >> >> >>", f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream"]
    body, offsets = b"%PDF-1.4\n", []
    for i, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{i} 0 obj\n{content}\nendobj\n".encode()
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n" + "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    return body + f"{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n".encode()


def encrypted_pdf(password: str) -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer, out = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("Ada chaired.")))), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(out)
    return out.getvalue()


def word_file() -> bytes:
    import docx

    document, out = docx.Document(), io.BytesIO()
    document.add_paragraph("Before all.")
    document.add_heading("Minutes", 1)
    document.add_paragraph("Ada chaired\nthe meeting.")
    table = document.add_table(rows=3, cols=2)
    for row, texts in zip(table.rows, [("item", "price"), ("pen", "17"), ("ink | red", "23")]):
        for cell, text in zip(row.cells, texts):
            cell.text = text
    document.add_heading("Next", 2)
    document.add_paragraph("June.")
    document.save(out)
    return out.getvalue()


HTML = """<!DOCTYPE html><html><head><title>Club</title><style>p { color: red }</style><script>var secret = 1</script></head>
<body><h1>The <b>minutes</b></h1><!-- hidden --><p>Ada
   chaired the <i>meet</i>ing.<br>It rained.</p><ul><li>pens<li>ink</ul>
<table><caption>Prices</caption><tr><th>item<th>price<tr><td>pen<td>1<b>7</b></tr></table><pre>
def f():
    # no heading
</pre><h2>Next</h2>June &amp; July</body></html>"""


# what is read of each kind of file

def test_web_page():
    write("club.html", HTML)
    assert read("club.html")["club.html"] == (
        "# Club\n\n# The minutes\n\nAda chaired the meeting.\nIt rained.\n\n- pens\n- ink\n\nPrices\n\n| item | price |\n| --- | --- |\n"
        "| pen | 17 |\n\n```\ndef f():\n    # no heading\n```\n\n## Next\n\nJune & July\n\n")
    assert [passage.where for passage in cut("club.html", size=60)] == [
        "club.html § Club", "club.html § The minutes", "club.html § The minutes", "club.html § The minutes", "club.html § Next"]


def test_layout_tables_and_nested_blocks():
    write("old.htm", "<table><tr><td>Menu<td><p>Hello<p>world<table><tr><td>a</td><td><p>b</p><p>c</p></td></tr></table></table>")
    assert read("old.htm")["old.htm"] == "Menu\n\nHello\n\nworld\n\n| a | b c |\n| --- | --- |\n\n"


def test_word_document():
    write("club.docx", word_file())
    assert read("club.docx")["club.docx"] == (
        "Before all.\n\n# Minutes\n\nAda chaired\nthe meeting.\n\n| item | price |\n| --- | --- |\n| pen | 17 |\n| ink \\| red | 23 |\n\n"
        "## Next\n\nJune.\n\n")
    assert [passage.where for passage in cut("club.docx", size=40)] == ["club.docx"] + ["club.docx § Minutes"] * 3 + ["club.docx § Next"]


def test_pdf_page_by_page(capsys):
    """A passage never spans two pages, however little stands on them; a page without text is named."""
    write("manual.pdf", pdf("The first page.", "", "Ada chaired\nthe meeting.", "\n".join(f"Line {i} of the last page." for i in range(20))))
    passages = cut("manual.pdf")
    assert [passage.where for passage in passages] == ["manual.pdf p. 1", "manual.pdf p. 3"] + ["manual.pdf p. 4"] * 3
    assert [passage.name for passage in passages][1:3] == ["manual.pdf p. 3 #2", "manual.pdf p. 4 #3"]
    assert passages[1].text == "Ada chaired\nthe meeting.\n\n"
    assert capsys.readouterr().err == "skipped: p. 2 of manual.pdf (no text; scanned?)\n"


def test_pdf_that_asks_for_no_password(monkeypatch):
    write("a.pdf", encrypted_pdf(""))
    assert "Ada chaired." in read("a.pdf")["a.pdf"]
    monkeypatch.setattr("pypdf._encryption.rc4_decrypt", mock.Mock(side_effect=DependencyError("cryptography is required for AES")))
    with pytest.raises(core.Refusal, match="a.pdf is encrypted; save a copy without encryption"):
        read("a.pdf")


def test_notebook():
    cells = [{"cell_type": "markdown", "source": ["# Prices\n", "\n", "Of pens."]},
             {"cell_type": "code", "source": "price = 17\nprice", "outputs": [
                 {"output_type": "execute_result", "data": {"text/plain": ["17"]}},
                 {"output_type": "stream", "text": "x" * 10_000}, {"output_type": "error", "ename": "E", "evalue": "bad", "traceback": []}]},
             {"cell_type": "code", "source": "", "outputs": []}]
    write("a.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    text = read("a.ipynb")["a.ipynb"]
    assert text.startswith("# Prices\n\nOf pens.\n\nprice = 17\nprice\n17\nxxx") and text.endswith("x [...]\n\n") and len(text) < 2100
    assert [passage.where for passage in cut("a.ipynb")][:2] == ["a.ipynb cell 1", "a.ipynb cell 2"]


def test_json_is_cut_by_members():
    write("a.json", json.dumps({"club": "Caf\u00e9", "people": [{"name": f"P{i}", "age": i} for i in range(30)], "end": 1}))
    assert read("a.json")["a.json"].startswith('{\n "club": "Café",\n "people": [\n  {\n   "name": "P0",\n   "age": 0\n  },\n')
    places = list(dict.fromkeys(passage.where for passage in cut("a.json", size=150)))
    assert places == ["a.json", "a.json § people"]
    write("b.json", json.dumps([{"name": f"P{i}"} for i in range(30)]))
    assert [passage.where for passage in cut("b.json", size=60)][:3] == ["b.json", "b.json [2]", "b.json [4]"]


@pytest.mark.parametrize("text", ['{"a": 1,\n "b": }', "[" * 100_000, '{"a": 1}\n{"b": 2}'])
def test_malformed_json_is_read_as_text(text):
    write("a.json", text)
    assert read("a.json")["a.json"] == text + "\n\n"


def test_lines_have_numbers():
    write("a.log", "\n\n" + "".join(f"{i} INFO started\n" for i in range(20)))
    write("b.jsonl", "".join(json.dumps({"id": i}) + "\n" for i in range(40)))
    write("c.py", "import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n")
    assert [passage.where for passage in cut("a.log", size=100)] == ["a.log l. 3", "a.log l. 9", "a.log l. 15", "a.log l. 21"]
    assert [passage.where for passage in cut("b.jsonl", size=100)][:2] == ["b.jsonl l. 1", "b.jsonl l. 11"]
    assert [passage.text for passage in cut("c.py", size=35)] == ["import os\n\n\n", "def f():\n    return 1\n\n\n", "def g():\n    return 2\n\n"]


MARKDOWN = """---
title: Notes
---
Before.

# Setup # of it

Do this.

Second
------

| a | b |
|---|---|
| 1 | 2 |
no row

## Third

```sh
# a comment
x | y
--|--
```
"""


def test_markdown_knows_headings_and_tables():
    lines = list(core.markdown_lines(MARKDOWN))
    assert [line.where for line in lines] == ["l. 1", "l. 2", "l. 3", "l. 4", "§ Setup # of it", "§ Setup # of it"] + ["§ Second"] * 6 + ["§ Third"] * 6
    assert {line.text: line.header for line in lines if line.header} == {"| 1 | 2 |\n": "| a | b |\n|---|---|\n"}
    assert "".join(line.text for line in lines) == MARKDOWN


# encodings, and characters that a tokenizer may not take

@pytest.mark.parametrize("encoding, text", [
    ("utf-8", "Café 今日"), ("utf-8-sig", "Café"), ("utf-16", "Café 今日"), ("utf-16-be", "\ufeffCafé"),
    ("cp1252", "café"), ("latin-1", "São Paulo"), ("cp1252", "Der Vertrag über die Prüfung – “ja”"), ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy"),
    ("cp1251", "Совещание началось в девять часов утра"), ("shift_jis", "会議は九時に始まりました。議長は田中さんです。"),
    ("cp1251", "# coding: cp1251, привет"),
    ("big5", "會議九點開始，主席是王先生。"), ("euc_kr", "회의는 아홉 시에 시작되었습니다."), ("euc_jp", "<meta charset='euc_jp'> 会議は九時に"),
    ("cp1253", "charset=no-such, Η συνάντηση άρχισε"),
])
def test_encodings(encoding, text):
    write("a.txt", (text + "\r\nsecond\rthird\n").encode(encoding))
    assert read("a.txt")["a.txt"] == text.removeprefix("\ufeff") + "\nsecond\nthird\n\n"


@pytest.mark.parametrize("data, text", [
    (b"A text with one NUL\0, which nobody sees.", "A text with one NUL, which nobody sees."),
    (b"lone \xed\xa0\x80 surrogate", "lone \ufffd surrogate"),
    (b"a pair \xed\xa0\xbd\xed\xb8\x80", "a pair \U0001f600"),
    ("soft\u00adhyphen \ufb01 e\u0301 \u05e9\u05dc".encode(), "soft\u00adhyphen \ufb01 e\u0301 \u05e9\u05dc"),
])
def test_odd_characters(data, text, smollm2_tokenizer):
    write("a.txt", data)
    assert read("a.txt")["a.txt"] == text + "\n\n"
    assert "".join(passage.text for passage in cut("a.txt", tokenizer=smollm2_tokenizer)) == text + "\n\n"


def test_surrogates_out_of_json():
    write("a.json", r'{"a": "x\ud800y\u0000z"}')
    assert read("a.json")["a.json"] == '{\n "a": "x\ufffdy\\u0000z"\n}\n\n'


# files that cannot be read

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + random.Random(0).randbytes(3000)
BAD = {
    "empty.txt": (b"", "is empty"), "blank.md": (b" \n\t\n", "is empty"), "mark.txt": (b"\xef\xbb\xbf", "holds no text"),
    "picture.txt": (PNG, "is binary"), "noise.csv": (random.Random(1).randbytes(5000), "is binary"), "zeros.log": (b"\0" * 99, "is binary"),
    "picture.html": (PNG, "is binary"), "text.pdf": (b"Ada chaired the meeting.", "is damaged, or no .pdf file"),
    "cut.pdf": (pdf("Ada chaired.")[:90], "is damaged, or no .pdf file"), "scan.pdf": (pdf("", ""), "scanned"),
    "locked.pdf": (encrypted_pdf("secret"), "is encrypted"), "text.docx": (b"Ada chaired.", "is damaged, or no .docx file"),
    "zip.docx": (b"PK\x03\x04" + bytes(80), "is damaged, or no .docx file"), "cut.docx": (word_file()[:5000], "is damaged, or no .docx file"),
    "list.ipynb": (b"[1, 2]", "is damaged, or no .ipynb file"), "styles.html": (b"<style>p {}</style>", "holds no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_and_skipped(capsys, name):
    content, reason = BAD[name]
    write(f"papers/{name}", content)
    with pytest.raises(core.Refusal, match=re.escape(f"papers/{name} {reason}") if reason != "scanned" else "scanned") as refusal:
        read("papers")
    assert "\n" not in str(refusal.value) and not capsys.readouterr().err
    write("papers/good.md")
    assert list(read("papers")) == ["good.md"]
    said = capsys.readouterr().err
    assert said.startswith(f"skipped: papers/{name} ") and reason in said and said.count("\n") == 1


def test_paths_that_are_no_files(capsys, monkeypatch):
    write("notes.md/inside.md")
    os.symlink("nowhere", "dangling.txt")
    os.symlink("self.txt", "self.txt")
    os.symlink("nowhere", "notes.md/lost.md")
    os.mkfifo("notes.md/pipe.txt")  # nobody writes to it: to read it would take forever
    write("locked.txt")
    readable = Path.read_bytes

    def read_bytes(path):
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied")
        return readable(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert list(read("notes.md", "dangling.txt", "self.txt", "locked.txt", "missing.txt", "x" * 5000, "a*.txt")) == ["inside.md"]
    said = capsys.readouterr().err.splitlines()
    assert [line[:60] for line in said] == [
        "skipped: a*.txt matches no document", "skipped: notes.md/lost.md is a link to nothing",
        "skipped: dangling.txt is a link to nothing", "skipped: self.txt is a link to nothing",
        "skipped: locked.txt cannot be read (Permission denied)", "skipped: missing.txt does not exist, or is no file",
        "skipped: " + "x" * 51]


def test_nothing_left_is_refused():
    write("folder/picture.png", PNG)
    with pytest.raises(core.Refusal, match=r"files of other kinds in folder: 1 \(.png\); folder holds no document; missing.txt does not exist"):
        read("folder", "missing.txt")


def test_a_file_of_any_suffix_may_be_named():
    write("Makefile", "all:\n\tcc a.c\n")
    write("notes.R2", "x <- 1\n")
    assert read("Makefile", "notes.R2") == {"Makefile": "all:\n\tcc a.c\n\n", "notes.R2": "x <- 1\n\n"}


# which files are found

def test_folders_that_are_passed_by(capsys):
    for folder in (".git", "node_modules/x", "venv/lib", "__pycache__", "club.egg-info", "env/lib", "b/node_modules"):
        write(f"papers/{folder}/no.md")
    write("papers/env/pyvenv.cfg")
    for name in ("b/c/deep.PY", "b/a.md", "a.txt", "z.md", ".hidden.md", "b/table.xlsx"):
        write(f"papers/{name}")
    assert list(read("papers")) == ["a.txt", "z.md", "a.md", "deep.PY"] == list(read("papers/"))
    assert capsys.readouterr().err == "skipped: files of other kinds in papers: 1 (.xlsx)\n" * 2
    assert list(read("papers/.git", "papers/venv")) == [".git/no.md", "lib/no.md"]  # a folder that is named is read


def test_links_are_followed_once():
    write("papers/a.md")
    write("elsewhere/b.md")
    os.symlink("..", "papers/up")  # a loop: it holds papers
    os.symlink(".", "papers/here")
    os.symlink("../elsewhere", "papers/there")
    os.symlink("a.md", "papers/same.md")
    assert sorted(read("papers")) == ["a.md", "b.md"]


def test_a_file_named_twice_is_read_once():
    write("papers/a.md")
    os.symlink("papers/a.md", "link.md")
    os.symlink("papers", "folder")
    assert list(read("link.md", "papers/a.md", "papers", "./papers/../papers/a.md", "folder", "papers/*.md")) == ["link.md"]


def test_patterns(capsys):
    for name in ("a.md", "b.md", "c.txt", "deep/er/d.md", ".git/e.md", "node_modules/f.md", "deep/.g.md", "[1].md"):
        write(f"notes/{name}")
    os.symlink("..", "notes/deep/loop")  # which a pattern does not follow
    assert list(read("notes/[ab].md")) == ["a.md", "b.md"]
    assert list(read("notes/*.md")) == ["[1].md", "a.md", "b.md"]
    assert list(read("notes/[1].md")) == ["[1].md"]  # a file of that name comes first
    assert sorted(read("**/*.md")) == sorted(read(Path("**/*.md").absolute())) == ["[1].md", "a.md", "b.md", "d.md"]
    assert list(read("note?/deep/*r")) == ["d.md"] and not capsys.readouterr().err
    with pytest.raises(core.Refusal, match="matches no document"):
        read("notes/**.docx")


@pytest.mark.parametrize("data, text", [
    (b"# no heading\nAda", "# no heading\nAda\n\n"), (b"<!doctype html><p>Ada<script>no</script>", "Ada\n\n"), (pdf("Ada"), "Ada\n\n")])
def test_standard_input(monkeypatch, data, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    write("stdin")
    assert read("-", "stdin") == {"stdin": text, Path.cwd().name + "/stdin": "Ada chaired the meeting.\n\n"}


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b""))])
def test_empty_standard_input(monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(core.Refusal, match="- is empty"):
        read("-")


def test_labels_tell_files_apart():
    names = ["a/x/notes.md", "b/x/notes.md", "b/other.md", "new\nline.md", os.fsdecode(b"bad\xff.md")]
    for name in names:
        write(name)
    assert list(read(*names)) == ["a/x/notes.md", "b/x/notes.md", "other.md", r"new\nline.md", r"bad\udcff.md"]
    names = [passage.name for passage in cut(*names, size=10)]
    assert len(set(names)) == len(names) and names[:2] == ["a/x/notes.md l. 1 #1", "a/x/notes.md l. 1 #2"]


# where passages begin and end

def token_counts(tokenizer, passages: list[str]) -> list[int]:
    """Tokens of all passages together that start in each of them: what each of them takes in a prompt."""
    offsets = tokenizer("".join(passages), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ends = list(itertools.accumulate(map(len, passages)))
    owners = Counter(bisect.bisect_right(ends, start) for start, _ in offsets)
    return [owners[i] for i in range(len(passages))]


def naive_size(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def random_text(rng: random.Random) -> str:
    """Prose, records, code, long lines and long words, with numbers in all of them."""
    def number():
        return rng.choice(["{}", "{:,}", "{}.5", "1 {}", "2024-01-{}"]).format(rng.randrange(10 ** rng.randint(1, 7)))

    def words(n):
        return " ".join(number() if rng.random() < 0.3 else "word"[: rng.randint(1, 4)] + rng.choice(["", "", ".", "!", " é"]) for _ in range(n))

    kinds = [lambda: words(rng.randint(1, 12)), lambda: words(60), lambda: "x" * rng.randint(1, 150) + number(), lambda: "\t" + words(3),
             lambda: "今日は晴れです。" * rng.randint(1, 5), lambda: "    " + words(4)]
    return "".join(rng.choice(kinds)() + rng.choice(["\n", "\n", "\n", "\n\n", "\n \n\n"]) for _ in range(40))


@pytest.mark.parametrize("size", [12, 40, 200])
def test_passages_keep_lines_and_numbers_whole(smollm2_tokenizer, size):
    """Against a naive count: passages are the text again, of the size at most; a line or a number that fits is in one of them."""
    rng = random.Random(size)
    for tokenizer, text in [(tokenizer, random_text(rng)) for tokenizer in (BYTES, smollm2_tokenizer) for _ in range(6)]:
        passages = pack(core.plain_lines(text), size, tokenizer)
        assert "".join(passages).rstrip() == text.rstrip() and all(passages)
        assert max(token_counts(tokenizer, passages)) <= size
        begins = {sum(map(len, passages[:i])) for i in range(len(passages))}
        for wholes in (r"[^\n]+\n", r"\d[\d.,]*\d"):
            for match in re.finditer(wholes, text):
                if naive_size(tokenizer, match[0]) < size:  # a token that reaches over from the line before counts as well
                    assert not begins & {*range(match.start() + 1, match.end())}, match


def test_passages_end_at_paragraphs_then_lines_then_sentences_then_words():
    paragraphs = [f"Paragraph {i} is short.\nIt has two lines.\n\n" for i in range(9)]
    assert pack(core.plain_lines("".join(paragraphs)), 110) == ["".join(paragraphs[i : i + 2]) for i in (0, 2, 4, 6)] + [paragraphs[8].rstrip() + "\n"]
    tall = "A note.\n\n" + "A paragraph in lines\n" * 3  # 63 bytes: it does not fill up the passage of the note, but stands alone
    assert pack(core.plain_lines(tall), 64) == ["A note.\n\n", "A paragraph in lines\n" * 3]
    assert pack(core.plain_lines(tall), 62) == ["A note.\n\n" + "A paragraph in lines\n" * 2, "A paragraph in lines\n"]
    lines = [f"Line {i}. Of two sentences.\n" for i in range(9)]
    assert pack(core.plain_lines("".join(lines)), 100) == ["".join(lines[i : i + 3]) for i in (0, 3, 6)]
    sentences = [f"Sentence {i} of one long line. " for i in range(9)]
    assert pack(core.plain_lines("".join(sentences)), 100) == ["".join(sentences[i : i + 3]).removesuffix(" " * (i == 6)) + "\n" * (i == 6) for i in (0, 3, 6)]
    words = pack(core.plain_lines("word " * 50), 22)
    assert words[:-1] == ["word " * 4] * 12
    assert pack(core.plain_lines("x" * 25 + "1234567" + "y" * 20), 30) == ["x" * 25, "1234567" + "y" * 20 + "\n"]
    assert pack(core.plain_lines("of 1 234 567 " * 4), 20) == ["of 1 234 567 of ", "1 234 567 of ", "1 234 567 of ", "1 234 567\n"]
    assert pack(core.plain_lines("9" * 50), 30) == ["9" * 30, "9" * 20 + "\n"]


def test_a_passage_begins_at_a_heading_once_half_full():
    sections = [f"# Section {i}\n\n{'Text of it. ' * 4}\n\n" for i in range(6)]  # 65 bytes each
    text = "".join(sections)
    assert pack(core.markdown_lines(text), 150)[:2] == ["".join(sections[:2]), "".join(sections[2:4])]
    assert pack(core.markdown_lines(text), 120)[:2] == sections[:2]
    mixed = "Some words of a paragraph.\n\n" * 4 + sections[0]
    assert pack(core.markdown_lines(mixed), 160) == ["Some words of a paragraph.\n\n" * 4, sections[0].rstrip() + "\n"]
    assert pack(core.markdown_lines("# Long\n\n" + "A sentence of it. " * 30), 100)[0] == "# Long\n\n" + "A sentence of it. " * 5  # no heading alone


TABLES = {
    "a.csv": ("name,price in 2024,2025\n", "item {0},{1},{2}.5\n"), "b.csv": ("name;note\n", 'item {0};"two\nlines; {1}"\n'),
    "c.tsv": ("name\tprice\n", "item {0}\t{1}\n"), "d.md": ("| name | price |\n|:-----|------:|\n", "| item {0} | {1} |\n"),
    "e.csv": ("", "{0},{1}\n"),  # no header
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_stay_whole_below_their_header(smollm2_tokenizer, name):
    header, row = TABLES[name]
    rows = [row.format(i, 37 * i, i * i) for i in range(200)]
    write(name, header + "".join(rows))
    for size, tokenizer in ((80, BYTES), (200, BYTES), (90, smollm2_tokenizer)):
        passages = [passage.text for passage in cut(name, size=size, tokenizer=tokenizer)]
        assert len(passages) > 5 and all(passage.startswith(header) for passage in passages)
        assert max(token_counts(tokenizer, passages)) <= size
        assert "".join(passage.removeprefix(header) for passage in passages) == "".join(rows) + "\n"
        assert all(sum(record in passage for passage in passages) == 1 for record in rows)


def test_a_header_is_repeated_only_where_it_fits():
    header, rows = "a header, that is long\n", ["short, 1\n", "a row that fills the passage, 2\n", "end, 3\n"]
    for size, headers in ((60, 3), (50, 1), (40, 1), (33, 1)):
        passages = pack(core.csv_lines(header + "".join(rows)), size)
        assert "".join(passages).replace(header, "") == "".join(rows)
        assert sum(header in passage for passage in passages) == headers and all(len(passage) <= size for passage in passages)
    passages = pack(core.csv_lines("name, note\n" + "x" * 220 + "\nend, 3\n"), 60)  # the parts of a row are of the table, too
    assert all(passage.startswith("name, note\n") and len(passage) <= 60 for passage in passages) and len(passages) == 5
    lines = core.markdown_lines("| a | b |\n|---|---|\n| 1 | 2 |\n\nText behind the table, of its own.\n\nMore.\n")
    assert [passage.count("| a |") for passage in pack(lines, 40)] == [1, 0, 0]


def test_cost_grows_with_the_length_alone(monkeypatch):
    """Each document is tokenised once, and a line is looked at a few times, however long the document."""
    read_chars, looks = [], []
    tokenise, between = core.tokenise, core.tokens_between
    monkeypatch.setattr(core, "tokenise", lambda tokenizer, text: read_chars.append(len(text)) or tokenise(tokenizer, text))
    monkeypatch.setattr(core, "tokens_between", lambda *args: looks.append(1) or between(*args))
    for text in ("".join(f"{i} INFO job done\n" for i in range(500)), "name,age\n" + "Ada,36\n" * 1000, "abc1234" * 1500, "a b. " * 2000, "x\n\n" * 3000):
        costs = []
        for times in (1, 4):
            write("a.csv", text * times)
            read_chars.clear(), looks.clear()
            cut("a.csv")
            assert sum(read_chars) < len(text) * times + 100
            costs.append(len(looks))
        assert costs[1] < 4.5 * costs[0] and costs[1] < 12 * len(text)


def test_long_text_without_a_space(smollm2_tokenizer):
    text = "".join(random.Random(0).choices("abcdefgh0123456789", k=200_000))
    passages = pack(core.plain_lines(text), 200, smollm2_tokenizer)
    assert "".join(passages) == text + "\n" and max(token_counts(smollm2_tokenizer, passages)) <= 200
    assert not any(a[-1].isdigit() and b[0].isdigit() for a, b in zip(passages, passages[1:]))


# the demo, and a whole run

def test_the_demo_reads_topics(smollm2_tokenizer):
    from pydoc_data.topics import topics

    documents = core.read_documents(())
    _, passages = core.cut_documents(core.Args(), documents, smollm2_tokenizer, 1)
    assert list(documents) == [topic for topic in core.DEMO_TOPICS if topic in topics]
    for topic in documents:
        assert "".join(passage.text for passage in passages.values() if passage.where == topic) == topics[topic].strip() + "\n\n"
    assert next(iter(passages)) == "assert #1" and all(name == passage.name for name, passage in passages.items())


def test_a_run_over_documents_of_many_kinds(monkeypatch, capsys):
    """Through the command line's own main: all kinds are read, what is bad is named, and passages carry their places."""
    monkeypatch.setattr(core, "hub_unreachable", lambda: True)
    for name, content in {"a.html": HTML, "b.docx": word_file(), "c.pdf": pdf("Ada chaired.", "June."), "d.csv": "name,age\nAda,36\n",
                          "e.txt": b"caf\xe9", "f.txt": b"", "g/h.md": "# Minutes\n\nAda chaired.\n", "i.json": '{"chair": "Ada"}'}.items():
        write(f"papers/{name}", content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Typed text.")))
    args = core.Args(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none", max_new_tokens=2, ask=("Who chaired?",),
                     docs=(Path("papers"), Path("-"), Path("papers/**/*.md"), Path("missing.md")), json=Path("said.json"))
    assert core.run_main(core.main, args) == 0
    out, err = capsys.readouterr()
    names = {row["passage"].rpartition(" #")[0] for row in json.loads(Path("said.json").read_text())["turns"][0]["passages"]}
    assert {"a.html § Club", "b.docx", "c.pdf p. 1", "c.pdf p. 2", "d.csv l. 1", "e.txt l. 1", "h.md § Minutes", "i.json", "stdin l. 1"} <= names
    assert "8 documents" in out and "skipped: papers/f.txt is empty\n" in err and "skipped: missing.md does not exist, or is no file\n" in err
