"""Time of bare matrix products in PyTorch: the floor of a decode step of the peers that run on it."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.peers.protocol import seconds_of


def chain_seconds(
    shapes: Sequence[tuple[int, int, int]], repeats: int, pack: Callable[[Any], Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Seconds of one pass over products of `(rows, d_in, d_out)`, each with weights of its own, float32.

    Args:
        shapes: in the order of the pass.
        repeats: passes that are timed.
        pack: what the peer makes of a weight `[d_out, d_in]`, to be called with the rows; by default `linear`.
    """
    import torch

    def plain(weight: Any) -> Callable[[Any], Any]:
        return lambda x: torch.nn.functional.linear(x, weight)

    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        inputs = [torch.randn(rows, d_in, generator=generator) for rows, d_in, _ in shapes]
        weights = [torch.randn(d_out, d_in, generator=generator) for _, d_in, d_out in shapes]
        layers = [(pack or plain)(weight) for weight in weights]

        def one_pass() -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        return seconds_of(one_pass, repeats) | {"packed": pack is not None}
