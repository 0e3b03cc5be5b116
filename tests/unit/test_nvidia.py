from pathlib import Path

import pytest

from colocate_grpo.nvidia import WSL_DRIVER, has_nvidia_card, runtime_libraries


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], False),
        (["dev/nvidiactl", "dev/nvidia-uvm", "dev/dxg"], False),
        (["dev/nvidia0"], True),
        (["dev/nvidiactl", "dev/nvidia3"], True),
        ([str(WSL_DRIVER)], True),
    ],
)
def test_a_card_is_seen_by_what_its_driver_shows(tmp_path: Path, files: list[str], expected: bool) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_nvidia_card(tmp_path) is expected


def test_cudas_runtime_is_found_where_torchs_requirements_put_it() -> None:
    [directory] = runtime_libraries()
    assert list(directory.glob("libcudart.so.*"))
