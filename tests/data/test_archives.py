"""Archives: what they hold, and what they claim to hold."""

from __future__ import annotations

import io
import tarfile

import pytest

from kronattn.data.archives import list_files


def archive(path, *members: tuple[str, bytes, bytes]):
    with tarfile.open(path, "w") as made:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(content)
            member.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            made.addfile(member, io.BytesIO(content))
    return path


def test_files_alone_are_read_and_nothing_is_unpacked(tmp_path):
    """Links and devices are passed over; a path that leads elsewhere is a name and nothing more."""
    path = archive(
        tmp_path / "a.tar",
        ("a/1.png", tarfile.REGTYPE, b"one"),
        ("../../outside.png", tarfile.REGTYPE, b"two"),
        ("a/link.png", tarfile.SYMTYPE, b""),
        ("a/hard.png", tarfile.LNKTYPE, b""),
        ("a/device.png", tarfile.CHRTYPE, b""),
        ("a/fifo.png", tarfile.FIFOTYPE, b""),
    )
    found = {entry.name: entry.read() for entry in list_files(path)}
    # A hard link to what is not in the archive has no content of its own.
    assert found.pop("a/hard.png", b"") == b""
    assert found == {"a/1.png": b"one", "../../outside.png": b"two"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.tar"]


def test_a_file_that_claims_to_be_longer_than_the_archive(tmp_path):
    path = archive(tmp_path / "a.tar", ("a.png", tarfile.REGTYPE, b"one"))
    with tarfile.open(path) as made:
        header = made.getmembers()[0]
    header.size = 10**9
    path.write_bytes(header.tobuf() + path.read_bytes()[512:])
    with pytest.raises(ValueError, match=r"a.tar is (broken|cut off)"):
        list_files(path)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(1024, id="between two files"),
        pytest.param(1024 + 300, id="within a header"),
        pytest.param(1024 + 512 + 2, id="within a file"),
        pytest.param(2048, id="after the last file"),
    ],
)
def test_an_archive_that_is_cut_off(tmp_path, end):
    path = archive(tmp_path / "a.tar", ("a.png", tarfile.REGTYPE, b"one"), ("b.png", tarfile.REGTYPE, b"two"))
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match="a.tar is cut off or damaged: after its last whole file comes no end"):
        list_files(path)


@pytest.mark.parametrize("place", ["", "a.tar,", " "])
def test_an_empty_place_is_not_the_current_folder(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    archive(tmp_path / "a.tar", ("a.png", tarfile.REGTYPE, b"one"))
    with pytest.raises(ValueError, match="names an empty place: give a folder or a .tar archive"):
        list_files(place)


def test_no_archive(tmp_path):
    for content in (b"", b"hello" * 200, bytes(100)):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(ValueError, match="a.tar is not a folder or an uncompressed .tar archive"):
            list_files(tmp_path / "a.tar")
