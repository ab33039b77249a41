"""Spectrograms in folds: who trains, who validates, who is tested, and what is said of folders that are wrong."""

import numpy as np
import pytest
import torch
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.data.spectrogram_augment import SpectrogramSettings, mask_bands, shift_in_time
from kronattn.data.spectrograms import decode_spectrograms, load_spectrograms


@pytest.fixture
def folder(tmp_path):
    for fold in (1, 2, 3, 4):
        for number, name in enumerate(("dog", "rain")):
            place = tmp_path / "sounds" / f"fold{fold}" / name
            place.mkdir(parents=True)
            Image.fromarray(np.full((4, 6), 10 * fold + number, np.uint8)).save(place / "a.png")
    return tmp_path


def folds_of(part):
    return sorted({entry.name.split("/")[1] for entry in part.entries})


def test_a_fold_is_tested_the_next_validates_the_others_train(folder):
    assert folds_of(load_spectrograms(str(folder), 2, "test")) == ["fold2"]
    assert folds_of(load_spectrograms(str(folder), 2, "val")) == ["fold3"]
    assert folds_of(load_spectrograms(str(folder), 2, "train")) == ["fold1", "fold4"]
    assert folds_of(load_spectrograms(str(folder), 4, "val")) == ["fold1"]


def test_decoding(folder):
    part = load_spectrograms(str(folder), 1, "test")
    found = decode_spectrograms(part, (4, 6))
    assert (part.classes, found["labels"].tolist()) == (["dog", "rain"], [0, 1])
    assert found["pixels"].shape == (2, 1, 4, 6)
    assert found["pixels"][:, 0, 0, 0].tolist() == [10, 11]


def test_a_fold_that_is_not_there(folder):
    with pytest.raises(ValueError, match="has no fold 7: it has 1, 2, 3, 4"):
        load_spectrograms(str(folder), 7, "train")


def test_sound_files_in_the_place_of_pictures(folder):
    (folder / "sounds" / "fold1" / "dog" / "bark.WAV").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"bark.WAV is a sound file: expected spectrograms as pictures, foldN/CLASS"):
        load_spectrograms(str(folder), 1, "train")


def test_no_folds(tmp_path):
    (tmp_path / "train" / "dog").mkdir(parents=True)
    Image.new("L", (6, 4)).save(tmp_path / "train" / "dog" / "a.png")
    with pytest.raises(ValueError, match="holds no folds: expected"):
        load_spectrograms(str(tmp_path), 1, "train")


def test_two_folds_are_too_few(tmp_path):
    for fold in (1, 2):
        (tmp_path / f"fold{fold}" / "dog").mkdir(parents=True)
        Image.new("L", (6, 4)).save(tmp_path / f"fold{fold}" / "dog" / "a.png")
    with pytest.raises(ValueError, match="has 2 folds: training, validation and test need 3"):
        load_spectrograms(str(tmp_path), 1, "train")


def test_another_size_names_the_file(folder):
    with pytest.raises(BadImage, match=r"a.png is 4×6 \(frequencies × times\), expected 8×6"):
        decode_spectrograms(load_spectrograms(str(folder), 1, "test"), (8, 6))


def test_a_shift_moves_columns_around_and_loses_none():
    torch.manual_seed(0)
    images = torch.arange(5.0).expand(40, 1, 2, 5)
    moved = shift_in_time(images, 0.5)
    starts = moved[:, 0, 0, 0]
    assert len(starts.unique()) == 5
    assert torch.equal(moved, torch.stack([torch.roll(x, -int(x0), -1) for x, x0 in zip(images, starts, strict=True)]))
    assert shift_in_time(images, 0) is images


def test_bands_are_blank_and_not_too_wide():
    torch.manual_seed(0)
    masked = mask_bands(torch.ones(200, 1, 20, 30), 1, 0.2)
    rows, columns = (masked == 0).all(-1).sum(-1), (masked == 0).all(-2).sum(-1)
    assert 0 < rows.max() <= 4
    assert 0 < columns.max() <= 6
    assert torch.equal(mask_bands(masked, 0, 0.2), masked)


def test_sixteen_bits_keep_their_upper_ones(folder):
    for path in folder.rglob("fold1/*/*.png"):
        Image.fromarray(np.full((4, 6), 257 * 200, np.uint16)).save(path)
    found = decode_spectrograms(load_spectrograms(str(folder), 1, "test"), (4, 6))
    assert found["pixels"].unique().tolist() == [200]


def test_colours_of_a_colour_map_are_no_levels(folder, tmp_path):
    first = next(folder.rglob("fold1/*/*.png"))
    levels = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    grey = Image.fromarray(levels).convert("RGB")
    for suffix, options in ((".png", {}), (".jpg", {"quality": 50})):
        grey.save(tmp_path / f"grey{suffix}", **options)
        first.write_bytes((tmp_path / f"grey{suffix}").read_bytes())
        found = decode_spectrograms(load_spectrograms(str(folder), 1, "test"), (4, 6))
        assert int(found["pixels"].max()) > 200
    first.unlink()
    Image.fromarray(np.stack([levels, levels[::-1], 255 - levels], axis=-1)).save(first)
    with pytest.raises(BadImage, match="png is coloured: levels must be grey values, not the colours of a colour map"):
        decode_spectrograms(load_spectrograms(str(folder), 1, "test"), (4, 6))


@pytest.mark.parametrize("bad", [{"size": (0, 4)}, {"shift": 1.5}, {"band": -0.1}, {"bands": -1}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SpectrogramSettings(**bad)
