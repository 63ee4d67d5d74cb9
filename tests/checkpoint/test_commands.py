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


def test_faults_are_named_in_one_line(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 7)
    with pytest.raises(SystemExit, match=r"error: .* already exists"):
        main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")])
    (tmp_path / "a.ckpt" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"rank-00000.safetensors has 0 bytes, not"):
        main(["verify", str(tmp_path / "a.ckpt")])
    with pytest.raises(SystemExit, match=r"is not a sharded checkpoint: it has no manifest.json"):
        main(["inspect", str(tmp_path)])


def test_files_that_hold_no_model_are_not_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for content, said in [
        ({"weight": torch.ones(2)}, r"holds weight, but no state_dict"),
        (torch.ones(2), r"holds no tensors, but no state_dict"),
        ({"state_dict": {}, "hyper_parameters": Path("code")}, r"holds objects that only code can restore"),
        ({"state_dict": {1: torch.ones(2)}}, r"error: .*one.ckpt cannot be read as a checkpoint \(AttributeError: "),
    ]:
        torch.save(content, tmp_path / "one.ckpt")
        with pytest.raises(SystemExit, match=said):
            main(["convert", str(tmp_path / "one.ckpt"), str(tmp_path / "out"), "--config", str(tmp_path)])
    (tmp_path / "one.ckpt").write_bytes(b"none")
    with pytest.raises(SystemExit, match=r"is not a checkpoint, or was cut off"):
        main(["convert", str(tmp_path / "one.ckpt"), str(tmp_path / "out"), "--config", str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_files_that_are_cut_off_fail_verification(tmp_path: Path) -> None:
    whole, cut = tmp_path / "one.ckpt", tmp_path / "cut.ckpt"
    torch.save({"state_dict": {"weight": torch.randn(5000)}, "hyper_parameters": Path("code")}, whole)
    main(["verify", str(whole)])
    content = whole.read_bytes()
    for damaged in (b"", content[:100], content[:3000], content[:-200], content[:-20], b"hello", bytes(range(256)) * 9):
        cut.write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"error: .*cut off"):
            main(["verify", str(cut)])
