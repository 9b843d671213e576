from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.train.scenes.atlas import (
    EMOJI_FONT_FILE,
    SpriteAtlas,
    build_atlas,
    glyph_index,
    load_or_build_atlas,
    measure_proportions,
    missing_fonts,
    set_text,
    stored_proportions,
    write_proportions,
)
from kestrel.train.scenes.catalogue import CHARACTERS, KINDS, NUM_CHARACTERS, NUM_EMOJI, NUM_SPRITE_KINDS, encode_text
from kestrel.train.scenes.outlines import (
    MAX_CORNERS,
    PATH_UNITS,
    mirror_outline,
    outline_iou,
    trace_outline,
)

NUMBERS_AFTER = {"M": 2, "L": 2, "C": 6, "Z": 0}
SPRITE_KINDS = range(NUM_SPRITE_KINDS)


def test_every_sprite_and_character_is_cut_tight(atlas: SpriteAtlas):
    for alpha in [sprite[..., 3] for sprite in atlas.sprites] + list(atlas.glyphs):
        assert min(edge.max() for edge in (alpha[0], alpha[-1], alpha[:, 0], alpha[:, -1])) > 127


@pytest.mark.exhaustive
def test_sprites_are_sharp_colourful_and_different(atlas: SpriteAtlas):
    assert len(atlas.sprites) == NUM_SPRITE_KINDS
    assert len({sprite.tobytes() for sprite in atlas.sprites}) == NUM_SPRITE_KINDS
    for sprite in atlas.sprites[:NUM_EMOJI]:
        assert 60 <= min(sprite.shape[:2]) <= max(sprite.shape[:2]) <= 136
        assert len(np.unique(sprite.reshape(-1, 4), axis=0)) > 20


def test_colours_are_multiplied_by_alpha(atlas: SpriteAtlas):
    for sprite in atlas.sprites:
        assert (sprite[..., :3].max(axis=-1) <= sprite[..., 3].astype(int) + 1).all()


def test_there_are_at_least_four_fonts_of_all_characters(atlas: SpriteAtlas):
    num_fonts = len(atlas.advances)
    assert num_fonts >= 4
    assert len(atlas.glyphs) == num_fonts * NUM_CHARACTERS
    assert len({atlas.glyphs[font * NUM_CHARACTERS].tobytes() for font in range(num_fonts)}) == num_fonts
    index = glyph_index(np.array([num_fonts - 1]), np.array([CHARACTERS.index("9")]))
    assert index == [len(atlas.glyphs) - 1]


def test_saved_atlas_is_small_and_comes_back_whole(atlas: SpriteAtlas, tmp_path: Path):
    path = tmp_path / "deep" / "atlas.npz"
    atlas.save(path)
    assert path.stat().st_size <= 6_000_000
    assert [file.name for file in path.parent.iterdir()] == ["atlas.npz"]
    loaded = SpriteAtlas.load(path)
    for before, after in zip(atlas.sprites + atlas.glyphs, loaded.sprites + loaded.glyphs, strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(atlas.glyph_boxes, loaded.glyph_boxes)
    np.testing.assert_array_equal(atlas.advances, loaded.advances)
    assert atlas.outlines == loaded.outlines


def test_saved_atlas_needs_no_fonts(atlas: SpriteAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "atlas.npz"
    atlas.save(path)
    monkeypatch.setattr("kestrel.train.scenes.atlas.FONT_FOLDERS", (tmp_path,))
    assert load_or_build_atlas(path).outline(0) == atlas.outline(0)


def test_missing_font_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kestrel.train.scenes.atlas.FONT_FOLDERS", (tmp_path,))
    assert EMOJI_FONT_FILE in missing_fonts()
    with pytest.raises(ConfigError, match=r"NotoColorEmoji\.ttf .*scripts/install-fonts"):
        build_atlas()


def test_atlas_that_is_not_there_or_not_ours_is_refused(atlas: SpriteAtlas, tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no"):
        SpriteAtlas.load(tmp_path / "none.npz")
    for content in (b"", b"not an atlas at all"):
        (tmp_path / "damaged.npz").write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            SpriteAtlas.load(tmp_path / "damaged.npz")
    np.savez(tmp_path / "other.npz", catalogue=np.array("another one"))
    with pytest.raises(ConfigError, match="another catalogue"):
        SpriteAtlas.load(tmp_path / "other.npz")


def test_outlines_follow_their_sprites(atlas: SpriteAtlas):
    overlaps = {
        KINDS[kind].name: outline_iou(atlas.outline(kind), atlas.sprites[kind][..., 3] > 127) for kind in SPRITE_KINDS
    }
    worst = min(overlaps, key=lambda name: overlaps[name])
    print(f"worst outline: {worst} {overlaps[worst]:.3f}, mean {np.mean(list(overlaps.values())):.3f}")
    assert overlaps[worst] >= 0.9, worst


def test_mirrored_outlines_follow_flipped_sprites(atlas: SpriteAtlas):
    for kind in SPRITE_KINDS:
        truth = atlas.sprites[kind][:, ::-1, 3] > 127
        assert outline_iou(atlas.outline(kind, is_flipped=True), truth) >= 0.9, KINDS[kind].name
        assert mirror_outline(atlas.outline(kind, is_flipped=True)) == atlas.outline(kind)


def test_outlines_are_short_paths_of_whole_numbers(atlas: SpriteAtlas):
    for kind in SPRITE_KINDS:
        items = atlas.outline(kind).split()
        assert items[0] == "M"
        assert items[-1] == "Z"
        assert sum(not item.isalpha() for item in atlas.outline(kind).split()) <= 2 * MAX_CORNERS
        pending = 0
        for item in items:
            if item.isalpha():
                assert pending == 0
                pending = NUMBERS_AFTER[item]
            else:
                assert 0 <= int(item) <= PATH_UNITS
                pending -= 1


def test_only_sprite_kinds_have_outlines(atlas: SpriteAtlas):
    for kind in (-1, NUM_SPRITE_KINDS):
        with pytest.raises(ConfigError, match=f"got {kind}"):
            atlas.outline(kind)


def test_tracing_keeps_holes_that_matter_and_drops_specks():
    alpha = np.zeros((100, 100), np.uint8)
    alpha[:, :] = 255
    alpha[30:70, 30:70] = 0
    alpha[5:8, 5:8] = 0
    outline = trace_outline(alpha)
    assert outline.count("M") == 2
    assert outline_iou(outline, alpha > 127) > 0.98


def test_stored_proportions_fit_the_fonts(atlas: SpriteAtlas):
    measured, stored = measure_proportions(atlas), stored_proportions()
    np.testing.assert_allclose(stored.sprite_aspect, measured.sprite_aspect, rtol=0.05)
    np.testing.assert_allclose(stored.sprite_rgb, measured.sprite_rgb, atol=0.08)
    np.testing.assert_allclose(stored.glyph_boxes, measured.glyph_boxes, atol=2.5)
    np.testing.assert_allclose(stored.advances, measured.advances, atol=2.5)


def test_written_proportions_read_back(atlas: SpriteAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "proportions.json"
    measured = measure_proportions(replace(atlas, advances=atlas.advances + 1))
    write_proportions(measured, path)
    monkeypatch.setattr("kestrel.train.scenes.atlas.PROPORTIONS_PATH", path)
    stored = stored_proportions.__wrapped__()
    np.testing.assert_allclose(stored.advances, measured.advances, atol=0.01)
    np.testing.assert_allclose(stored.sprite_rgb, measured.sprite_rgb, atol=0.001)


def test_set_text_fills_its_box_in_reading_order():
    proportions = stored_proportions()
    codes = np.stack([encode_text(text) for text in ("l", "Quiz", "MOUNTAIN")])
    font = np.array([0, 2, 4])
    text = set_text(codes, font, proportions.glyph_boxes, proportions.advances)
    assert text.aspect[0] < 0.5 < 1.5 < text.aspect[1] < text.aspect[2]
    for edges, length in zip(text.edges, (1, 4, 8), strict=True):
        used = edges[:length]
        np.testing.assert_allclose(used[:, :2].min(axis=0), 0, atol=1e-9)
        np.testing.assert_allclose(used[:, 2:].max(axis=0), 1, atol=1e-9)
        assert (np.diff(used[:, 0]) > 0).all()
        assert not edges[length:].any()
