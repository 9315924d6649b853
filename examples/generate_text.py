"""Lets a character GPT write text: inference only, no optimizer, no gradients.

    python examples/generate_text.py --weights out/char_gpt/weights.pt --characters 400
    python examples/generate_text.py --characters 200  # random weights, from --seed

Every rank writes its own text. Characters are drawn on the CPU from the device's logits, so that the device draws no
random number; ``--draw device`` draws there instead.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from _report import say
from char_gpt import CharGPT, encode


def load_model(args: argparse.Namespace) -> CharGPT:
    """The trained model if weights are given (its size follows from their shapes), else one with random weights."""
    if args.weights is None:
        torch.manual_seed(args.seed)
        return CharGPT(args.d_model, args.layers, args.context)
    weights = torch.load(args.weights, map_location="cpu", weights_only=True)
    context, d_model = weights["position.weight"].shape
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    model = CharGPT(d_model, layers, context)
    model.load_state_dict(weights)
    return model


@torch.inference_mode()
def generate(model: CharGPT, args: argparse.Namespace, device: torch.device, seed: int) -> str:
    """Continues the prompt character by character."""
    generator = torch.Generator(device if args.draw == "device" else "cpu").manual_seed(seed)
    tokens = encode(args.prompt).to(device)
    for _ in range(args.characters):
        logits = model(tokens[-model.context :].unsqueeze(0))[0, -1] / args.temperature
        if args.draw == "host":
            logits = logits.cpu()
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, token.to(device)])
    return bytes(tokens.tolist()).decode("ascii")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Writes text with a character GPT.")
    parser.add_argument("--weights", type=Path, help="weights.pt of char_gpt.py; without it random weights are used")
    parser.add_argument("--characters", type=int, default=200)
    parser.add_argument("--prompt", default="import ")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--draw", choices=["host", "device"], default="host", help="where characters are drawn")
    parser.add_argument("--context", type=int, default=64, help="without --weights")
    parser.add_argument("--d-model", type=int, default=128, help="without --weights")
    parser.add_argument("--layers", type=int, default=4, help="without --weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt must not be empty")
    return args


def main() -> None:
    args = parse_arguments()
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    model = load_model(args).to(device).eval()
    text = generate(model, args, device, seed=args.seed * 1000 + rank)
    say(ascii(text) if args.weights is None else text)
    say(f"rank {rank} text sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
