"""Optimizer, engine and guard: how a step is computed and how failed steps are handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, number, numbers, path, positive

_FP16 = "needs loss scaling, which skips steps; use bf16, which has the range of fp32"


@dataclass
class OptimConfig:
    """AdamW and learning-rate schedule.

    base_lr: Base learning rate of a batch of 256 images.
    schedule: Learning-rate schedule after a linear warm-up. cosine, linear: decay to min_lr. multistep: multiply by 0.1
        at each of the milestones.
    milestones: (schedule=multistep) Epochs at which the learning rate is multiplied by 0.1.
    min_lr: (schedule=cosine, linear) Final learning rate; not scaled with the batch size.
    warmup_lr: Initial learning rate of the warm-up; not scaled with the batch size.
    warmup_percent: Length of the learning-rate warm-up, in percent of the run's steps.
    warmup_epochs: Length of the learning-rate warm-up in epochs, in place of warmup_percent. null: use warmup_percent.
    weight_decay: Weight decay of matrices, convolutions and token embeddings; not of biases and norms.
    betas: AdamW betas.
    eps: AdamW epsilon.
    clip_grad: Maximum gradient norm. null: no clipping.
    no_decay: Further parameters without weight decay, by the last component of their name (cls_token, pos_embed).
    """

    base_lr: float = positive(1.5e-4)
    schedule: str = choice("cosine", "multistep", "linear")
    milestones: list[float] = numbers(above=0)
    min_lr: float = number(0.0, least=0)
    warmup_lr: float = number(0.0, least=0)
    warmup_percent: float = number(5.0, least=0, below=100)
    warmup_epochs: float | None = number(None, least=0)
    weight_decay: float = number(0.05, least=0)
    betas: list[float] = numbers(0.9, 0.95, length=2, least=0, below=1)
    eps: float = positive(1e-8)
    clip_grad: float | None = number(None, above=0)
    no_decay: list[str] = field(default_factory=list)


@dataclass
class PretrainOptimConfig(OptimConfig):
    """AdamW and learning-rate schedule.

    base_lr: Base learning rate; lr_rule gives the peak learning rate.
    lr_rule: Peak learning rate. adaptive (the paper's Eq. 4): base_lr * batch_size * m_pred / m_corr / 256. classic:
        base_lr * views * batch_size / 256.
    lr_rates: Mask ratios in lr_rule=adaptive. nominal: the configured ones, such as 0.6. exact: masked tokens / all
        tokens, such as 30/49.
    min_lr: (schedule=cosine, linear) Final learning rate; not scaled by lr_rule.
    warmup_lr: Initial learning rate of the warm-up; not scaled by lr_rule.
    """

    lr_rule: str = choice("adaptive", "classic")
    lr_rates: str = choice("nominal", "exact")


@dataclass
class FinetuneOptimConfig(OptimConfig):
    """AdamW, learning-rate schedule and layer-wise decay of the learning rate. Defaults: MAE's for ViT-B.

    base_lr: Base learning rate; the peak is base_lr * batch_size / 256.
    layer_decay: Layer-wise learning-rate decay: factor from each layer to the one below it. The head has factor 1,
        block i of n (from 0) layer_decay ** (n - i), the embeddings layer_decay ** (n + 1). 1: off.
    """

    base_lr: float = positive(5e-4)
    min_lr: float = number(1e-6, least=0)
    warmup_epochs: float | None = number(5.0, least=0)
    betas: list[float] = numbers(0.9, 0.999, length=2, least=0, below=1)
    no_decay: list[str] = field(default_factory=lambda: ["cls_token", "pos_embed"])
    layer_decay: float = number(0.65, above=0, most=1)


@dataclass
class EngineConfig:
    """Parallelism, precision and compilation (docs/engines.md).

    name: single: one process. ddp: DistributedDataParallel. fsdp: FSDP2. hsdp: FSDP2 hybrid sharding (sharded within a
        replica, gradients averaged across replicas). zero1-zero3: DeepSpeed ZeRO stages. auto: chooses single, ddp,
        fsdp or hsdp, and compile, activation_checkpointing, cuda_graphs and grad_accum_steps, from the device, the
        number of processes and the estimated memory; keys that are set keep their values.
    device: auto: CUDA if available, else CPU.
    precision: Autocast data type. auto: bf16 on CUDA, fp32 on the CPU. Parameters, gradients and optimizer state are
        fp32.
    grad_accum_steps: Micro-batches per optimizer step, each of batch_size / (processes * grad_accum_steps) images per
        process.
    activation_checkpointing: Activations recomputed in the backward pass. none: off. mlp: MLPs. selective: all but
        the outputs of matrix products, attention and convolutions. full: whole blocks.
    compile: torch.compile. none: off. block: each block by itself, short compilation. model: the whole model as one
        graph, faster steps and longer compilation.
    cuda_graphs: (single, ddp) Capture compiled regions as CUDA graphs; helps CPU-bound steps (small batches). Needs
        compile.
    reshard_after_forward: (fsdp, hsdp, zero3) Free gathered parameters after the forward pass and gather them again in
        the backward pass. false: more memory, less communication and CPU time. null: false for models of at most 500
        million parameters. For larger models, fsdp and hsdp: true; zero3: only the 500 million parameters nearest to
        the loss stay.
    blocks_per_unit: (fsdp, hsdp) Consecutive blocks per FSDP unit, gathered and reduced together. null: as many as have
        100 million parameters on one host, 50 million on several.
    bucket_mb: (ddp) Gradient bucket size in MiB. null: 400 on one host, 25 on several.
    replicas: (hsdp) Number of replicas of the sharded model; must divide the number of processes. null: one per host.
    offload_optimizer: (zero1, zero2, zero3) Keep optimizer state and run AdamW in host memory.
    deepspeed_config: (zero1, zero2, zero3) JSON file with further DeepSpeed settings. Keys that dmjd sets itself are
        rejected.
    start_timeout: Timeout of the launch and of collectives, in minutes, until the first step is done.
    step_timeout: Timeout of collectives after the first step, in minutes.
    """

    name: str = choice("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "auto")
    device: str = choice("auto", "cpu", "cuda", rejected={"gpu": "is called cuda"})
    precision: str = choice("auto", "fp32", "bf16", rejected={"fp16": _FP16})
    grad_accum_steps: int = positive(1)
    activation_checkpointing: str = choice("none", "mlp", "selective", "full")
    compile: str = choice("none", "block", "model")
    cuda_graphs: bool = False
    reshard_after_forward: bool | None = None
    blocks_per_unit: int | None = number(None, least=1)
    bucket_mb: int | None = number(None, least=1)
    replicas: int | None = number(None, least=1)
    offload_optimizer: bool = False
    deepspeed_config: str | None = path()
    start_timeout: float = positive(30.0)
    step_timeout: float = positive(10.0)


@dataclass
class GuardConfig:
    """Handling of non-finite losses and loss spikes (docs/robustness.md).

    A step with a non-finite loss or gradient is skipped. Too many of them roll the run back to a checkpoint and skip
    the batches that led there. Without such steps the results do not depend on these keys.

    max_skips: Roll back after more than this many skipped steps within the window.
    window: Window in steps, for max_skips and spike.
    margin: Margin of a rollback, in steps. The run returns to a checkpoint at least this many steps before the first
        skipped or high-loss step. It then skips the batches from this many steps before that step to the last such
        step.
    max_rollbacks: Abort after this many rollbacks. 0 together with max_skips=0 aborts at the first non-finite step.
    spike: Also roll back when the loss exceeds the window's median by this many standard deviations for spike_steps
        steps in a row. null: off.
    spike_steps: Consecutive steps of high loss that make a spike.
    """

    max_skips: int = number(3, least=0)
    window: int = number(100, least=10)
    margin: int = number(100, least=0)
    max_rollbacks: int = number(2, least=0)
    spike: float | None = number(None, above=0)
    spike_steps: int = positive(3)
