"""Two documents, and how the documents of a file are read."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from data.text.documents import Document, read_documents, unpack
from data.text.sources import Source, find_sources
from data.text.tables import count_shards

DOCUMENTS = [
    ["The first sentence stands here.", "Here is the second one."],
    ["Another document begins.", "It ends too."],
]
LINES = "\n\n".join("\n".join(document) for document in DOCUMENTS) + "\n"


def documents_of(path: Path | str, counts: Counter[str] | None = None, **options: str) -> list[list[str]]:
    """Read a file as a preparation does: a stream is unpacked first."""
    counts = Counter() if counts is None else counts
    settings = {"language": "en", "text_field": "text", **options}
    found: list[list[str]] = []
    for source in find_sources([str(path)], settings.pop("layout", "auto")):
        with tempfile.NamedTemporaryFile() as unpacked:
            if source.is_stream:
                for number in range(count_shards(source.path) if source.is_named else 1):
                    stream = source._replace(start=number, stop=number + 1) if source.is_named else source
                    unpacked.writelines(content for content, _ in unpack(stream, counts, settings["text_field"]))
                unpacked.flush()
                source = Source(unpacked.name, source.unpacked_format)
            found += [document.sentences for document in read_documents(source, counts, **settings)]
    return found


def whole_documents(sources: Iterable[Source]) -> list[list[str]]:
    """The documents of some sources in order, with continuations appended."""
    documents: list[list[str]] = []
    for source in sources:
        parts: list[Document] = list(read_documents(source, Counter(), language="en", text_field=""))
        assert not parts or not parts[0].is_continuation, "a source reads whole documents"
        for part in parts:
            if part.is_continuation:
                documents[-1].extend(part.sentences)
            else:
                documents.append(list(part.sentences))
    return documents
