"""How a step updates the weights, how it is computed, and what is done where it goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, number, numbers, path, positive

_FP16 = "needs a loss scale and skips steps to find one; bf16 has the range of fp32 and needs none"


@dataclass
class OptimConfig:
    """AdamW and its learning rate.

    ``base_lr``: the highest learning rate, before ``lr_rule``.
    ``lr_rule``: adaptive is the paper's Eq. 4, ``base_lr * batch_size * m_pred / m_corr / 256``, classic is
    ``base_lr * K * batch_size / 256``.
    ``lr_rates``: nominal, the rates as asked for (.6), or exact, as the integer counts give them (30/49).
    ``schedule``: half a cosine to ``min_lr``, or a tenth after each epoch of ``milestones``; a linear warm-up before.
    ``milestones``: epochs, for multistep.
    ``min_lr``: where the cosine ends, as it is, not by ``lr_rule``.
    ``warmup_lr``: where the warm-up begins, likewise.
    ``warmup_epochs``: how long it lasts.
    ``weight_decay``: of matrices, convolutions and tokens; biases and norms are left alone.
    ``betas``: how slowly the averages of gradients and of their squares forget.
    ``eps``: added to the root of the latter.
    ``clip_grad``: the most that the norm of all gradients may be; left out, they are not clipped.
    ``no_decay``: parameters that weight decay leaves alone as well, by the last part of their names.
    """

    base_lr: float = positive(1.5e-4)
    lr_rule: str = choice("adaptive", "classic")
    lr_rates: str = choice("nominal", "exact")
    schedule: str = choice("cosine", "multistep")
    milestones: list[float] = numbers(above=0)
    min_lr: float = number(0.0, least=0)
    warmup_lr: float = number(0.0, least=0)
    warmup_epochs: float = number(40.0, least=0)
    weight_decay: float = number(0.05, least=0)
    betas: list[float] = numbers(0.9, 0.95, length=2, least=0, below=1)
    eps: float = positive(1e-8)
    clip_grad: float | None = number(None, above=0)
    no_decay: list[str] = field(default_factory=list)


@dataclass
class EngineConfig:
    """How a step is computed (docs/engines.md).

    ``name``: one process; whole copies that average gradients; slices (FSDP2), or copies of them; DeepSpeed's stages.
    ``device``: auto is a GPU where there is one.
    ``precision``: of computation; parameters, gradients and moments are fp32. auto is bf16 on GPUs.
    ``grad_accum_steps``: micro-batches that make one step of ``batch_size`` images.
    ``activation_checkpointing``: recompute in the backward pass nothing, each block's MLP, all of a block but its
    matrix products, attention and convolutions, or whole blocks.
    ``compile``: transformer blocks one by one, or the whole model as one graph, which is faster and starts later.
    ``cuda_graphs`` (single, ddp): replay what is compiled as CUDA graphs, for steps that the host is the bound of.
    ``reshard_after_forward`` (fsdp, hsdp): drop a block's gathered parameters until its backward pass.
    ``blocks_per_unit`` (fsdp, hsdp): consecutive blocks whose parameters are gathered, and gradients reduced, at once.
    ``bucket_mb`` (ddp): MiB of gradients reduced at once; left out, 400 on one host and 25 across hosts.
    ``replicas`` (hsdp): copies of the sharded model, one on each host if left out.
    ``offload_optimizer`` (zero1, zero2, zero3): AdamW runs in the host's memory.
    ``deepspeed_config`` (zero1, zero2, zero3): a JSON file of DeepSpeed's keys that are not ours to decide.
    ``start_timeout``: minutes a rank waits for the others until the first step is done.
    ``step_timeout``: minutes a rank waits for the others in a later step.
    """

    name: str = choice("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
    device: str = choice("auto", "cpu", "cuda")
    precision: str = choice("auto", "fp32", "bf16", refused={"fp16": _FP16})
    grad_accum_steps: int = positive(1)
    activation_checkpointing: str = choice("none", "mlp", "selective", "full")
    compile: str = choice("none", "block", "model")
    cuda_graphs: bool = False
    reshard_after_forward: bool = True
    blocks_per_unit: int = positive(4)
    bucket_mb: int | None = number(None, least=1)
    replicas: int | None = number(None, least=1)
    offload_optimizer: bool = False
    deepspeed_config: str | None = path()
    start_timeout: float = positive(30.0)
    step_timeout: float = positive(10.0)


@dataclass
class GuardConfig:
    """What is done about steps that go wrong (docs/robustness.md); a run without any does not depend on it.

    A step whose loss or gradient is not finite is skipped. Too many of them roll the run back to a checkpoint, and it
    passes over the batches that led there, or stops.

    ``max_skips``: more than so many in ``window`` steps roll back.
    ``window``: how many steps are looked back upon.
    ``margin``: go back to a checkpoint from so many steps before the first bad one, or more, and pass over the batches
    from so many steps before it on.
    ``max_rollbacks``: what would be the next stops the run; with this and ``max_skips`` at 0 the first bad step does.
    ``spike``: also roll back after ``spike_steps`` losses in a row that are so many standard deviations above the
    median of the last ``window``; null: a loss may be as high as it likes.
    ``spike_steps``: how many of them.
    """

    max_skips: int = number(3, least=0)
    window: int = number(100, least=10)
    margin: int = number(100, least=0)
    max_rollbacks: int = number(2, least=0)
    spike: float | None = number(None, above=0)
    spike_steps: int = positive(3)
