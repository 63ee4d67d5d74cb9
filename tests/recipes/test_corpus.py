import pytest

from recipes.corpus import CorpusError, find_files, read_documents, split_documents


def write(folder, **texts):
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def names(files):
    return [file.name for file in files]


def test_files_folders_and_globs(tmp_path):
    write(tmp_path, a="1", sub__b="2", sub__c="3", skip__d="4", **{".hidden": "5"})
    assert names(find_files(str(tmp_path))) == ["a", "d", "b", "c"]
    assert names(find_files(str(tmp_path), exclude=["skip"])) == ["a", "b", "c"]
    assert names(find_files([str(tmp_path / "a"), str(tmp_path / "s*" / "*")])) == ["a", "d", "b", "c"]
    assert names(find_files([str(tmp_path / "a"), str(tmp_path)], exclude=["sub", "skip"])) == ["a"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere.txt", r"data.path=.*nowhere.txt does not exist .*; name an existing file"),
        ("*.txt", r"data.path=.*\*\.txt matches no file .*; check the pattern"),
        (".", r"is a folder without any file to read; name one that holds text"),
    ],
)
def test_a_path_that_names_nothing_is_refused(tmp_path, entry, message):
    with pytest.raises(CorpusError, match=message):
        find_files(str(tmp_path / entry))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", r"bad is empty; remove it from data.path or leave .* data.skip_unreadable=true"),
        (b"ol\xe9", r"bad is not UTF-8 text \(byte 0xe9 at offset 2\); convert it or .* data.skip_unreadable=true"),
    ],
)
def test_an_unreadable_file_is_named_or_left_out(tmp_path, content, message):
    files = find_files(str(write(tmp_path, good="text", bad=content)))
    with pytest.raises(CorpusError, match=message):
        read_documents(files)
    assert [d.path.name for d in read_documents(files, skip_unreadable=True)] == ["good"]


def test_nothing_but_unreadable_files_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="holds any text"):
        read_documents(find_files(str(write(tmp_path, bad=b""))), skip_unreadable=True)


def test_equal_content_counts_once(tmp_path):
    documents = read_documents(find_files(str(write(tmp_path, a="same", b="same", c="other"))))
    assert [document.path.name for document in documents] == ["a", "c"]


def corpus(folder, count):
    return read_documents(
        find_files(str(write(folder, **{f"doc{i:03}": f"document {i}\n" * 10 for i in range(count)})))
    )


def test_every_document_is_on_one_side(tmp_path):
    documents = corpus(tmp_path, 100)
    split = split_documents(documents, 0.1)
    assert 8 <= len(split.validation) <= 10
    assert sorted(d.digest for d in split.train + split.validation) == sorted(d.digest for d in documents)


def test_the_side_follows_the_content_not_the_name(tmp_path):
    def validation_texts(folder):
        return {d.read() for d in split_documents(read_documents(find_files(str(folder))), 0.2).validation}

    before, after = tmp_path / "before", tmp_path / "after"
    corpus(before, 50)
    after.mkdir()
    for index, file in enumerate(sorted(before.iterdir(), reverse=True)):
        (after / f"{index:03}").write_bytes(file.read_bytes())
    assert validation_texts(before) == validation_texts(after)


def test_few_documents_still_leave_one_to_validate(tmp_path):
    split = split_documents(corpus(tmp_path, 2), 0.05)
    assert (len(split.train), len(split.validation)) == (1, 1)


def test_a_single_document_is_cut_at_the_end_of_a_line(tmp_path):
    text = "".join(f"línea {i}\n" for i in range(100))
    split = split_documents(read_documents(find_files(str(write(tmp_path, a=text)))), 0.1)
    head, tail = split.train[0].read(), split.validation[0].read()
    assert head + tail == text
    assert head.endswith("\n")
    assert 0 < len(tail) <= 0.1 * len(text)


def test_a_single_line_cannot_be_cut(tmp_path):
    documents = read_documents(find_files(str(write(tmp_path, a="one line"))))
    with pytest.raises(CorpusError, match=r"/a is the only document .* add a second file to data.path"):
        split_documents(documents, 0.1)


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_the_fraction_is_a_fraction(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"data.val_fraction={fraction} must lie between 0 and 1"):
        split_documents(corpus(tmp_path, 3), fraction)
