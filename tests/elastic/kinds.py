"""The kinds of scripts that are resized, each an ordinary one, and how long it has to be for that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.harness import EXAMPLES, JOBS, ROOT, Script

SPLICE = ROOT / "tests" / "proxy_runtime" / "device" / "splice"
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Kind:
    """A script, how it is run, and what is expected of its ranks on one device.

    Attributes:
        name: unique.
        script: with its arguments.
        steps: optimizer steps that a rank makes; 0: none, and resizes come at any time.
        on_half: for each of four ranks its device of two: replicas of one shard together; empty: not looked at.
        shares_less_than: a kind whose ranks share a greater part of their calls, since these diverge.
        shows: a pattern in what each rank prints when the script really did what the kind is named for.
    """

    name: str
    script: Script
    steps: int
    on_half: tuple[int, ...] = ()
    shares_less_than: str = ""
    shows: str = ""


def _train(
    name: str,
    arguments: str = "",
    ranks: int = 2,
    *,
    batches: int = 60,
    steps: int = 60,
    less_than: str = "",
    shows: str = "",
) -> Kind:
    script = Script(SPLICE / "train.py", (*arguments.split(), "--steps", str(batches)), ranks=ranks)
    return Kind(name, script, steps, shares_less_than=less_than, shows=shows)


def _parallel(name: str, mode: str, ranks: int, on_half: tuple[int, ...] = ()) -> Kind:
    return Kind(name, Script(SPLICE / "parallel.py", (mode, "60", "--width", "2048"), ranks=ranks), 60, on_half)


def _script(name: str, path: Path, arguments: str, steps: int, ranks: int = 2) -> Kind:
    return Kind(name, Script(path, tuple(arguments.split()), ranks=ranks), steps)


_GPT = "--d-model 64 --layers 2 --context 32 --batch 4 --dropout 0.1 --log-every 20"

KINDS = {
    kind.name: kind
    for kind in (
        _script("example_char_gpt", EXAMPLES / "char_gpt.py", f"{_GPT} --steps 80 --eval-every 30", 80, ranks=4),
        _script("example_digits_cnn", EXAMPLES / "digits_cnn.py", "--steps 60", 60, ranks=4),
        _script("example_mlp_sgd", EXAMPLES / "mlp_sgd.py", "--steps 100", 100, ranks=4),
        _script("example_generate_text", EXAMPLES / "generate_text.py", "--characters 600 --draw device", 0),
        _train("accumulation_no_sync", "--model gpt --accumulate 2 --gbv"),
        _train("accumulation_kept_gradients", "--model gpt --accumulate 2 --keep-grads"),
        _train("unused_parameters", "--model gpt --unused --optimizer adam", shows="unused 20$"),
        _train("sync_batch_norm", "--model cnn --sync-bn --optimizer rmsprop"),
        _train("batch_norm_own_statistics", "--model mlp --no-buffers"),
        _train("batch_norm_broadcast", "--model cnn --optimizer sgd", ranks=4),
        _train("dropout", "--model mlp --dropout 0.5"),
        _train("scaler_overflow", "--model mlp --scaler --clip", batches=75, shows="scale 512.0 "),
        _train("scaler_overflow_fused", "--model gpt --scaler --mode fused", shows="scale 512.0 "),
        _train("clipping", "--model gpt --clip --gbv --mode fused", ranks=4, shows="clipped 60 "),
        _train("ema", "--model gpt --mode loop --ema"),
        _train("bf16_lstm", "--model lstm --clip --bf16"),
        _script("gan", HERE / "gan.py", "40", 80),
        _script("fsdp2", JOBS / "fsdp2.py", "--steps 60", 60),
        _parallel("fsdp2_4", "fsdp", 4, (0, 0, 1, 1)),
        _parallel("hsdp", "hsdp", 4, (0, 1, 0, 1)),
        _parallel("tensor_parallel", "tp", 2),
        _parallel("pipeline", "pp", 2),
        _parallel("pipeline_x_data", "pp", 4, (0, 0, 1, 1)),
        _parallel("pipeline_1f1b_x_data", "pp_1f1b", 4, (0, 0, 1, 1)),
        _parallel("tensor_x_data", "tp_dp", 4, (0, 1, 0, 1)),
        _parallel("tensor_x_fsdp", "tp_fsdp", 4, (0, 0, 1, 1)),
        _script("skewed", JOBS / "ddp_skew.py", "", 80),
        _script("subgroups", JOBS / "subgroups.py", "--epochs 20", 60, ranks=4),
        # Ranks that do the same, and others of the same script that do not.
        _train("same_data", "--model mlp --same-data --dropout 0"),
        _train("other_data", "--model mlp --dropout 0", less_than="same_data"),
        _train("other_order", "--model mlp --own-order --dropout 0", less_than="same_data"),
        _train("own_parameters", "--model gpt --clip --own-parameters", steps=120, less_than="clipping_2"),
        _train("own_work", "--model gpt --clip --extra", less_than="clipping_2"),
        _train("own_weights", "--model gpt --clip --local 4", less_than="clipping_2"),
        _train("several_optimizers", "--model gpt --clip --own-parameters --extra", steps=120, less_than="clipping_2"),
        _train("clipping_2", "--model gpt --clip"),
    )
}
QUICK = ("batch_norm_own_statistics",)
