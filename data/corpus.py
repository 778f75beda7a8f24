"""Builds a corpus without a download, from Python's documentation and the docstrings of installed packages.

Modules are parsed with `ast`, never imported. The result is plain text, one sentence per line, a blank line between
documents, in an order that depends only on what is installed.
"""

import ast
import csv
import gc
import hashlib
import io
import math
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

from common.console import console
from common.errors import Problems, run_command
from common.files import check_folder_to_write, write_atomically
from common.help import HelpFormatter, Parser, positive_int
from common.words import counted
from data.text.sentences import split_sentences

FILE_BYTES = 4 * 2**20
COMPLETE = ".complete"  # written last, so that an interrupted corpus is built again
_MAX_MODULE = 2 * 2**20  # bytes; larger ones are tables
_FILES_AT_ONCE = 64
LABELLED_PACKAGES, LABELLED_TEXTS, LABELLED_PER_MODULE, LABELLED_WORDS = 6, 400, 8, 48
# Folders of tests and vendored copies, which have little prose and much repetition.
_UNWANTED = frozenset({"test", "tests", "testing", "_vendor", "vendor", "idlelib", "lib2to3"})
_MIN_PROSE = 200  # bytes of docstrings in a module
_MIN_PROSE_SHARE = 0.15
_MIN_WORDS, _MAX_WORDS = 4, 120  # of a sentence

_FENCE = re.compile(r"```.*?```|~~~.*?~~~", re.DOTALL)
_FIELD = re.compile(r"^\s*(:\w[^:]*:|@\w+|\.\. |\w[\w, *]*\s*:\s*\S*$|[-*•]\s*$)")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_ITEM = re.compile(r"\s*(?:[-*•]|\d+[.)])\s+|\s*[\w.*`]+(?: ?\([^)]*\))?\s*:\s+")  # "- …", "1. …", "name (type): …"
_DOCSTRING = re.compile(rb'"""(.*?)"""', re.DOTALL)
_MARKUP = (
    (re.compile(r":[\w:.+-]+:`~?!?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # :class:`~a.b` → a.b
    (re.compile(r"`{1,3}([^`]*)`{1,3}_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1\2"),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"https?://\S+"), ""),
)
_PROSE = re.compile(r"[A-Za-z][a-z]*(?:'[a-z]+)?[,;:]?")


def build_corpus(output: Path, max_mb: float, workers: int = 2) -> tuple[int, int, int]:
    """Write the corpus to `output` and return (documents, sentences, bytes)."""
    files = find_modules()
    batches = [files[i : i + _FILES_AT_ONCE] for i in range(0, len(files), _FILES_AT_ONCE)]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(_documents_of_files, batches)
        documents = drop_repeated(document for batch in found for document in batch)
        written = _write(documents, output, int(max_mb * 2**20))
        pool.shutdown(cancel_futures=True)  # there may be more text than max_mb
    return written


def find_modules() -> list[Path]:
    """Return Python files in a fixed order: the documentation's topics, the standard library, then packages."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    topics = stdlib / "pydoc_data" / "topics.py"
    own = _modules_below(stdlib, _UNWANTED | {"site-packages", packages.name})
    return [topics, *(path for path in own if path != topics), *_modules_below(packages, _UNWANTED)]


def _modules_below(root: Path, unwanted: frozenset[str]) -> list[Path]:
    """Python files below `root`, sorted, without folders of `unwanted` names. rglob takes ten times as long."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in unwanted]
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def _documents_of_files(paths: Sequence[Path]) -> list[list[str]]:
    gc.disable()  # syntax trees are large and have no cycles; collection would take a fifth of the time
    return [document for path in paths for document in documents_of_module(path)]


def documents_of_module(path: Path) -> Iterator[list[str]]:
    """Yield a document for the module and one for each class with its methods, or one for each documentation topic."""
    try:
        source = path.read_bytes()
        if not _is_worth_parsing(source):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in other people's code
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    is_topics = path.name == "topics.py" and path.parent.name == "pydoc_data"
    for texts in ([topic] for topic in _topics(tree)) if is_topics else _docstrings(tree):
        if sentences := [sentence for text in texts for sentence in sentences_of(text)]:
            yield sentences


def _is_worth_parsing(source: bytes) -> bool:
    """Whether it has enough prose. Parsing is most of the cost, and a third of all code has hardly any docstrings."""
    prose = sum(map(len, _DOCSTRING.findall(source)))
    return len(source) <= _MAX_MODULE and prose >= max(_MIN_PROSE, _MIN_PROSE_SHARE * len(source))


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yield the values of the module's only dictionary."""
    for node in ast.walk(tree):
        for value in node.values if isinstance(node, ast.Dict) else ():
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def _docstrings(tree: ast.Module) -> Iterator[list[str]]:
    """Yield the docstrings of the module and its functions, then those of each class and its methods."""
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        functions = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield [docstring for node in (owner, *functions) if (docstring := ast.get_docstring(node))]


def sentences_of(docstring: str) -> list[str]:
    """Return the prose of a docstring, without code, doctests, tables, field lists and headings."""
    sentences: list[str] = []
    for paragraph in _PARAGRAPH_END.split(_FENCE.sub("\n\n", docstring)):
        if ">>>" not in paragraph:
            for text in _items(paragraph):
                for pattern, replacement in _MARKUP:
                    text = pattern.sub(replacement, text)
                sentences.extend(sentence for sentence in split_sentences(text, "en") if is_prose(sentence))
    return sentences


def _items(paragraph: str) -> Iterator[str]:
    """Yield a paragraph's running text, or each item separately if it is a list or describes names."""
    lines: list[str] = []
    for line in paragraph.split("\n"):
        if _FIELD.match(line) or (line.strip() and not re.search(r"\w", line)):
            continue  # a field, or the rule of a heading or table
        start = _ITEM.match(line)
        if start:
            yield " ".join(lines)
            lines = []
        lines.append(line[start.end() :].strip() if start else line.strip())
    yield " ".join(lines)


def is_prose(sentence: str) -> bool:
    """Whether the sentence has enough words, and most are plain ones."""
    words = sentence.split()
    if not _MIN_WORDS <= len(words) <= _MAX_WORDS:
        return False
    plain = sum(1 for word in words if _PROSE.fullmatch(word.rstrip(".!?)\"'").lstrip("(\"'")))
    return plain >= 0.6 * len(words)


def drop_repeated(documents: Iterator[list[str]]) -> Iterator[list[str]]:
    """Drop sentences that occurred before: docstrings are often copied. Keeps a digest of 8 bytes for each."""
    seen: set[bytes] = set()
    for document in documents:
        kept = []
        for sentence in document:
            digest = hashlib.blake2b(sentence.lower().encode(), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(sentence)
        if kept:
            yield kept


def _write(documents: Iterator[list[str]], output: Path, max_bytes: int) -> tuple[int, int, int]:
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("corpus_*.txt"):
        old.unlink()
    texts: list[str] = []
    size = total = num_documents = num_sentences = num_files = 0
    for document in chain(documents, [None]):
        if document is not None:
            texts.append("\n".join(document) + "\n")
            size += len(texts[-1])
            num_documents += 1
            num_sentences += len(document)
        if texts and (document is None or size >= FILE_BYTES or total + size >= max_bytes):
            content = "\n".join(texts).encode()
            write_atomically(output / f"corpus_{num_files:03d}.txt", content)
            total += len(content)
            texts, size, num_files = [], 0, num_files + 1
        if total >= max_bytes:
            break
    return num_documents, num_sentences, total


def write_labelled(path: Path, workers: int = 2) -> int:
    """Write a table of texts and the package that each is from, and return its number of rows.

    The classes are the packages with the most modules, whose topics differ.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    packages: dict[str, list[Path]] = {}
    for file in find_modules():
        if root in file.parents:
            packages.setdefault(file.relative_to(root).parts[0], []).append(file)
    largest = sorted(packages, key=lambda name: (-len(packages[name]), name))[:LABELLED_PACKAGES]
    with ProcessPoolExecutor(workers) as pool:
        found = list(pool.map(_texts_of_package, (packages[name] for name in largest)))
    rows = [(text, name) for name, texts in zip(largest, found, strict=True) for text in texts]
    stream = io.StringIO()
    csv.writer(stream).writerows([("text", "label"), *rows])
    write_atomically(path, stream.getvalue())
    return len(rows)


def _texts_of_package(files: Sequence[Path]) -> list[str]:
    """The first sentences of documents from all over the package, each once."""
    texts: dict[str, None] = {}
    for file in sorted(files, key=lambda file: hashlib.blake2b(str(file.name).encode()).digest()):
        for sentences in list(documents_of_module(file))[:LABELLED_PER_MODULE]:
            words = " ".join(sentences).split()[:LABELLED_WORDS]
            texts.setdefault(" ".join(words))
        if len(texts) >= LABELLED_TEXTS:
            break
    return list(texts)[:LABELLED_TEXTS]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data.corpus",
        description="Write a text corpus from the documentation that is installed with Python, without a download.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the text files")
    add("--max_mb", type=float, default=20.0, metavar="MB", help="amount of text after which to stop")
    workers = "number of processes; does not change the output"
    add("--workers", type=positive_int, default=2, metavar="N", help=workers)
    add("--labelled", type=Path, metavar="FILE", help="also write a CSV of texts and the package that each is from")
    arguments = parser.parse_args(argv)
    problems = Problems()
    if arguments.labelled is not None:
        check_folder_to_write(arguments.labelled.parent, "--labelled", problems)
    if not 0 < arguments.max_mb < math.inf:
        problems.add(f"--max_mb: found {arguments.max_mb:g}, expected a number of megabytes, more than 0")
    check_folder_to_write(arguments.output, "--output", problems)
    problems.raise_if_any()
    complete = arguments.output / COMPLETE
    if complete.exists():
        found = complete.read_text()
        console.say(f"{arguments.output}: already built: {found}; remove the folder to build it again")
    else:
        documents, sentences, size = build_corpus(arguments.output, arguments.max_mb, arguments.workers)
        summary = (
            f"{counted(documents, 'document')}, {counted(sentences, 'sentence')}, {size / 2**20:.1f} MB "
            f"from Python {sys.version_info.major}.{sys.version_info.minor}"
        )
        write_atomically(complete, summary)
        console.say(f"{arguments.output}: {summary}")
    if arguments.labelled is not None and not arguments.labelled.exists():
        arguments.labelled.parent.mkdir(parents=True, exist_ok=True)
        console.say(f"{arguments.labelled}: {counted(write_labelled(arguments.labelled, arguments.workers), 'row')}")
    return 0


if __name__ == "__main__":
    run_command(main)
