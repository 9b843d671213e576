from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from kestrel.train.scenes.atlas import TEXT_FONTS, SpriteAtlas, set_text
from kestrel.train.scenes.catalogue import (
    CHARACTERS,
    COLOUR_NAMES,
    COLOUR_RGB,
    KINDS,
    NUM_EMOJI,
    NUM_SPRITE_KINDS,
    WORD,
    encode_text,
    kind_index,
)
from kestrel.train.scenes.draw import draw_backdrops, draw_batch
from kestrel.train.scenes.sampling import DOTS, GRADIENT, NOISE, NORMAL, PLAIN, STYLE_PHRASES, sample_batch
from kestrel.train.scenes.textures import NUM_LEVELS, AtlasTensors, level_for, stamps_of, upload_atlas
from kestrel.train.scenes.truth import SceneBatch
from tests.train.scenes.pictures import bare_batch, box_edges, drawn_edges, put_box, put_sprite

BLACK, WHITE, RED = (COLOUR_NAMES.index(name) for name in ("black", "white", "red"))
CPU = torch.device("cpu")


def alphas_of(put: list[SceneBatch], textures: AtlasTensors) -> NDArray[np.floating]:
    """[B, H, W] how opaque what was put is: pictures on white and on black, compared"""
    on_white, on_black = (draw_batch(batch, textures).numpy().astype(float).mean(axis=-1) for batch in put)
    return 1 - (on_white - on_black) / 255


def put_text(batch: SceneBatch, index: int, slot: int, text: str, font: int, textures: AtlasTensors, height_px: float):
    codes = encode_text(text)
    aspect = set_text(codes[None], np.array([font]), textures.glyph_boxes, textures.advances).aspect[0]
    centre = batch.width / 2 + 0.3 * font, batch.height * (slot + 0.5) / 3
    put_box(batch, index, slot, (*centre, height_px * aspect, height_px))
    batch.kind[index, slot], batch.colour[index, slot] = WORD, BLACK
    batch.text[index, slot], batch.font[index, slot] = codes, font


def test_drawing_twice_gives_the_same_pictures(textures: AtlasTensors):
    batch = sample_batch(np.arange(6), 120, 150, NORMAL)
    first, second = draw_batch(batch, textures), draw_batch(batch, textures)
    assert first.shape == (6, 120, 150, 3)
    assert first.dtype == torch.uint8
    assert torch.equal(first, second)


def test_a_picture_does_not_depend_on_its_neighbours(textures: AtlasTensors):
    together = draw_batch(sample_batch(np.arange(12), 150, 120, NORMAL), textures).int()
    for seed in range(12):
        alone = draw_batch(sample_batch(np.array([seed]), 150, 120, NORMAL), textures)[0].int()
        assert (alone - together[seed]).abs().max() <= 1


@pytest.mark.parametrize("size", [(378, 378), (16, 16), (33, 257), (200, 61)])
def test_pictures_of_any_size_hold_numbers_only(size: tuple[int, int], textures: AtlasTensors):
    batch = sample_batch(np.arange(8), *size, NORMAL)
    assert torch.isfinite(draw_backdrops(batch, CPU)).all()
    pictures = draw_batch(batch, textures)
    assert pictures.shape == (8, *size, 3)
    assert len(torch.unique(pictures)) > 30


def test_every_sprite_kind_is_drawn_tight_into_its_box(textures: AtlasTensors):
    batches = [bare_batch(NUM_SPRITE_KINDS, 160, 160, grey) for grey in (1.0, 0.0)]
    for kind in range(NUM_SPRITE_KINDS):
        for batch in batches:
            put_sprite(batch, kind, 0, kind, (80 + kind * 0.13, 78.4), 40 + kind, WHITE if kind >= NUM_EMOJI else -1)
            batch.flip[kind, 0] = kind % 2 and kind < NUM_EMOJI
    for kind, alpha in enumerate(alphas_of(batches, textures)):
        drawn, box = drawn_edges(alpha), box_edges(batches[0], kind, 0)
        assert np.abs(drawn - box).max() < 1.6, (KINDS[kind].name, drawn, box)
        assert alpha[: int(box[1]) - 2].max(initial=0) < 0.02
        assert alpha[:, : int(box[0]) - 2].max(initial=0) < 0.02


@pytest.mark.parametrize("height_px", [14.0, 30.5, 77.0, 200.0, 380.0])
def test_boxes_are_tight_at_every_size(height_px: float, textures: AtlasTensors):
    kinds = [kind_index(name) for name in ("square", "circle", "burger", "bus", "key")]
    batches = [bare_batch(len(kinds), 460, 600, grey) for grey in (1.0, 0.0)]
    for index, kind in enumerate(kinds):
        for batch in batches:
            put_sprite(batch, index, 0, kind, (299.7, 230.3), height_px, WHITE if kind >= NUM_EMOJI else -1)
    for index, alpha in enumerate(alphas_of(batches, textures)):
        difference = np.abs(drawn_edges(alpha) - box_edges(batches[0], index, 0)).max()
        assert difference < 1.3 + height_px / 128, (KINDS[kinds[index]].name, difference)


def test_every_character_of_every_font_is_drawn_tight_into_its_box(textures: AtlasTensors):
    num_fonts = len(TEXT_FONTS)
    texts = [CHARACTERS[start : start + 8] for start in range(0, len(CHARACTERS), 8)]
    batches = [bare_batch(num_fonts * len(texts), 60, 360, grey) for grey in (1.0, 0.0)]
    for batch in batches:
        for index in range(num_fonts * len(texts)):
            put_text(batch, index, 1, texts[index // num_fonts], index % num_fonts, textures, 34.0)
    for index, alpha in enumerate(alphas_of(batches, textures)):
        difference = np.abs(drawn_edges(alpha) - box_edges(batches[0], index, 1)).max()
        assert difference < 1.3, (texts[index // num_fonts], TEXT_FONTS[index % num_fonts], difference)


def test_large_text_looks_like_its_font(atlas: SpriteAtlas, textures: AtlasTensors):
    batches = [bare_batch(1, 200, 320, grey) for grey in (1.0, 0.0)]
    for batch in batches:
        put_text(batch, 0, 1, "H", 0, textures, 90.0)
    alpha = alphas_of(batches, textures)[0]
    left, top, right, bottom = drawn_edges(alpha)
    letter = Image.fromarray(atlas.glyphs[CHARACTERS.index("H")]).resize((int(right - left), int(bottom - top)))
    assert np.abs(alpha[top:bottom, left:right] - np.asarray(letter) / 255).mean() < 0.05


def test_small_sprites_are_shrunk_by_area(atlas: SpriteAtlas, textures: AtlasTensors):
    for name in ("panda", "burger", "train", "butterfly"):
        kind = kind_index(name)
        sprite = atlas.sprites[kind]
        width, height = round(20 * sprite.shape[1] / sprite.shape[0]), 20
        on_white = Image.fromarray(sprite[..., :3] + (255 - sprite[..., 3:]))
        wanted = np.asarray(on_white.resize((width, height), Image.Resampling.BILINEAR)).astype(float)
        batch = bare_batch(1, 40, 40, 1.0)
        batch.kind[0, 0] = kind
        put_box(batch, 0, 0, (8 + width / 2, 8 + height / 2, width, height))
        drawn = draw_batch(batch, textures)[0, 8 : 8 + height, 8 : 8 + width].numpy()
        assert np.abs(drawn - wanted).mean() < 8, name
        assert np.abs(drawn.mean() - wanted.mean()) < 2, name


def test_small_sprites_keep_their_look_when_they_move_by_part_of_a_pixel(textures: AtlasTensors):
    kind = kind_index("butterfly")
    batch = bare_batch(8, 48, 48, 1.0)
    for index in range(8):
        put_sprite(batch, index, 0, kind, (24 + index / 8, 24 + index / 11), 16)
    means = draw_batch(batch, textures).float().mean(dim=(1, 2))
    assert (means.amax(0) - means.amin(0)).max() < 0.35


def test_flipped_sprites_are_mirrored(textures: AtlasTensors):
    batch = bare_batch(2, 90, 90, 0.7)
    for index in range(2):
        put_sprite(batch, index, 0, kind_index("snail"), (45, 45), 61)
    batch.flip[1, 0] = True
    plain, flipped = draw_batch(batch, textures).int()
    assert (plain - flipped.flip(1)).abs().max() <= 1
    assert (plain - flipped).abs().max() > 100


def test_shapes_and_text_take_their_colour(textures: AtlasTensors):
    for colour, rgb in enumerate(COLOUR_RGB.values()):
        batch = bare_batch(1, 60, 60, 0.5)
        put_sprite(batch, 0, 0, kind_index("square"), (30, 30), 30, colour)
        assert draw_batch(batch, textures)[0, 30, 30].tolist() == list(rgb)


def test_later_slots_lie_on_top(textures: AtlasTensors):
    batch = bare_batch(1, 60, 60, 0.5)
    put_sprite(batch, 0, 0, kind_index("square"), (30, 30), 30, BLACK)
    put_sprite(batch, 0, 1, kind_index("square"), (30, 30), 10, RED)
    picture = draw_batch(batch, textures)[0]
    assert picture[30, 30].tolist() == list(COLOUR_RGB["red"])
    assert picture[20, 20].tolist() == list(COLOUR_RGB["black"])


def test_the_stamps_of_a_slot_never_share_a_pixel(textures: AtlasTensors):
    batch = sample_batch(np.arange(200), 200, 200, NORMAL)
    stamps = stamps_of(batch, textures)
    for first, end in stamps.slot_bounds():
        touched = np.zeros((200, 200, 200), np.int8)
        for scene, (left, top, right, bottom) in zip(stamps.scene[first:end], stamps.clip[first:end], strict=True):
            touched[scene, top:bottom, left:right] += 1
        assert touched.max() == 1


def test_backgrounds_have_their_style(textures: AtlasTensors):
    batch = bare_batch(len(STYLE_PHRASES), 96, 96, 0.2)
    batch.background[:] = np.arange(len(STYLE_PHRASES))
    batch.background_colours[:, 1] = 0.8
    pictures = draw_backdrops(batch, CPU)[..., 0]
    assert torch.equal(pictures[PLAIN], torch.full((96, 96), 0.2))
    assert pictures.min() >= 0.199
    assert pictures.max() <= 0.801
    for style in range(GRADIENT, DOTS + 1):
        spread = pictures[style].max() - pictures[style].min()
        assert spread > (0.2 if style == NOISE else 0.5), STYLE_PHRASES[style]
    steps = pictures[GRADIENT].diff(dim=0)
    assert steps.std() < 1e-4


def test_gradients_run_along_their_angle(textures: AtlasTensors):
    batch = bare_batch(2, 50, 80, 0.2)
    batch.background[:] = GRADIENT
    batch.background_colours[:, 1] = 0.8
    batch.angle[:] = 0, np.pi / 2
    across, down = draw_backdrops(batch, CPU)[..., 0]
    assert (across.diff(dim=1) > 0).all()
    assert across.diff(dim=0).abs().max() < 1e-5
    assert (down.diff(dim=0) > 0).all()


def test_levels_are_chosen_by_shrinking():
    levels = level_for(np.array([0.2, 1.0, 1.4, 2.0, 9.0, 1000.0]))
    assert levels.tolist() == [0, 0, 1, 2, 6, NUM_LEVELS - 1]


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws(atlas: SpriteAtlas, textures: AtlasTensors):
    on_gpu = upload_atlas(atlas, "cuda")
    batch = sample_batch(np.arange(32), 378, 378, NORMAL)
    difference = (draw_batch(batch, on_gpu).cpu().int() - draw_batch(batch, textures).int()).abs()
    assert (difference > 2).float().mean() < 1e-3
    assert torch.equal(draw_batch(batch, on_gpu), draw_batch(batch, on_gpu))
