"""Files made wrong: by bytes, and by the structure of their kind. Everything follows from the generator's seed."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from PIL import Image

# Numbers at the edges of what fields hold.
_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
_TEXTS = (
    "",
    "nan",
    "-1",
    "1e309",
    "[",
    "{",
    "é\u202e",
    "\x00",
    "../../outside",
    "/etc/passwd",
    "~",
    "!!python/object",
    "9" * 400,
)


def by_bytes(data: bytes, draw: Random) -> tuple[str, bytes]:
    """What was done, and the result."""
    kinds: dict[str, Callable[[bytearray, Random], bytearray]] = {
        "cut": lambda b, r: b[: r.randrange(len(b) + 1)],
        "bits": _bits,
        "number": _number,
        "hole": lambda b, r: b[: (at := r.randrange(len(b)))] + b[at + r.randrange(1, 64) :],
        "twice": lambda b, r: b[: (at := r.randrange(len(b)))] + b[max(0, at - r.randrange(1, 256)) :],
        "noise": lambda b, r: b[: (at := r.randrange(len(b)))] + r.randbytes(r.randrange(1, 64)) + b[at:],
        "other": lambda b, r: bytearray(r.choice([b"", b"\x00" * 99, b"hello", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n"])),
    }
    kind = draw.choice(list(kinds))
    return kind, bytes(kinds[kind](bytearray(data or b"\x00"), draw))


def _bits(data: bytearray, draw: Random) -> bytearray:
    # Where formats keep what matters: near the beginning, more often than not.
    reach = len(data) if draw.random() < 0.4 else min(len(data), 256)
    for _ in range(draw.choice([1, 1, 4, 32])):
        data[draw.randrange(reach)] ^= 1 << draw.randrange(8)
    return data


def _number(data: bytearray, draw: Random) -> bytearray:
    width, order = draw.choice([1, 2, 4, 8]), draw.choice(["<", ">"])
    at = draw.randrange(max(1, min(len(data), 512) - width))
    packed = struct.pack(f"{order}Q", draw.choice(_EDGES))
    data[at : at + width] = packed[:width] if order == "<" else packed[-width:]
    return data


def value_in(tree: Any, draw: Random) -> Any:
    """A copy of nested dictionaries and lists with one of its values, keys or entries made another."""
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        key = draw.choice(sorted(tree, key=str))
        changed = dict(tree)
        action = draw.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.2:
            changed[draw.choice(_TEXTS)] = changed.pop(key)
        else:
            changed[key] = value_in(changed[key], draw)
        return changed
    if isinstance(tree, list) and tree and draw.random() < 0.7:
        at = draw.randrange(len(tree))
        return [*tree[:at], value_in(tree[at], draw), *tree[at + 1 :]]
    return draw.choice([None, True, -1, 0, 1.5, float("nan"), 10**6, 2**63, [], {}, ["a"], {"a": 1}, *_TEXTS])


def recipe(tree: dict[str, Any], draw: Random) -> tuple[str, bytes]:
    import yaml

    for _ in range(draw.choice([1, 1, 2, 4])):
        tree = value_in(tree, draw)
    text = yaml.safe_dump(tree, allow_unicode=True)
    if draw.random() < 0.15:
        hostile = draw.choice(
            [
                "model: !!python/object/apply:os.system ['touch outside']\n",
                "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nmodel: *c\n",
                "model: {name: " + "[" * 3000 + "]" * 3000 + "}\n",
                "\ufeffmodel: {name: kanet_kv}\n",
                "model: *nothing\n",
                "--- a\n--- b\n",
            ]
        )
        return "structure", hostile.encode()
    return "structure", text.encode("utf-8", "surrogatepass")


def safetensors(data: bytes, draw: Random) -> tuple[str, bytes]:
    """The header, which is JSON, with another value in it."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    if draw.random() < 0.5 and "__metadata__" in header:
        described = {name: json.loads(text) for name, text in header["__metadata__"].items()}
        described = value_in(described, draw)
        metadata = {str(n): json.dumps(v) for n, v in described.items()} if isinstance(described, dict) else described
        header["__metadata__"] = metadata
    else:
        header = value_in(header, draw)
    text = json.dumps(header).encode()
    claimed = len(text) if draw.random() < 0.9 else draw.choice([0, 2**40, 2**63, len(text) + 1])
    return "structure", struct.pack("<Q", claimed) + text + data[8 + length :]


class _Touch:
    """What executes when it is unpickled, where it is unpickled carelessly."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("outside", "w")


def checkpoint(data: bytes, draw: Random) -> tuple[str, bytes]:
    """The zip archive with a member changed, left out or doubled, or with pickled code."""
    source = zipfile.ZipFile(io.BytesIO(data))
    names = source.namelist()
    chosen = draw.choice([*names, next(name for name in names if name.endswith("data.pkl"))])
    action = draw.choice(["member", "without", "code", "path"])
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            content = source.read(name)
            if name == chosen and action == "without":
                continue
            if name == chosen and action == "member":
                content = by_bytes(content, draw)[1]
            if action == "code" and name.endswith("data.pkl"):
                content = pickle.dumps({"state_dict": _Touch()}, protocol=2)
            archive.writestr(f"../{name}" if name == chosen and action == "path" else name, content)
    return "structure", target.getvalue()


def archive(data: bytes, draw: Random) -> tuple[str, bytes]:
    """The tar archive with members that point elsewhere, are no files, or claim another size."""
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source:
        members = [(member, source.extractfile(member).read() if member.isfile() else b"") for member in source]
    chosen = draw.randrange(len(members))
    action = draw.choice(["outside", "absolute", "link", "hard link", "device", "fifo", "content", "twice", "size"])
    with tarfile.open(fileobj=target, mode="w") as made:
        for index, (member, content) in enumerate(members):
            if index == chosen:
                if action in ("outside", "absolute"):
                    member.name = ("../../outside/" if action == "outside" else "/tmp/kronattn-outside/") + member.name
                elif action in ("link", "hard link"):
                    member.type = tarfile.SYMTYPE if action == "link" else tarfile.LNKTYPE
                    member.linkname, member.size, content = draw.choice(["/etc/passwd", "../../x", "."]), 0, b""
                elif action in ("device", "fifo"):
                    member.type = tarfile.CHRTYPE if action == "device" else tarfile.FIFOTYPE
                    member.size, content = 0, b""
                elif action == "content":
                    content = by_bytes(content, draw)[1]
                    member.size = len(content)
                elif action == "twice":
                    made.addfile(member, io.BytesIO(content))
            made.addfile(member, io.BytesIO(content))
    made_bytes = target.getvalue()
    return "structure", by_bytes(made_bytes, draw)[1] if action == "size" else made_bytes


def image(data: bytes, draw: Random) -> tuple[str, bytes]:
    """An image of another kind, or of sizes and modes that hardly anyone expects; bombs among them."""
    action = draw.choice(["mode", "thin", "bomb", "frames", "kind", "orientation"])
    picture, stream = Image.open(io.BytesIO(data)), io.BytesIO()
    if action == "bomb":
        return "bomb", _bomb(draw)
    if action == "mode":
        mode = draw.choice(["1", "L", "LA", "P", "RGBA", "I;16", "I", "CMYK"])
        picture.convert("I" if mode == "I;16" else mode).save(stream, "TIFF" if mode == "CMYK" else "PNG")
    elif action == "thin":
        picture.resize(draw.choice([(1, 1), (1, 3000), (3000, 1), (2, 2)])).convert("RGB").save(stream, "PNG")
    elif action == "frames":
        frames = [picture.convert("P").resize((8, 8))] * draw.choice([2, 300])
        frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    elif action == "kind":
        picture.convert("RGB").save(stream, draw.choice(["BMP", "PPM", "TIFF", "WEBP", "GIF", "ICO", "JPEG2000"]))
    else:
        tags = Image.Exif()
        tags[274] = draw.choice([0, 3, 6, 8, 9, 60000])
        picture.convert("RGB").save(stream, "JPEG", exif=tags)
    return "structure", stream.getvalue()


def _bomb(draw: Random) -> bytes:
    """A PNG that claims to be very large; its data is short."""
    import zlib

    width, height = draw.choice([(65535, 65535), (2**31 - 1, 1), (30000, 30000), (1, 2**31 - 1)])

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\x00" * 10**6)
    text = zlib.compress(b"a" * 10**7) if draw.random() < 0.3 else b""
    extra = chunk(b"zTXt", b"x\x00\x00" + text) if text else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


STRUCTURES: dict[str, Callable[[bytes, Random], tuple[str, bytes]]] = {
    "image": image,
    "mask": image,
    "archive": archive,
    "checkpoint": checkpoint,
    "safetensors": safetensors,
}
