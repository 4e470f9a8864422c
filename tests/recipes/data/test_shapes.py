"""Scenes of shapes: what is seen and unseen, captions and pictures of them."""

import io

import numpy as np
import pytest
from PIL import Image

from recipes.data.draws import rng_at
from recipes.data.shapes import (
    COLORS,
    FORMS,
    PLACES,
    UNSEEN,
    Shape,
    check_image_size,
    choose_seen,
    choose_unseen,
    draw_picture,
    encode_png,
    is_unseen,
    list_scenes,
    read_caption,
    write_caption,
)


def test_ten_of_96_combinations_are_unseen_and_leave_each_color_form_and_place_to_training() -> None:
    assert len(UNSEEN) == 10
    seen = {Shape(color, form, place) for color in COLORS for form in FORMS for place in PLACES} - UNSEEN
    assert len(seen) == 86
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pairs = {(shape[one], shape[other]) for shape in seen}
        assert len(pairs) == (16 if one == 1 else 24), "every two of them are seen together"


def test_no_scene_of_training_has_an_unseen_combination_and_each_different_one_of_the_validation_has() -> None:
    training, held_out = choose_seen(3000), choose_unseen(512)
    assert all(UNSEEN.isdisjoint(scene) for scene in training)
    assert all(not UNSEEN.isdisjoint(scene) for scene in held_out)
    assert len({*held_out}) == 512
    assert held_out[:100] == choose_unseen(100)
    assert [sum(len(scene) == number for scene in training) > 800 for number in (1, 2, 3)] == [True] * 3


def test_captions_of_all_58848_scenes_differ_and_say_what_is_in_them() -> None:
    scenes = list_scenes()
    captions = [*map(write_caption, scenes)]
    assert len({*captions}) == len(scenes) == 96 + 6 * 24**2 + 4 * 24**3
    assert [read_caption(caption) for caption in captions] == scenes
    assert write_caption(read_caption("red circle top left, blue square bottom right")).startswith("red circle top")
    assert 0.2 < sum(map(is_unseen, scenes)) / len(scenes) < 0.3


def test_the_middle_of_each_shape_has_its_color_at_its_place_and_the_other_places_are_empty() -> None:
    for number, scene in enumerate(choose_seen(300)):
        picture = draw_picture(scene, rng_at(0, number), 32).astype(int)  # [32, 32, 3]
        places = picture.reshape(2, 16, 2, 16, 3).swapaxes(1, 2).reshape(4, 256, 3)  # [places, pixels, C]
        background = places[next(at for at, place in enumerate(PLACES) if place not in [s.place for s in scene]), 0]
        for place, pixels in zip(PLACES, places, strict=True):
            shape = next((shape for shape in scene if shape.place == place), None)
            if shape is None:
                assert (pixels == background).all()
                continue
            drawn = pixels[abs(pixels - background).sum(axis=1).argmax()]
            nearest = min(COLORS, key=lambda name: abs(drawn - COLORS[name]).sum())
            assert nearest == shape.color


def test_forms_have_different_areas_in_a_box_of_the_same_size() -> None:
    offsets = np.arange(-7.5, 8.0, dtype=np.float32)
    areas = {form: int((distance(offsets, offsets[:, None], 6.0) < 0).sum()) for form, distance in FORMS.items()}
    assert areas == {"circle": 112, "square": 144, "triangle": 72, "cross": 80}


def test_a_picture_is_the_same_for_seed_and_number_and_no_two_are_equal() -> None:
    scene = read_caption("white cross top left")
    pictures = [draw_picture(scene, rng_at(seed, number), 32).tobytes() for seed in (0, 1) for number in range(500)]
    assert len({*pictures}) == 1000
    assert draw_picture(scene, rng_at(1, 7), 32).tobytes() == pictures[507]


def test_pillow_reads_the_png_of_a_picture_as_it_was_drawn() -> None:
    pixels = draw_picture(read_caption("red circle top left"), rng_at(0, 0), 32)[:20]  # [20, 32, 3]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_an_odd_size_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"data\.image_size=33: .*type data\.image_size=34"):
        check_image_size(33)
