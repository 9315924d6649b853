"""Real training on one device and on a device each: losses, parameters, buffers, optimizer state, generators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy_runtime.device.client import NativeBuild, Zygote
from tests.proxy_runtime.device.splice.real import Outcome, run


@pytest.fixture(scope="module")
def rank_dir(device_build: NativeBuild) -> Path:
    by_hand = os.environ.get("ERGO_TEST_RANK_DIR")
    return Path(by_hand) if by_hand else device_build.rank_dir  # type: ignore[attr-defined]


def compare(zygote: Zygote, rank_dir: Path, tmp_path: Path, world: int, arguments: str) -> Outcome:
    alone = run(zygote, rank_dir, tmp_path / "alone", list(range(world)), arguments.split())
    spliced = run(zygote, rank_dir, tmp_path / "spliced", [0] * world, arguments.split())
    assert spliced.lines == alone.lines
    assert spliced.splice[0]["mismatches"] == 0
    return spliced


# Nothing of the model or the optimizer is ever copied.
NO_COPIES = [
    "--model gpt --clip",
    "--model gpt --clip --gbv --mode fused",
    "--model gpt --mode fused --gbv",
    "--model gpt --optimizer sgd --mode loop",
    "--model gpt --mode loop --ema",
    "--model gpt --accumulate 2 --gbv",
    "--model lstm --clip --bf16",
]
# Parts of it are each rank's own.
SHARED_IN_PART = [
    "--model mlp --optimizer sgd --clip --gbv",
    "--model mlp --no-buffers",
    "--model mlp --same-data --dropout 0",
    "--model cnn --ema --bf16",
    "--model cnn --sync-bn --optimizer rmsprop",
    "--model gpt --accumulate 2 --keep-grads",
    "--model gpt --unused --optimizer adam",
    "--model mlp --scaler --clip",
    "--model gpt --own-parameters --extra --clip",
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", NO_COPIES)
def test_what_all_ranks_have_is_kept_once_and_never_copied(
    zygote: Zygote, rank_dir: Path, tmp_path: Path, arguments: str
) -> None:
    splice = compare(zygote, rank_dir, tmp_path, 2, arguments).splice[0]
    assert (splice["copies"], splice["timeouts"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SHARED_IN_PART)
def test_ranks_that_differ_share_less_and_have_the_same_bits(
    zygote: Zygote, rank_dir: Path, tmp_path: Path, arguments: str
) -> None:
    compare(zygote, rank_dir, tmp_path, 2, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--model gpt --clip --gbv", "--model mlp --ema", "--model gpt --mode fused"])
def test_four_ranks_on_one_device(zygote: Zygote, rank_dir: Path, tmp_path: Path, arguments: str) -> None:
    compare(zygote, rank_dir, tmp_path, 4, arguments)


@pytest.mark.slow
def test_two_devices_of_two_ranks(zygote: Zygote, rank_dir: Path, tmp_path: Path) -> None:
    arguments = ["--model", "gpt", "--clip", "--width", "128"]
    alone = run(zygote, rank_dir, tmp_path / "alone", [0, 1, 2, 3], arguments)
    spliced = run(zygote, rank_dir, tmp_path / "spliced", [0, 0, 1, 1], arguments)
    assert spliced.lines == alone.lines
    assert all(counted["copies"] == 0 for counted in spliced.splice)


@pytest.mark.slow
def test_hosts_that_wait_for_one_another_do_not_stand_still(zygote: Zygote, rank_dir: Path, tmp_path: Path) -> None:
    compare(zygote, rank_dir, tmp_path, 2, "--model gpt --host-wait --clip")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "world"), [("fsdp", 2), ("tp", 2), ("pp", 2), ("hsdp", 4)])
def test_ranks_that_share_little(zygote: Zygote, rank_dir: Path, tmp_path: Path, mode: str, world: int) -> None:
    script = Path(__file__).with_name("parallel.py")
    alone = run(zygote, rank_dir, tmp_path / "alone", list(range(world)), [mode], script=script)
    spliced = run(zygote, rank_dir, tmp_path / "spliced", [0] * world, [mode], script=script)
    assert spliced.lines == alone.lines
