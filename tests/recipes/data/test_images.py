"""Images of folders, tables and shards: the same samples from each, in any process, and bad ones named or skipped."""

import io
import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformed_images import make_transform

from recipes.data.draws import DrawnSamples, rng_at
from recipes.data.image_folder import ImageFolder
from recipes.data.image_shards import ImageShards
from recipes.data.image_table import ImageTable
from recipes.data.images import Names
from recipes.errors import ConfigError

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")
CLASSES = ("ant", "bee", "cat")
NUM_OF_EACH = 8


def transform(**settings):
    known = {"crop": "padded", "padding": 2, "color_jitter": 0.2, "eval_crop": 1.0}
    return make_transform(**known | settings)


def common():
    return {"val_fraction": 0.25, "transform": transform(), "on_bad_image": "error"}


def folder_of(path, **settings):
    return ImageFolder(**{"path": str(path), "val_path": None} | common() | settings)


def table_of(path, **settings):
    known = {"path": str(path), "image": "image", "targets": "label", "target_kind": "classes", "separator": None}
    known |= {"val_path": None, "split": "train", "val_split": None, "cache_dir": str(Path(path).parent / "cache")}
    return ImageTable(**known | common() | settings)


def shards_of(path, **settings):
    known = {"path": str(path), "targets": "cls", "target_kind": "classes", "separator": None, "val_path": None}
    return ImageShards(**known | {"cache_dir": str(Path(path).parent / "cache")} | common() | settings)


def noise(seed):
    pixels = np.random.default_rng(seed).integers(256, size=(12, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def images():
    """Return the images of each class by name."""
    return {
        (name, number): noise(8 * label + number) for label, name in enumerate(CLASSES) for number in range(NUM_OF_EACH)
    }


@pytest.fixture
def folder(tmp_path, images):
    for (name, number), data in images.items():
        file = tmp_path / "photos" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "photos"


def write_shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path, images):
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        members = []
        for number, ((name, _), data) in enumerate(images.items()):
            if number % 2 == shard:
                fields = {"name": name, "tags": [name, "animal"], "size": number}
                members += [(f"{number}.png", data), (f"{number}.cls", str(CLASSES.index(name)).encode())]
                members += [(f"{number}.json", json.dumps(fields).encode())]
        write_shard(tmp_path / "shards" / f"{shard}.tar", members)
    return tmp_path / "shards"


@pytest.fixture
def table(folder):
    path = folder.parent / "table.csv"
    rows = [f"photos/{name}/{number}.png,{name}" for name in CLASSES for number in range(NUM_OF_EACH)]
    path.write_text("\n".join(["image,label", *rows]) + "\n")
    return path


def all_samples(source):
    """Return what validation sees of every image: a set of (bytes of the inputs, name of the class)."""
    source.prepare()
    names = source.class_names
    samples = [split[index] for split in (source.train(), source.val()) for index in range(len(split))]
    return sorted((sample["inputs"].numpy().tobytes(), names[int(sample["targets"])]) for sample in samples)


def mistake(source):
    with pytest.raises(ConfigError) as caught:
        source.prepare()
    return str(caught.value)


def test_a_folder_a_table_and_shards_have_the_same_samples(folder, table, shards):
    from_folder = all_samples(folder_of(folder))
    assert len(from_folder) == len(CLASSES) * NUM_OF_EACH
    assert all_samples(table_of(table)) == from_folder
    assert all_samples(shards_of(shards, targets="name")) == from_folder


def test_shards_in_a_store_are_read_without_a_copy_of_them(shards):
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe(f"/letters/{file.name}", file.read_bytes())
    cache = str(shards.parent / "cache")
    local, remote = shards_of(shards), shards_of("memory://letters", cache_dir=cache)
    assert all_samples(remote) == all_samples(local)
    copied = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    assert copied < sum(file.stat().st_size for file in shards.iterdir()) / 2


def test_a_changed_shard_is_listed_anew_and_others_are_not(shards):
    shards_of(shards).prepare()
    lists = {*(shards.parent / "cache" / "image_shards").iterdir()}
    write_shard(shards / "1.tar", [("9.png", noise(99)), ("9.cls", b"2")])
    source = shards_of(shards)
    source.prepare()
    new = {*(shards.parent / "cache" / "image_shards").iterdir()} - lists
    assert len([path for path in new if path.is_dir()]) == 1
    assert len(source.train()) + len(source.val()) == 12 + 1


def test_rows_hold_bytes_as_a_hub_dataset_does(tmp_path, folder, images):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    cells = [{"bytes": data, "path": None} for data in images.values()]
    rows = arrow.table({"image": cells, "label": [CLASSES.index(name) for name, _ in images]})
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
    source = table_of(tmp_path / "t.parquet")
    source.prepare()
    assert source.class_names == ["0", "1", "2"]
    numbered = [(inputs, CLASSES[int(number)]) for inputs, number in all_samples(source)]
    assert sorted(numbered) == all_samples(folder_of(folder))


def test_the_split_does_not_change_when_images_are_added(folder):
    before = folder_of(folder)
    before.prepare()
    for number in range(50, 60):
        (folder / "ant" / f"{number}.png").write_bytes(noise(number))
    after = folder_of(folder)
    after.prepare()

    def names(images):
        return {images._split.store.name(int(number)) for number in images._split.numbers}

    assert names(before.val()) <= names(after.val())
    assert names(before.train()) <= names(after.train())


def test_labels_and_values_are_rows_of_numbers(shards):
    labels = shards_of(shards, targets="tags", target_kind="labels")
    labels.prepare()
    assert labels.class_names == ["animal", "ant", "bee", "cat"]
    sample = labels.train()[0]
    assert sample["targets"].dtype == torch.float32
    assert sample["targets"].sum() == 2
    assert sample["targets"][0] == 1
    values = shards_of(shards, targets="size", target_kind="values")
    values.prepare()
    assert values.class_names is None
    both = torch.cat([split._split.targets for split in (values.train(), values.val())])
    assert sorted(both.squeeze(1).tolist()) == list(range(24))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_loader_processes_draw_the_same_samples_with_the_same_strides(folder, num_workers):
    source = folder_of(folder)
    source.prepare()
    drawn = DrawnSamples(source.train(), 5)
    pairs = [(index, 100 + index) for index in range(12)]
    alone, loaded = (
        list(DataLoader(drawn, batch_size=4, sampler=pairs, num_workers=number)) for number in (0, num_workers)
    )
    for one, other in zip(alone, loaded, strict=True):
        assert torch.equal(one["inputs"], other["inputs"])
        assert torch.equal(one["targets"], other["targets"])
        assert one["inputs"].stride() == other["inputs"].stride() == (192, 64, 8, 1)
    first = source.train().sample(0, rng_at(5, 100))["inputs"]
    assert torch.equal(alone[0]["inputs"][0], first)
    assert not torch.equal(source.train().sample(0, rng_at(5, 101))["inputs"], first)


def test_a_bad_image_is_named(folder):
    (folder / "bee" / "3.png").write_bytes(noise(3)[:60])
    source = folder_of(folder, val_path=str(folder))
    source.prepare()
    with pytest.raises(ConfigError) as caught:
        [source.train()[index] for index in range(len(source.train()))]
    assert caught.value.setting == str(folder / "bee" / "3.png")
    assert caught.value.reason.startswith("it is damaged: ")
    assert caught.value.fix.startswith("data.on_bad_image=skip")


def test_skipped_images_are_replaced_by_the_next_and_counted_in_loader_processes(folder, caplog):
    for name in ("bee/3.png", "bee/4.png", "cat/7.png", "cat/1.png"):
        (folder / name).write_bytes(noise(3)[:60])
    source = folder_of(folder, val_path=str(folder), on_bad_image="skip")
    source.prepare()
    train = source.train()
    assert source.describe_skipped() == ""
    assert torch.equal(train[8 + 3]["inputs"], train[8 + 5]["inputs"])  # and bee/4 is bad, too
    assert torch.equal(train[23]["inputs"], train[0]["inputs"])
    assert train[23]["targets"] == 0, "the target is that of the image"
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        list(DataLoader(train, batch_size=8, num_workers=2))
    assert source.describe_skipped() == (
        "4 of 24 training images could not be decoded, and the next one stood in their place"
    )
    assert [str(found[0]) for found in train.find_bad(range(8, 16))] == [
        str(folder / "bee" / "3.png"),
        str(folder / "bee" / "4.png"),
    ]


def test_a_folder_of_bad_images_is_an_error_even_if_they_are_skipped(folder):
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    source = folder_of(folder, val_path=str(folder), on_bad_image="skip")
    source.prepare()
    with pytest.raises(ConfigError, match="none of 24 images in a row can be decoded"):
        source.train()[0]


def test_names_are_texts_in_one_block():
    names = ["a", "", "ü/b.jpg", "\udcff.png"]
    packed = Names(names)
    assert [*packed] == names
    assert len(packed) == 4


def test_mistakes_in_folders_say_what_to_do(folder):
    (folder / "dog").mkdir()
    assert mistake(folder_of(folder)) == (
        f"data.path={folder}: no image is in 'dog'; images end with .bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif,"
        " .tiff, .webp; type images in every folder, or no such folder"
    )
    (folder / "dog").rmdir()
    val = folder.parent / "val"
    for name in ("ant", "eel"):
        (val / name).mkdir(parents=True)
        (val / name / "1.png").write_bytes(noise(0))
    assert mistake(folder_of(folder, val_path=str(val))) == (
        f"data.val_path={val}: it has no 'bee', 'cat' and has 'eel', which training has not; type the same folders in"
        " both"
    )
    assert "there is no such folder" in mistake(folder_of(folder / "none"))
    assert "it has no folder, and the folders in it are the classes" in mistake(folder_of(folder / "ant"))


def test_mistakes_in_tables_say_what_to_do(table):
    assert mistake(table_of(table, targets="class")) == (
        "data.targets=class: table.csv:2 has image, label; type data.targets=<one of them>"
    )
    assert mistake(table_of(table, image="file")) == (
        "data.image=file: table.csv:2 has image, label; type data.image=<one of them>"
    )
    bad = table.with_name("bad.csv")
    bad.write_text("image,label\nphotos/ant/1.png,\n")
    assert mistake(table_of(bad)).startswith("bad.csv:2: it has no label, and what is learned of a row must be there")
    bad.write_text("image,label\nnone/1.png,a\n")
    assert "there is no " in mistake(table_of(bad))
    assert "paths are relative to the table" in mistake(table_of(bad))
    bad.write_text("image,label\nhttps://example.org/1.png,a\n")
    assert "images are read from files" in mistake(table_of(bad))
    bad.write_text("image,label\nphotos/ant/1.png,rat\n")
    assert mistake(table_of(table, val_path=str(bad))) == (
        "bad.csv:2: its label is 'rat', which no row of training has; type rows of that class in training, too, or"
        " without it here"
    )
    bad.write_bytes(b"\xff\xfe\x00")
    assert mistake(table_of(bad)).startswith(f"data.path={bad}")


def test_mistakes_in_shards_say_what_to_do(shards):
    assert mistake(shards_of(shards, targets="kind")) == (
        f"data.targets=kind: {shards}/0.tar 0.json has name, tags, size; type data.targets=<one of them>"
    )
    assert "has no member 0.txt" in mistake(shards_of(shards, targets="txt"))
    whole = (shards / "1.tar").read_bytes()
    (shards / "1.tar").write_bytes(whole[: len(whole) // 2 - 100])
    assert f"data.path={shards}/1.tar: it is no .tar file that can be read" in mistake(shards_of(shards))
    write_shard(shards / "1.tar", [("1.png", noise(0)), ("1.jpg", noise(0)), ("1.cls", b"0")])
    assert "1.png and 1.jpg are images of one sample" in mistake(shards_of(shards))
    assert "no file there ends in .tar" in mistake(shards_of("memory://nothing/*.tar"))


def test_no_pillow_names_the_extra(folder, monkeypatch):
    from recipes.data import image_file

    image_file.import_pillow.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert mistake(folder_of(folder)) == (
        "data: images need Pillow, which is not installed; type pip install -e '.[vision]'"
    )


def test_another_folder_is_evaluated_as_a_whole(folder):
    whole = folder_of(folder)
    whole.hold_out_all()
    whole.prepare()
    parts = folder_of(folder)
    parts.prepare()
    assert len(whole.val()) == len(parts.train()) + len(parts.val())
    split = whole.val()._split
    assert split.numbers.tolist() == list(range(len(whole.val())))
    assert [int(target) for target in split.targets] == sorted(int(target) for target in split.targets)
