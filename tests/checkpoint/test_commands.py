from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint.__main__ import main
from tests.checkpoint.folders import is_step, save


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a.ckpt", 7)
    main(["inspect", str(tmp_path / "a.ckpt")])
    said = capsys.readouterr().out
    assert "step 7, written by tp 2, 3 files" in said
    assert "state_dict" in said
    main(["verify", str(tmp_path / "a.ckpt")])
    main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "one.ckpt")])
    main(["verify", str(tmp_path / "one.ckpt")])
    assert is_step(torch.load(tmp_path / "one.ckpt", weights_only=True), 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "one.ckpt"]


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 7)
    with pytest.raises(SystemExit, match=r"error: .* is there already"):
        main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")])
    (tmp_path / "a.ckpt" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"rank-00000.safetensors has 0 bytes of"):
        main(["verify", str(tmp_path / "a.ckpt")])
    with pytest.raises(SystemExit, match=r"is no sharded checkpoint: it has no manifest.json"):
        main(["inspect", str(tmp_path)])
