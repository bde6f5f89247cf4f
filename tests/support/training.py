"""The settings of runs of `lm` that take seconds."""

from pathlib import Path

from lm.config import ModelConfig, TrainConfig

MODEL = ModelConfig(d_model=32, d_ff=32, num_layers=2, num_heads=2, num_experts=8, top_k=2)
STEPS = 6


def tiny_run(text: Path, out: Path, **changes) -> TrainConfig:
    """The settings of a run. shard_map's programs come out of the compilation cache when a test builds one again."""
    settings = dict(
        model=MODEL,
        text=str(text),
        out=str(out),
        steps=STEPS,
        batch=8,
        seq=32,
        lr=1e-2,
        warmup=2,
        dtype="float32",
        engine="shard_map",
        eval_batches=1,
    )
    return TrainConfig(**settings | changes)
