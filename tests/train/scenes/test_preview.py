from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.preview import main
from tests.sprites import known_textures


def test_preview_writes_a_sheet_of_all_scenes(
    atlas: SpriteAtlas, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kestrel.train.scenes.preview.upload_atlas", known_textures)
    atlas.save(tmp_path / "atlas.npz")
    out = tmp_path / "new" / "sheet.png"
    main(f"--n 5 --height 64 --width 96 --preset easy --atlas {tmp_path}/atlas.npz --out {out}".split())
    with Image.open(out) as sheet:
        assert sheet.width >= 4 * 96
        assert sheet.height >= 2 * 64
    assert f"5 scenes in {out}" in capsys.readouterr().out


def test_preview_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--n", "0"])
    assert "at least 1 (got 0)" in capsys.readouterr().err
