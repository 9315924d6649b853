"""Which scripts are run, and what is expected of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One script with its arguments.

    Attributes:
        library: the distribution whose version the table shows.
        reason: why its numbers are not those of the native run; empty: they must be equal.
    """

    script: str
    library: str
    arguments: tuple[str, ...] = ()
    reason: str = ""

    @property
    def name(self) -> str:
        return " ".join((self.script, *self.arguments))


CASES = (
    Case("transformers_bert", "transformers"),
    Case("transformers_bert", "transformers", ("bf16",)),
    Case("transformers_bert", "transformers", ("checkpointing",)),
    Case("transformers_gpt2", "transformers"),
    Case("sentence_transformers_pairs", "sentence-transformers"),
    Case("lightning_module", "lightning"),
    Case("accelerate_loop", "accelerate"),
    Case("torchvision_ops", "torchvision"),
    Case("torchvision_models", "torchvision", ("resnet18",)),
    Case("torchvision_models", "torchvision", ("mobilenet_v3_small",)),
    Case("torchvision_detection", "torchvision"),
    Case("timm_models", "timm", ("vit_tiny_patch16_224",)),
    Case("timm_models", "timm", ("mobilenetv3_small_050",)),
    Case("tutorial_dcgan", "torch"),
    Case("tutorial_seq2seq", "torch"),
    Case("tutorial_dqn", "torch"),
    Case("tutorial_word_lm", "torch"),
    Case("tutorial_word_lm", "torch", ("lstm",)),
    Case("tutorial_digits", "torch"),
    Case("tutorial_vae", "torch"),
    Case("tutorial_spatial_transformer", "torch"),
    Case("tutorial_style_transfer", "torchvision"),
    Case("tutorial_char_rnn", "torch"),
    Case("tutorial_transfer_learning", "torchvision"),
    Case("tutorial_reinforce", "torch"),
    Case("tutorial_ppo", "torch"),
    Case("tutorial_time_sequence", "torch"),
    Case("tutorial_gcn", "torch"),
    Case("tutorial_moe", "torch"),
)
