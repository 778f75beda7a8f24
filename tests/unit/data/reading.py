"""Two documents, and how a file's documents are read."""

from collections import Counter
from pathlib import Path

from data.text.documents import read_documents
from data.text.sources import Source, find_sources

DOCUMENTS = [
    ["The first sentence stands here.", "Here is the second one."],
    ["Another document begins.", "It ends too."],
]
LINES = "\n\n".join("\n".join(document) for document in DOCUMENTS) + "\n"


def documents_of(path: Path | str, counts: Counter[str] | None = None, **options: str) -> list[list[str]]:
    found = find_sources([str(path)], options.pop("layout", "auto"))
    settings_ = {"language": "en", "text_field": "text", **options}
    counts = Counter() if counts is None else counts
    return [document.sentences for source in found for document in read_documents(source, counts, **settings_)]  # type: ignore[arg-type]


def whole_documents(sources: list[Source]) -> list[list[str]]:
    """Parts put together again: one that goes on belongs to the document before it, unless that has ended."""
    documents: list[list[str]] = []
    is_open = False
    for source in sources:
        for part in read_documents(source, Counter(), language="en", text_field=""):
            if part.goes_on and is_open:
                documents[-1].extend(part.sentences)
            else:
                documents.append(list(part.sentences))
            is_open = not part.ends
    return documents
