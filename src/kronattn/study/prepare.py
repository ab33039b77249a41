"""A study's data made small, to be carried to where it runs: archives of the same layout, read like the originals.

Pictures are scaled to the size that the study's file says, volumes cut off at their 0.5 and 99.5 percentiles and kept
in 256 steps; everything else is copied as it is.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from kronattn.atomic import replacing
from kronattn.data.archives import Entry, list_files
from kronattn.data.decoded import Track, decode_each, untracked
from kronattn.data.images import BadImage, decode_image, decode_with, is_image_name
from kronattn.data.volumes import SUFFIXES, Volumes, check_same_spacing
from kronattn.extras import require_library
from kronattn.study.settings import Part, Study

__all__ = ["prepare_data"]

_QUALITY = 85
# Where labels lie in the layouts of kronattn.data.segmentation: SegNet's CamVid has SPLITannot/.
_MASKS = ("masks", "annot", "SegmentationClass", "SegmentationClassAug")


def prepare_data(study: Study, data: Path, output: Path, *, track: Track = untracked) -> list[Path]:
    """Write an archive of each data set below ``output``, under the name that the study has for it."""
    wanted: dict[str, Part] = {}
    for part in study.parts:
        other = wanted.setdefault(part.path, part)
        if list(other.prepared) != list(part.prepared):
            raise ValueError(
                f"data.{part.name}.prepared is {list(part.prepared)}, but data.{other.name}, of the same {part.path}, "
                f"has {list(other.prepared)}"
            )
    written = []
    for part in wanted.values():
        written += [_prepare(part, source, output / source.name, track) for source in part.sources(data)]
    return written


def _prepare(part: Part, source: Path, target: Path, track: Track) -> Path:
    if target.resolve() == source.resolve():
        raise ValueError(f"--prepare would write over {source}: give another folder")
    entries = list_files(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary, tarfile.open(temporary, "w") as archive:
        contents = decode_each(lambda at: _smaller(entries[at], part), len(entries), track, f"Preparing {part.path}")
        for entry, content in zip(entries, contents, strict=True):
            about = tarfile.TarInfo(entry.name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return target


def _smaller(entry: Entry, part: Part) -> bytes:
    name = PurePosixPath(entry.name)
    if entry.name.lower().endswith(SUFFIXES):
        return _fewer_steps(entry) if "images" in name.parts else entry.read()
    if not is_image_name(entry.name) or not part.prepared:
        return entry.read()
    height, width = part.prepared
    buffer = io.BytesIO()
    if any(folder.endswith(_MASKS) for folder in name.parent.parts):
        # Labels as they are: a nearest neighbour invents none.
        mask = decode_with(
            lambda image: image.resize((width, height), Image.Resampling.NEAREST), entry.read(), str(entry)
        )
        mask.save(buffer, "PNG", optimize=True)
    else:
        image = decode_image(entry.read(), str(entry)).resize((width, height), Image.Resampling.LANCZOS)
        image.save(buffer, "WEBP", quality=_QUALITY)
    return buffer.getvalue()


def _fewer_steps(entry: Entry) -> bytes:
    nibabel: Any = require_library("nibabel", "NIfTI volumes")
    # By itself it has one spacing: what is no volume, or broken, is refused as it is before training.
    check_same_spacing([Volumes([entry], [], None)])
    data = entry.read()
    image = nibabel.Nifti1Image.from_bytes(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    voxels = np.asarray(image.dataobj, dtype=np.float32)
    if not np.isfinite(voxels).all():
        raise BadImage(f"{entry} holds values that are no numbers (NaN or infinite)")
    low, high = np.percentile(voxels, (0.5, 99.5))
    steps = ((voxels.clip(low, high) - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8)
    smaller = nibabel.Nifti1Image(steps, image.affine)
    smaller.header.set_zooms(image.header.get_zooms())
    # Compressed like the file that it takes the place of.
    content = smaller.to_bytes()
    return gzip.compress(content, mtime=0) if entry.name.lower().endswith(".gz") else content
