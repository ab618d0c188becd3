"""What a new pin would change, told before anything is."""

from __future__ import annotations

import repin


def test_changed_files_are_told_with_their_sizes(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "same").write_text("a\n")
    (old / "other").write_text("a\nb\nc\n")
    (new / "other").write_text("a\nx\ny\nc\n")
    (old / "gone").write_text("a\n")
    (new / "added").write_text("a\n")
    assert repin.changed(old, new, ["same", "other", "gone", "added", "neither"]) == ["other: +2 -1", "gone: is gone", "added: is new"]


def test_the_release_that_is_pinned(capsys):
    """Nothing has changed, and every patch fits."""
    import fork

    pinned = fork.Fork.load()
    before = (pinned.folder / "pin.json").read_bytes()
    assert repin.main(["--look", pinned.version, pinned.sha256]) == 0
    out = capsys.readouterr().out
    assert "0 of " in out and "every patch fits" in out and f"-> {pinned.version}" in out
    assert (pinned.folder / "pin.json").read_bytes() == before
