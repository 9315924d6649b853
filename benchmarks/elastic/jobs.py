"""The jobs that are measured on fewer devices than they have ranks, and what is asked of their proxies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import BenchmarkError
from benchmarks.proxy.sides import Side

SCRIPT = "replicas.py"
WAYS = (2, 4, 8)
WARM_STEPS = 6


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A job of `replicas.py`.

    Attributes:
        fields: how it is made.
        weighs: the optimizer, which all ranks share, takes so much of the step that sharing must save time.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    weighs: bool = False


def _job(model: str, optimizer: str, *, weighs: bool = False, **more: Any) -> ElasticJob:
    return ElasticJob({"model": model, "optimizer": optimizer, **more}, weighs)


OVERHEAD = {
    "mlp_sgd": _job("mlp", "sgd"),
    "mlp_adamw_foreach": _job("mlp", "foreach", weighs=True),
    "mlp_adamw_fused": _job("mlp", "fused"),
    "cnn_sgd": _job("cnn", "sgd"),
    "cnn_adamw_foreach": _job("cnn", "foreach"),
    "gpt_64_sgd": _job("gpt_64", "sgd"),
    "gpt_64_adamw_foreach": _job("gpt_64", "foreach"),
    "gpt_64_adamw_fused": _job("gpt_64", "fused"),
    "gpt_64_bf16": _job("gpt_64", "fused", bf16=True),
    "gpt_256_adamw_foreach": _job("gpt_256", "foreach", weighs=True),
    "gpt_256_adamw_fused": _job("gpt_256", "fused", weighs=True),
    "lstm_sgd": _job("lstm", "sgd"),
    "lstm_adamw_foreach": _job("lstm", "foreach"),
}
COPIES = {
    "foreach": _job("gpt_64", "foreach"),
    "fused": _job("gpt_64", "fused"),
    "loop": _job("gpt_64", "loop"),
    "sgd": _job("gpt_64", "sgd"),
    "plain_gradients": _job("gpt_64", "foreach", bucket_view=False),
    "clip": _job("gpt_64", "foreach", clip=True),
    "fused_clip": _job("gpt_64", "fused", clip=True),
    "ema": _job("gpt_64", "foreach", ema=True),
    "accumulation": _job("gpt_64", "foreach", accumulate=2),
    "bf16": _job("gpt_64", "fused", bf16=True),
    "mlp": _job("mlp", "foreach"),
    "lstm": _job("lstm", "foreach"),
}
BYTES = (
    "mlp_adamw_foreach",
    "cnn_adamw_foreach",
    "gpt_64_sgd",
    "gpt_64_adamw_fused",
    "gpt_64_bf16",
    "lstm_adamw_foreach",
)
PEAK = ("mlp_adamw_foreach", "gpt_64_adamw_foreach", "gpt_256_adamw_fused")


def splice_stats(side: Side) -> dict[str, int]:
    """Counters of the only proxy of a side whose ranks share it.

    Raises:
        BenchmarkError: they do not share.
    """
    (proxy,) = side.proxies
    counted = proxy.stats().get("splice")
    if counted is None:
        raise BenchmarkError("Ranks are on one device and do not share: is ERGO_SPLICE off?")
    return {name: value for name, value in counted.items() if name != "unshared"}  # which is operators' names
